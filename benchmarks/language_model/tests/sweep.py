"""Every mesh over 8 devices: gradients of several models, and fifty steps. Minutes of work.

    nox -s tests -- benchmarks/language_model/tests/sweep.py

A normal test run does not collect it.
"""

from itertools import product
from math import prod
from random import Random

import jax
import numpy as np
import pytest

from language_model.config import Training
from language_model.parallel import AXES, build_mesh, place_batch
from language_model.tests.cases import (
    check_float32,
    check_float64,
    draw_batch,
    draw_weights,
    model,
    place,
    reference_curve,
)
from language_model.train import Trainer

MESHES = [
    ",".join(f"{name}={size}" for name, size in zip(AXES, sizes, strict=True))
    for sizes in product((1, 2, 4, 8), repeat=len(AXES))
    if prod(sizes) == 8 and sizes[AXES.index("ep")] == sizes[AXES.index("pp")] == 1
]
EXPERT_MESHES = (
    *("dp=8", "ep=8", "dp=2,ep=4", "ep=4,tp=2", "tp=4,ep=2", "fsdp=4,ep=2", "cp=4,ep=2"),
    *("fsdp=2,ep=2,tp=2", "ep=2,dp=2,fsdp=2", "cp=2,ep=2,tp=2", "ep=3", "tp=2,ep=3"),
)
PIPELINES = (  # the mesh, virtual stages, layers, and whether there are experts
    ("pp=8", 1, 8, False),
    ("pp=4,tp=2", 2, 8, False),
    ("pp=2,dp=2,fsdp=2", 3, 6, False),
    ("pp=2,cp=2,tp=2", 1, 4, False),
    ("pp=2,fsdp=2,cp=2", 2, 4, False),
    ("pp=3,tp=2", 1, 3, False),
    ("pp=2,ep=4", 2, 4, True),
    ("pp=2,ep=2,tp=2", 1, 2, True),
    ("pp=2,fsdp=2,ep=2", 2, 4, True),
)
DISPATCHES = ("auto", "ragged", "all_gather")
MODES = ("auto", "naive", "unidirectional", "bidirectional")


def draw_model(draw, dtype="float64", layers=None, **more):
    """Sizes of which few are divided by what a mesh has."""
    kv_heads = draw.choice((1, 2, 3, 5, 8))
    return model(
        heads=kv_heads * draw.choice((1, 2, 3)),
        kv_heads=kv_heads,
        vocabulary=draw.randint(9, 40),
        hidden=draw.randint(3, 30),
        tied=draw.random() < 0.5,
        layers=layers or draw.choice((1, 2, 3)),
        dtype=dtype,
        **more,
    )


def draw_experts(draw, dtype="float64", **more):
    """A model in which some devices of a mesh have an expert less than others, or none."""
    count = draw.randint(2, 11)
    return draw_model(draw, dtype, experts=count, top_k=draw.randint(1, min(count, 4)), **more)


def test_there_are_twenty_meshes():
    assert len(MESHES) == 20


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("mesh", MESHES)
def test_float64(mesh, number):
    draw = Random(f"{mesh} {number}")
    with jax.enable_x64(True):
        check_float64(
            mesh,
            draw_model(draw),
            microbatches=draw.choice((1, 1, 2, 3)),
            mode=draw.choice(MODES),
            batch=draw.randint(1, 9),
            sequence=draw.randint(2, 33),
            seed=number,
        )


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_experts(mesh, dispatch):
    draw = Random(f"{mesh} {dispatch}")
    with jax.enable_x64(True):
        check_float64(
            mesh,
            draw_experts(draw),
            mode=draw.choice(MODES),
            dispatch=dispatch,
            batch=draw.randint(1, 9),
            sequence=draw.randint(2, 33),
        )


@pytest.mark.parametrize(("mesh", "virtual_stages", "layers", "has_experts"), PIPELINES)
def test_pipelines(mesh, virtual_stages, layers, has_experts):
    draw = Random(mesh)
    with jax.enable_x64(True):
        check_float64(
            mesh,
            (draw_experts if has_experts else draw_model)(draw, layers=layers),
            microbatches=1 if has_experts else draw.choice((1, 2, 3, 5)),
            mode=draw.choice(MODES),
            dispatch=draw.choice(DISPATCHES),
            virtual_stages=virtual_stages,
            batch=draw.randint(1, 9),
            sequence=draw.randint(2, 33),
        )


@pytest.mark.parametrize("mesh", EXPERT_MESHES)
def test_experts_in_float32(mesh):
    with jax.enable_x64(True):  # of the reference
        check_float32(mesh, draw_experts(Random(mesh), "float32"))


@pytest.mark.parametrize("mesh", MESHES)
def test_float32(mesh):
    with jax.enable_x64(True):  # of the reference
        check_float32(mesh, draw_model(Random(mesh), "float32"))


@pytest.mark.parametrize(
    ("mesh", "draw"),
    [(mesh, draw_model) for mesh in MESHES] + [(mesh, draw_experts) for mesh in EXPERT_MESHES],
)
def test_fifty_steps(mesh, draw):
    training = Training(steps=50, warmup=5, clip=0.5)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        trainer = Trainer(draw(Random(f"{mesh} steps")), training, build_mesh(mesh))
        batches = [draw_batch(trainer.model, seed=step) for step in range(training.steps)]
        params = draw_weights(trainer.model)
        losses, _ = reference_curve(trainer, params, batches)
        state = trainer.init() | {"params": place(trainer, params)}
        for batch, want in zip(batches, losses, strict=True):
            state, found = trainer.step(state, *place_batch(batch, trainer.mesh))
            np.testing.assert_allclose(found["loss"], want, rtol=1e-10)
