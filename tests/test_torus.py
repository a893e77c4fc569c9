"""The order of the devices of TPU slices: one link where there is one, and where there is none."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from math import prod

import numpy as np
import pytest

from jaxpar import make_mesh, ring_hops
from jaxpar.mesh import ring_orders

V5E, V4, V5P, V7 = "TPU v5 lite", "TPU v4", "TPU v5", "TPU7x"


@pytest.fixture(autouse=True, scope="module")
def cycles_once():
    """Many meshes have an axis over the same torus, whose cycles take long to find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_orders, "disjoint_cycles", cache(ring_orders.disjoint_cycles))
        yield


@dataclass(frozen=True, eq=False)
class Chip:
    coords: tuple[int, ...]
    device_kind: str
    core_on_chip: int = 0
    slice_index: int | None = None


def cores_of(kind):
    return 2 if kind in (V4, V7) else 1


def wraps_of(kind, box):
    """Which dimensions close: of v5e each on its own, of others all of whole cubes."""
    if kind == V5E:
        return tuple(size == 16 for size in box)
    return (all(size % 4 == 0 for size in box),) * len(box)


@cache
def devices_of(kind, box, slice_index=None):
    places = product(*map(range, box), range(cores_of(kind)))
    return [Chip(tuple(place), kind, core, slice_index) for *place, core in places]


def longest(kind, box, shape):
    """The longest step on each axis of a mesh; checks that every device is there once."""
    devices = devices_of(kind, box)
    axes = dict(zip("abcd", shape, strict=False))
    mesh = make_mesh(axes, devices=devices[::-1])
    assert Counter(mesh.devices.flat) == Counter(devices)
    if shape[0] <= 2:  # whatever their order: they are sorted before axes are looked at
        assert (mesh.devices == make_mesh(axes, devices=devices).devices).all()
    return tuple(int(ring_hops(mesh, name).max()) for name in axes)


def shapes(n, axes):
    if axes == 1:
        return [(n,)]
    sizes = [size for size in range(1, n + 1) if n % size == 0]
    return [(size, *rest) for size in sizes for rest in shapes(n // size, axes - 1)]


def whole_dimensions(shape, box, wraps, cores=1):
    """Whether whole dimensions make up the axes: for one device a chip, whether one link exists."""
    dims = [(cores, cores == 2)]
    for size, around in zip(box, wraps, strict=True):
        dims += [(2, True)] * 2 if around and size == 4 else [(size, around or size == 2)]
    return deal(shape, tuple(sorted(dim for dim in dims if dim[0] > 1)))


@cache
def deal(axes, dims):
    if not axes:
        return not dims
    for count in range(len(dims) + 1):
        for chosen in combinations(range(len(dims)), count):
            sizes = [dims[i][0] for i in chosen]
            ring = axes[0] % 2 == 0 if count > 1 else all(dims[i][1] for i in chosen)
            left = tuple(dim for i, dim in enumerate(dims) if i not in chosen)
            if prod(sizes) == axes[0] and ring and deal(axes[1:], left):
                return True
    return False


FLAT = [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
SMALL = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (2, 2, 8), (2, 4, 8), (2, 8, 8)]
LARGE = [(4, 4, 4), (4, 4, 8), (4, 4, 12), (4, 4, 16), (4, 8, 8)]
SLICES = [
    *((V5E, box) for box in FLAT),
    *((V5P, box) for box in SMALL + LARGE),
    *(
        (V4, box) for box in [*SMALL, *LARGE[:4:2]]
    ),  # with two devices a chip, of the large ones two
    *((V7, box) for box in [*SMALL[:4], LARGE[0]]),  # as v4
]


# All other meshes of two axes have rings of one link on both axes. With one device a chip there is
# no such order (see the next test); the longest steps are those of the order that is taken.
LONGER = {
    # Parts of a cube close nowhere.
    (V5P, (2, 2, 4)): {(4, 4): (2, 1)},
    (V5P, (2, 4, 4)): {(4, 8): (2, 1), (8, 4): (2, 1)},
    (V5P, (2, 2, 8)): {(4, 8): (4, 1), (8, 4): (2, 1)},
    (V5P, (2, 4, 8)): {(4, 16): (2, 1), (8, 8): (2, 1), (16, 4): (2, 1)},
    (V5P, (2, 8, 8)): {(4, 32): (4, 1), (8, 16): (2, 1), (16, 8): (2, 1), (32, 4): (2, 1)},
    (V4, (2, 2, 8)): {(8, 8): (2, 1)},
    (V4, (2, 8, 8)): {(8, 32): (2, 1), (32, 8): (2, 1)},
    # Sizes of 3 and 6 would need a part of the dimension of 12.
    (V5P, (4, 4, 12)): {(3, 64): (4, 1), (6, 32): (2, 1), (32, 6): (3, 1), (64, 3): (1, 4)},
    # With two devices a chip, that there is no such order is not shown. Rings of three would be of
    # one link with both devices of a chip and one of the next.
    (V4, (4, 4, 12)): {(3, 128): (4, 1), (6, 64): (2, 1), (64, 6): (3, 1), (128, 3): (1, 4)},
}


@pytest.mark.parametrize(("kind", "box"), SLICES)
def test_one_link_wherever_whole_dimensions_make_up_the_axes(kind, box):
    cores, wraps = cores_of(kind), wraps_of(kind, box)
    found = {shape: longest(kind, box, shape) for shape in shapes(prod(box) * cores, 2)}
    longer = {shape: hops for shape, hops in found.items() if max(hops) > 1}
    for shape, (_, last) in found.items():
        assert (shape not in longer) == whole_dimensions(shape, box, wraps, cores), shape
        # A grid has no odd ring; an even one is closed within a tile of two sides.
        assert (last <= 1) == (shape[1] % 2 == 0 or shape[1] == 1), shape
    if len(box) == 3:
        assert longer == LONGER.get((kind, box), {})


@pytest.mark.parametrize("box", FLAT)
def test_a_flat_slice_has_two_axes_of_one_link_only_as_two_by_two_or_as_its_full_torus(box):
    # A chip at a corner of 8 x 8 and smaller has two links: enough for one ring or two pairs. On
    # 8 x 16 and 16 x 16 a ladder of squares runs straight on and closes after 16.
    found = [shape for shape in shapes(prod(box), 2) if 1 not in shape]
    short = [shape for shape in found if max(longest(V5E, box, shape)) == 1]
    assert short == {(2, 2): [(2, 2)], (16, 16): [(16, 16)]}.get(box, [])


@pytest.mark.parametrize(("kind", "box"), SLICES)
def test_one_link_on_three_axes_wherever_whole_dimensions_make_them_up(kind, box):
    cores, wraps = cores_of(kind), wraps_of(kind, box)
    found = [shape for shape in shapes(prod(box) * cores, 3) if 1 not in shape]
    if kind == V4 and box in LARGE:  # with one device a chip all are looked at
        found = found[::3]
    for shape in found:
        hops = longest(kind, box, shape)
        assert (max(hops) <= 1) == whole_dimensions(shape, box, wraps, cores), shape
        assert (hops[2] <= 1) == (shape[2] % 2 == 0), shape


@cache
def embeds(sizes, box, wraps, cores):
    """Looks at every order of a box for one in which all rings of all axes are of one link."""
    places = list(product(*map(range, box), range(cores)))
    links = {place: set() for place in places}
    for a, b in product(places, places):
        apart = [abs(x - y) for x, y in zip(a[:-1], b[:-1], strict=True)]
        apart = [min(x, n - x) if w else x for x, n, w in zip(apart, box, wraps, strict=True)]
        if a != b and sum(apart) <= 1:
            links[a].add(b)
    numbers = np.arange(len(places)).reshape(sizes)
    near = [set() for _ in places]  # of each position, those before it that are next to it
    for axis in range(len(sizes)):
        for a, b in zip(numbers.flat, np.roll(numbers, -1, axis).flat, strict=True):
            near[max(a, b)] |= {min(a, b)} - {max(a, b)}
    # An order may be mirrored along any dimension: it begins in the lower half of each.
    halves = [range((size + 1) // 2) for size in (*box, cores)]
    order = []

    def complete():
        if len(order) == len(places):
            return True
        starts = places if order else product(*halves)
        free = set(starts).intersection(*(links[order[a]] for a in near[len(order)]))
        for place in sorted(free.difference(order)):
            order.append(place)
            if complete():
                return True
            order.pop()
        return False

    return complete()


FLAT_BOXES = [(2, 2), (2, 4), (4, 4), (3, 3), (2, 6), (3, 4), (2, 8), (2, 12), (5, 4)]
BOXES = [(8, 1, 1), (12, 1, 1), (2, 2, 2), (2, 2, 3), (2, 2, 4), (2, 2, 5), (2, 4, 4), (2, 2, 8)]
PAIRS = [(2, 1, 1), (3, 1, 1), (4, 1, 1), (8, 1, 1), (2, 2, 1), (2, 3, 1), (2, 4, 1), (2, 2, 2)]


@pytest.mark.parametrize(
    ("kind", "box"),
    [
        *((V5E, box) for box in [*FLAT_BOXES, (1, 16)] if prod(box) <= 16),
        *((V5P, (*box, 1)) for box in FLAT_BOXES),
        *((V5P, box) for box in BOXES),
        *((V4, box) for box in PAIRS),
    ],
)
def test_no_other_order_has_one_link_where_whole_dimensions_do_not_make_up_the_axes(kind, box):
    cores, wraps = cores_of(kind), wraps_of(kind, box)
    for axes in (1, 2, 3):
        for shape in shapes(prod(box) * cores, axes):
            # Which axis is which makes no difference to whether there is such an order.
            sizes = tuple(sorted(size for size in shape if size > 1))
            exists = embeds(sizes, box, wraps, cores)
            assert exists == whole_dimensions(shape, box, wraps, cores), shape
            assert exists == (max(longest(kind, box, shape)) <= 1), shape


def test_a_line_without_a_link_back_is_folded():
    assert longest(V5P, (1, 1, 5), (5,)) == (2,)
    assert longest(V5E, (1, 8), (8,)) == (2,)
    assert longest(V5E, (3, 3), (9,)) == (2,)


def test_the_devices_of_a_chip_go_to_the_last_axis_that_can_use_them():
    mesh = make_mesh("dp=4,tp=4", devices=devices_of(V7, (2, 2, 2)))
    np.testing.assert_array_equal(ring_hops(mesh, "tp").sum(axis=1), [2] * 4)


def test_slices_go_to_the_first_axes_and_are_alike():
    slices = [devices_of(V5E, (2, 4), number) for number in range(4)]
    mixed = [chip for chips in zip(*slices, strict=True) for chip in chips]
    mesh = make_mesh("pp=2,dp=4,tp=4", devices=mixed)
    assert Counter(mesh.devices.flat) == Counter(mixed)
    number = np.vectorize(lambda chip: chip.slice_index)(mesh.devices)
    assert (number == np.array([[0, 0, 1, 1], [2, 2, 3, 3]])[..., None]).all()
    alike = make_mesh("dp=2,tp=4", devices=slices[0]).devices
    for chip, expected in zip(mesh.devices[1, 2:].flat, alike.flat, strict=True):
        assert chip.coords == expected.coords
    assert (ring_hops(mesh, "tp") == 1).all()
    with pytest.raises(ValueError, match=r"'dp' joins the slices \[0, 1\], .* stay within a slice"):
        ring_hops(mesh, "dp")


def test_devices_that_are_no_box_keep_their_order():
    devices = devices_of(V5E, (2, 4))
    uneven = [*devices_of(V5E, (2, 2), 0), *devices_of(V5E, (1, 4), 1)]
    twice = [*devices[:-1], devices[0]]
    for some in ([devices[i] for i in (7, 1, 0)], [*devices[:3], devices[7]], uneven, twice):
        mesh = make_mesh({"tp": len(some)}, devices=some)
        assert list(mesh.devices) == list(some)
