"""Values as text: equal ones have the same, and others differ where they do."""

import collections
import dataclasses
import enum
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, make_mesh
from jaxpar.processes.text import lines_of


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float = 1e-3
    act: Any = jax.nn.gelu
    axes: frozenset = frozenset({"embed", "heads", "mlp"})
    cache: Any = dataclasses.field(default=None, compare=False)


class Plain:
    """Holds itself, and a method of its own."""

    def __init__(self, rate):
        self.rate, self.itself, self.step = rate, self, self.go

    def go(self):
        return self.rate

    @functools.cached_property
    def place(self):
        return id(self)


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Unpicklable:
    def __reduce_ex__(self, protocol):
        raise TypeError("no")


def closure(k):
    def f(x):
        return f(x - 1) * k if x in {"a", "b"} else 0

    return f


def squared(of):
    @jax.custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), lambda _, ct: (of * ct,))
    return f


def plain(rate):
    made = Plain(rate)
    assert made.place
    return made


MESH = make_mesh("tp=8")

# Of each kind what makes a value of a number: equal for equal ones.
MAKERS = {
    "number": lambda n: {"x": [n, (n,)]},
    "float": lambda n: {"x": 1.0 if n else float("nan")},
    "numpy scalar": lambda n: {"x": np.float32(n)},
    "bfloat16": lambda n: jnp.bfloat16(n),
    "host array": lambda n: np.full((3, 2), n),
    "large array": lambda n: np.append(np.zeros(10_000, "float32"), n),
    "objects": lambda n: np.array([1, n, None], object),
    "device array": lambda n: jnp.full((100, 100), n, jnp.bfloat16),
    "sharded array": lambda n: jax.device_put(np.arange(16.0) * n, NamedSharding(MESH, P("tp"))),
    "key": jax.random.key,
    "legacy key": jax.random.PRNGKey,
    "shape": lambda n: jax.ShapeDtypeStruct((3, n), "float32"),
    "dtype": lambda n: [np.dtype("int8"), np.dtype("int16")][n],
    "type": lambda n: [jnp.float32, jnp.bfloat16][n],
    "module": lambda n: [jnp, np][n],
    "mesh": lambda n: make_mesh(["tp=8", "tp=4,dp=2"][n]),
    "axis types": lambda n: jax.sharding.AbstractMesh(
        (8,), ("tp",), axis_types=([jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit][n],)
    ),
    "sharding": lambda n: NamedSharding(MESH, [P("tp"), P()][n]),
    "axis": lambda n: Axis("tp", wire_dtype=[None, "int8"][n]),
    "enum": lambda n: [Color.RED, Color.BLUE][n],
    "string": lambda n: {"name": f"run{n}"},
    "bytes": lambda n: bytes([n]),
    "dataclass": lambda n: Config(rate=n, cache=object()),
    "dataclass with a function": lambda n: Config(act=[jax.nn.gelu, jax.nn.silu][n]),
    "set": lambda n: {("a", 1 + n), ("b", 2 - n)},
    "set of dataclasses": lambda n: {Config(), Config(rate=n)},
    "keys that are no strings": lambda n: {(1, n): 1, "(1, n)": 2, 0: 3},
    "types of containers": lambda n: [[1, 2], (1, 2)][n],
    "empty": lambda n: [{}, []][n],
    "plain object": plain,
    "slots": Slotted,
    "deque": lambda n: collections.deque([1, n]),
    "counter": lambda n: collections.Counter(a=n),
    "random": random.Random,
    "generator": np.random.default_rng,
    "lambda": lambda n: [lambda x: x + 1, lambda x: x + 2][n],
    "another name": lambda n: [lambda x: jnp.sin(x), lambda x: jnp.cos(x)][n],
    "closure": closure,
    "nested function": lambda n: lambda x: [lambda y: y * 2, lambda y: y * n],
    "defaults": lambda n: lambda x, k=n: x * k,
    "keyword defaults": lambda n: lambda x, *, k=n: x * k,
    "partial": lambda n: functools.partial(closure(2), n),
    "method": lambda n: Plain(n).go,
    "method that is compiled": lambda n: [n].append,
    "jitted": lambda n: jax.jit(closure(n)),
    "custom_vjp": squared,
    "optimizer": lambda n: optax.chain(
        optax.clip(1.0), optax.adamw(optax.linear_schedule(n, 2, 3))
    ),
    "traced program": lambda n: jax.make_jaxpr(lambda x: x * n)(1.0),
    "program": lambda n: {"step": jax.jit([jnp.sin, jnp.cos][n]).lower(1.0)},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_values_that_are_equal_or_not(kind):
    make = MAKERS[kind]
    assert lines_of(make(1)) == lines_of(make(1))
    assert lines_of(make(0)) == lines_of(make(0))
    assert lines_of(make(0)) != lines_of(make(1))


def test_what_differs_is_named():
    zero, one = (lines_of({"model": [Config(rate=rate)]}) for rate in (0, 1))
    assert [pair for pair in zip(zero, one, strict=True) if pair[0] != pair[1]] == [
        ("model/0/rate: 0", "model/0/rate: 1")
    ]


def test_what_cannot_be_looked_into_prints_itself():
    text = lines_of({"x": Unpicklable(), "y": (i for i in range(3))})
    assert "Unpicklable object at ..." in text[0]
    assert "<generator object" in text[1]
    assert not [line for line in text if "0x" in line]


def test_an_array_that_was_donated():
    x = jnp.ones(3)
    x.delete()
    assert lines_of({"x": x}) == ["x: float32[3] ", "x: deleted, or donated"]


def test_the_same_container_twice_is_as_equal_ones():
    shared = [1]
    assert lines_of([shared, shared]) == lines_of([[1], [1]])


def test_containers_that_hold_themselves():
    def made():
        x: list[Any] = [1]
        x.append({"x": x})
        return x

    assert lines_of(made()) == lines_of(made())
    assert "as all of it" in lines_of(made())[-1]


def test_a_long_chain_of_objects():
    def chain(n):
        made = Plain(0)
        for _ in range(n):
            made, made.next = Plain(0), made
        return made

    assert lines_of(chain(3000)) == lines_of(chain(3000))
