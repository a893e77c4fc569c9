"""Gathers in 8 bits: what travels so, and how little it changes."""

from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxpar import LowBit
from jaxpar.compiler.jaxprs import subjaxprs
from language_model import curves, wire
from language_model.config import Model, Training
from language_model.parallel import build_mesh
from language_model.predict import step_on
from language_model.tests.cases import TRAINING, draw_batch, draw_weights, loss_and_gradients
from language_model.train import Trainer

# The MLP's matrices are 257 KiB as whole, those of attention and the table are less.
SIZES = Model(40, width=64, layers=2, heads=2, kv_heads=2, head_size=32, hidden=2056)


def gathered(sizes, mesh="fsdp=2,tp=2", how=None, dispatch="auto"):
    """How often a step gathers arrays with rows of 32 numbers or more, by axis and dtype."""
    training = Training(batch=4, sequence=8)
    with jax.numpy_dtype_promotion("standard"):  # as optax relies on it
        step, args = step_on(build_mesh(mesh), sizes, training, wire_dtype=how, dispatch=dispatch)
        return Counter(_gathers(jax.make_jaxpr(step)(*args).jaxpr))


def _gathers(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "all_gather":
            (x,) = eqn.invars
            if x.aval.ndim > 1 and x.aval.shape[-1] >= 32:
                yield eqn.params["axis_name"][0], str(x.aval.dtype)
        for inner in subjaxprs(eqn.params):
            yield from _gathers(inner)


def test_what_travels_in_8_bits():
    plain = gathered(SIZES)
    low = gathered(SIZES, how=LowBit("int8"))
    exact = gathered(SIZES, how=LowBit("int8", cotangents=False))
    # Forward and backward gather three matrices of the MLP; four of attention share a bucket.
    assert low["fsdp", "int8"] == exact["fsdp", "int8"] == 6
    assert low["fsdp", "float32"] == plain["fsdp", "float32"] - 6 == 3
    # Two cotangents a layer; what is looked up in the table has one that travels as it is.
    assert plain["tp", "int8"] == 0
    assert low["tp", "int8"] == exact["tp", "int8"] + 2
    assert low["tp", "float32"] == 1


def test_experts_travel_in_8_bits():
    sizes = replace(SIZES, hidden=8, experts=4)
    assert gathered(sizes, "ep=2,tp=2", LowBit("int8"), "all_gather")["ep", "int8"] > 0


@pytest.fixture(scope="module")
def exact():
    """A trainer, what it takes, and its loss and gradients."""
    sizes = replace(SIZES, hidden=64, layers=1)
    trainer = Trainer(sizes, TRAINING, build_mesh("tp=2"))
    given = draw_weights(sizes), draw_batch(sizes, 4, 8)
    return trainer, given, loss_and_gradients(trainer, *given)


@pytest.mark.parametrize(
    ("how", "at_most"),
    [
        (LowBit("int8", columns=16, cotangents=False), 0.03),
        (LowBit("float8_e4m3fn"), 0.1),
    ],
)
def test_gradients_are_near_the_exact_ones(how, at_most, exact):
    trainer, given, (want, truth) = exact
    got, found = loss_and_gradients(replace(trainer, wire_dtype=how), *given)
    assert abs(got / want - 1) < 0.01
    for a, b in zip(*map(jax.tree.leaves, (found, truth)), strict=True):
        apart = np.linalg.norm(a - b) / np.linalg.norm(b)
        assert 1e-4 < apart < at_most


def test_a_log_says_how_it_travelled():
    run = {"mesh": "tp=2", "model": {"dtype": "float32"}}
    for how, text in (
        (None, ""),
        (LowBit("int8"), ", gathers in int8"),
        (LowBit("int8", 128), ", gathers in int8 in blocks of 128"),
        (LowBit("float8_e4m3fn", cotangents=False), ", gathers in float8_e4m3fn, exact cotangents"),
    ):
        written = wire.to_json(how)
        assert wire.from_json(written) == how
        assert wire.describe(how) == text
        assert curves.label({**run, "wire_dtype": written}) == f"tp=2, float32{text}"
    assert curves.label(run) == "tp=2, float32"  # of a log from before there was any
