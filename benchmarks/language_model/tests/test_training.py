"""Fifty steps have one curve on any mesh, and checkpoints carry it from one to another."""

import tarfile
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpar.tools.cli.console import UsageError
from language_model.checkpoint import Checkpoints
from language_model.config import Model, Training
from language_model.data import Text
from language_model.parallel import build_mesh, place_batch
from language_model.run import run
from language_model.tests.cases import (
    draw_batch,
    draw_weights,
    model,
    place,
    quick_experts,
    reference_curve,
)
from language_model.train import Trainer

TRAINING = Training(steps=50, batch=5, sequence=13, warmup=5, clip=0.5, validation_batches=1)


@pytest.fixture(autouse=True)
def arithmetic():
    """float64; and the usual promotion, as optax relies on it."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def test_fifty_steps():
    """In microbatches; `test_processes.py` does as much over cp=2,tp=2."""
    chosen, microbatches = model(heads=3, kv_heads=1), 2
    trainer = Trainer(chosen, TRAINING, build_mesh("dp=2,fsdp=2,tp=2"), microbatches)
    params = draw_weights(chosen)
    batches = [draw_batch(chosen, seed=step) for step in range(50)]
    losses, last = reference_curve(trainer, params, batches)

    state = trainer.init() | {"params": place(trainer, params)}
    norms = []
    for batch, want in zip(batches, losses, strict=True):
        state, found = trainer.step(state, *place_batch(batch, trainer.mesh, microbatches))
        np.testing.assert_allclose(found["loss"], want, rtol=1e-10)
        norms.append(float(found["gradient_norm"]))
    assert min(norms[:10]) > TRAINING.clip  # so that clipping is among what agrees
    assert int(state["step"]) == 50
    pairs = zip(*map(jax.tree.leaves, (state["params"], trainer.layout.pad(last))), strict=True)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, atol=1e-8)


@pytest.fixture
def text():
    tokens = np.random.default_rng(0).integers(0, 23, 400).astype(np.uint16)
    return Text(tokens[:300], tokens[300:])


def test_saved_on_one_mesh_and_resumed_on_another(tmp_path, text, monkeypatch):
    """From a pipeline to a mesh with an expert of padding, and back.

    Devices of the pipeline have layers 0, 2 and 1, 3; checkpoints and loads have the model's order.
    `test_processes.py` goes from fsdp=3 to cp=2,tp=2.
    """
    sizes = model(heads=3, kv_heads=1, layers=4, experts=6)
    quick_experts(monkeypatch)
    training, how = replace(TRAINING, steps=12), {"microbatches": 2, "dispatch": "all_gather"}
    plain = Trainer(sizes, training, build_mesh("ep=4"), **how)
    pipelined = Trainer(sizes, training, build_mesh("pp=2,fsdp=2,ep=2"), virtual_stages=2, **how)
    whole = run(plain, text, stop=12)
    folder = str(tmp_path / "run")
    with monkeypatch.context() as patch:  # held-out text takes a program of its own
        patch.setattr("language_model.run.validate", lambda *_: None)
        first = run(pipelined, text, stop=3, checkpoint=folder)
        second = run(plain, text, stop=7, checkpoint=folder, save_every=3)
    last = run(pipelined, text, stop=12, checkpoint=folder)
    assert (len(first.losses), len(second.losses), len(last.losses)) == (3, 7, 12)
    assert second.losses[:3] == first.losses
    assert last.losses[:7] == second.losses
    np.testing.assert_allclose(last.losses, whole.losses, rtol=1e-10)
    np.testing.assert_allclose(last.validation, whole.validation, rtol=1e-10)
    assert len(last.experts) == 12
    for resumed, never_stopped in zip(last.experts, whole.experts, strict=True):
        assert resumed["loads"] == never_stopped["loads"]
        assert len({tuple(layer) for layer in resumed["loads"]}) == 4  # no two layers alike
        np.testing.assert_allclose(resumed["entropy"], never_stopped["entropy"], rtol=1e-10)
    assert sorted(int(path.name) for path in (tmp_path / "run").iterdir()) == [7, 12]

    other = replace(plain, training=replace(plain.training, clip=2.0))
    with pytest.raises(UsageError, match=r"is of another run: clip 0.5 there, 2.0 here; give what"):
        Checkpoints(folder, other, text.digest).restore()


def test_a_checkpoint_of_0_4_0_goes_on(tmp_path, text):
    """Two steps on fsdp=2,tp=2, and the losses of those that 0.4.0 went on with."""
    with tarfile.open(Path(__file__).with_name("checkpoint_of_0_4_0.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    sizes = {"width": 8, "layers": 1, "heads": 3, "kv_heads": 1, "head_size": 2, "hidden": 5}
    training = Training(steps=4, batch=4, sequence=8, validation_batches=0, warmup=1)
    trainer = Trainer(Model(vocabulary=23, **sizes), training, build_mesh("fsdp=2,tp=4"))
    losses = run(trainer, text, stop=4, checkpoint=str(tmp_path)).losses
    expected = [3.147157669067383, 3.1157915592193604, 3.145320415496826, 3.1354281902313232]
    assert losses[:2] == expected[:2]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_padding_goes_and_comes_back():
    trainer = Trainer(model(heads=3, kv_heads=1), TRAINING, build_mesh("fsdp=2,tp=4"))
    state = trainer.init()
    logical = trainer.of_state.unpad(state)
    described = jax.tree.map(lambda x: (x.shape, x.dtype), trainer.of_state.logical_shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), logical) == described
    moments = logical["optimizer"][1][0]
    for tree in (logical["params"], moments.mu, moments.nu):
        assert tree["layers"]["query"].shape == (2, 16, 12)
    back = trainer.of_state.pad(logical)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    for x, sharding in zip(*map(jax.tree.leaves, (back, trainer.of_state.shardings)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)


def test_without_padding_nothing_is_copied():
    trainer = Trainer(model(8, 8, 24, 16), TRAINING, build_mesh("fsdp=2,tp=4"))
    state = trainer.init()
    for x, same in zip(*map(jax.tree.leaves, (state, trainer.of_state.unpad(state))), strict=True):
        assert same is x
