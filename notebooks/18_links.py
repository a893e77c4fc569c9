# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 18. Every link of a torus
#
# A chip on a plane of a torus has four links. A ring uses only two of them. Two rings that share no
# link use all four: `mode="multi-ring"`. This notebook draws, checks and compiles them:
#
# 1. the idle links of one ring
# 2. two rings that share no link
# 3. other rectangles and a cube
# 4. the transfers of each step
# 5. the same result
# 6. timelines and floors
# 7. the choice of `"auto"`
#
# Sixteen CPU devices represent a plane of 4 x 4. Times come from a model of the chip
# ([schedules](14_schedules.ipynb)). **They are not measured.** The stored times are of jax 0.12.0.1
# and libtpu 0.0.50.1; other versions give other times. See also the page [Use every link, send
# fewer bits](../docs/links.md).

# %%
# Before anything else touches JAX: the number of devices is fixed when the backend starts.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)

# %%
import tempfile
from itertools import pairwise
from math import prod

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.ring.steps import gather_steps  # internal; used here to draw the program
from jaxpar.schedule import compile_for, matmul_floor, target, timeline

plt.rcParams.update({"figure.dpi": 150, "font.size": 11})
RINGS = ("#0072B2", "#E69F00")  # each ring has a colour and a dash
DASHES = ("solid", (0, (2.2, 0.9)))

# %% [markdown]
# ## 1. The idle links of one ring
#
# A torus is a grid whose rows and columns are rings. A *wrap-around* link joins the last device of
# a row or column to the first. The code writes a link as a pair of devices:


# %%
def links_of_torus(sizes):
    grid = np.arange(prod(sizes)).reshape(sizes)
    ends = [zip(grid.flat, np.roll(grid, -1, dim).flat, strict=True) for dim in range(grid.ndim)]
    return {frozenset(map(int, link)) for along in ends for link in along}


def links_of_walk(walk):
    return [frozenset(link) for link in pairwise([*walk.tolist(), int(walk[0])])]


def rings_of(*sizes):
    mesh = AbstractMesh(sizes, ("x", "y", "z")[: len(sizes)])
    return jaxpar.edge_disjoint_rings(mesh, mesh.axis_names)


one, other = rings_of(4, 4)
idle = links_of_torus((4, 4)) - set(links_of_walk(one))
print(f"{len(links_of_torus((4, 4)))} links; one ring takes {len(set(links_of_walk(one)))}")
print("one walk:", *one)
assert len(idle) == 16
assert all(sum(device in link for link in idle) == 2 for device in range(16))  # two at each device

# %% [markdown]
# A ring is a walk through all devices that returns to its start: a *Hamiltonian cycle*. It uses one
# link to the next device and one to the previous device. The other two links are idle for the
# entire collective.
#
# ## 2. Two rings that share no link
#
# The idle links of the first ring form a second ring. `jaxpar.edge_disjoint_rings` returns both.
# Cycles that share no link are called *edge-disjoint*.

# %%
taken = links_of_walk(one) + links_of_walk(other)
assert sorted(one) == sorted(other) == list(range(16))  # each ring visits all devices
assert len(taken) == len(set(taken)) == 32  # no link is used twice
assert set(taken) == links_of_torus((4, 4))  # together they use all links


# %% jupyter={"source_hidden": true} tags=["drawing", "docs/links_rings.png"]
def draw_torus(panel, sizes, walks, title):
    """A torus with walks on it; links that no walk takes are thin."""
    rows, columns = sizes
    drawn = {link for walk in walks.values() for link in links_of_walk(walk)}
    for a, b in map(sorted, links_of_torus(sizes) - drawn):
        draw_link(panel, columns, a, b, color="0.75", lw=0.8)
    for ring, walk in walks.items():
        for a, b in zip(walk, np.roll(walk, -1), strict=True):
            draw_link(panel, columns, a, b, True, color=RINGS[ring], lw=2.8, ls=DASHES[ring])
    for device in range(rows * columns):
        down, across = divmod(device, columns)
        panel.scatter(across, down, s=290, color="white", edgecolors="0.2", zorder=3)
        panel.text(across, down, device, ha="center", va="center", size=10, zorder=4)
    panel.set(xlim=(-1.05, columns + 0.05), ylim=(rows, -1), aspect="equal")
    panel.set_title(title, size=11)
    panel.axis("off")


def draw_link(panel, columns, a, b, head=False, **style):
    """The link from a to b; the long way round is the wrap-around link, and leaves the grid."""
    here, there = (np.array(divmod(device, columns)[::-1]) for device in (a, b))
    lines = [(here, there)]
    if abs(there - here).max() > 1:
        out = 0.66 * np.sign(here - there)
        lines = [(here, here + out), (there - out, there)]
        for place, number in ((here + 1.3 * out, b), (there - 1.3 * out, a)):
            panel.text(*place, number, ha="center", va="center", size=9, color="0.35")
    for line in lines:
        panel.plot(*np.transpose(line), solid_capstyle="butt", **style)
    if head:
        begin, end = lines[-1]
        middle, ahead = begin + 0.45 * (end - begin), np.sign(end - begin)
        arrow = {"arrowstyle": "-|>", "color": style["color"], "lw": 0, "mutation_scale": 18}
        ends = {"xytext": middle - 0.1 * ahead, "xy": middle + 0.14 * ahead}
        panel.annotate("", **ends, arrowprops=arrow)


figure, panels = plt.subplots(1, 3, figsize=(9, 3.4))
draw_torus(panels[0], (4, 4), {0: one}, "ring 1: 16 of 32 links")
draw_torus(panels[1], (4, 4), {1: other}, "ring 2: the 16 that it leaves")
draw_torus(panels[2], (4, 4), {0: one, 1: other}, "both: every link once")
figure.tight_layout()
plt.show()

# %% [markdown]
# Circles are devices. A line that leaves the grid is a wrap-around link, and the small number is
# the device at its other end. Arrowheads show the order of the walk. Blocks travel in both
# directions. Ring 1 takes three steps along a row and one down. Ring 2 is ring 1 with rows and
# columns exchanged.
#
# ## 3. Other rectangles and a cube
#
# Every torus of m x n devices with sides of 3 or more splits into two such rings (Kotzig, 1973). A
# torus of three dimensions splits into three (Aubert and Schneider, 1982). Sides of 2 have too few
# links for this: the link to the next device is also the wrap-around link. (A cube whose sides are
# all 2 has another `multi-ring` program, without rings.)

# %% jupyter={"source_hidden": true} tags=["drawing", "docs/links_rectangle.png"]
figure, panels = plt.subplots(1, 2, figsize=(9, 3.1), width_ratios=(7, 10))
for panel, sizes in zip(panels, [(3, 5), (4, 8)], strict=True):
    draw_torus(panel, sizes, dict(enumerate(rings_of(*sizes))), f"{sizes[0]} x {sizes[1]}")
figure.tight_layout()
plt.show()

# %%
for sizes in [(3, 3), (3, 5), (4, 8), (5, 7), (8, 8), (3, 3, 3), (4, 4, 4)]:
    rings = rings_of(*sizes)
    taken = [link for ring in rings for link in links_of_walk(ring)]
    assert len(rings) == len(sizes)
    assert all(sorted(ring) == list(range(prod(sizes))) for ring in rings)
    assert len(taken) == len(set(taken))
    assert set(taken) == links_of_torus(sizes)
    print(f"{' x '.join(map(str, sizes)):>9}: {len(rings)} rings, {len(taken)} links, each once")
try:
    rings_of(4, 2)
except ValueError as error:
    print(error)

# %% [markdown]
# ## 4. The transfers of each step
#
# Each ring carries its own half of every block. Each block takes the shorter way round. Both rings
# follow one program, a list of steps:
#
# - The first number is the distance to the owners of the blocks that the step multiplies. No device
#   is more than 8 places away, so step 8 is the last.
# - `hops` are the transfers whose blocks the step multiplies. `blocks` are the transfers that it
#   starts.
# - `+1` is a transfer to the next device of a ring, `-1` a transfer to the previous one.
# - `/0` and `/1` are quarters of the opposite device's block.
# - `+1` alone is a transfer in ring 1, and `+1 of ring 2` in ring 2.

# %%
program = gather_steps(16, (1, -1), rings=2)
for step in (*program[:2], *program[-2:]):
    print(step)

# %% [markdown]
# The picture shows the program on device 0: what arrives over its four links in each step, and what
# its matmul computes meanwhile. The number in a box is the device that owns the block. A box is
# half a block, and a small box is a quarter.


# %% jupyter={"source_hidden": true} tags=["drawing", "docs/links_steps.png"]
def owner(hop, distance):
    """Whose block comes to device 0 by a hop, from so many places away."""
    return int((one, other)[hop.ring][-hop.direction * distance % 16])


def box(panel, step, top, height, text, ring=None):
    style = {"fc": "0.85"} if ring is None else {"fc": RINGS[ring], "hatch": (None, "////")[ring]}
    panel.add_patch(plt.Rectangle((step + 0.04, top), 0.92, height, ec="white", **style))
    behind = {"boxstyle": f"round,pad={0.2 * height}", "fc": "white", "ec": "none"}
    place, size = (step + 0.5, top + height / 2), 10 if height > 0.5 else 8
    panel.text(*place, text, ha="center", va="center_baseline", size=size, bbox=behind)


LANES = [(ring, direction) for ring in (0, 1) for direction in (1, -1)]
SHARE = 0.9  # the height of half a block
figure, panel = plt.subplots(figsize=(9, 4.6))
used = []
for number, step in enumerate(program):
    for hop in step.blocks:  # travels during this step's matmul, used in the next step
        height = SHARE if hop.half is None else SHARE / 2
        top = LANES.index((hop.ring, hop.direction)) + (SHARE - height) / 2
        box(panel, number, top, height, owner(hop, step.distance + 1), hop.ring)
    # Two halves of a ring's share, one from each side, belong to one owner.
    hops = step.hops[::2] if step.hops and step.hops[0].half is not None else step.hops
    if not hops:
        box(panel, number, 5, 2 * SHARE, "its own\nblock")
        used += [(0, 0), (0, 1)]
    for place, hop in enumerate(hops):
        box(panel, number, 5 + SHARE * 1.03 * place, SHARE, owner(hop, step.distance), hop.ring)
        used.append((owner(hop, step.distance), hop.ring))
assert sorted(used) == [(device, ring) for device in range(16) for ring in (0, 1)]

names = [f"ring {ring + 1}, {'forward' if way > 0 else 'backward'}" for ring, way in LANES]
panel.set_yticks([*np.arange(4) + 0.45, 6.8], [*names, "the matmul"])
panel.set_xticks(np.arange(9) + 0.5, range(9))
panel.set(xlim=(0, 9), ylim=(8.8, -0.7), xlabel="step")
panel.text(0.04, -0.2, "comes in:", size=10, color="0.3")
panel.text(0.04, 4.8, "is computed meanwhile:", size=10, color="0.3")
panel.tick_params(length=0)
panel.spines[:].set_visible(False)
figure.tight_layout()
plt.show()

# %% [markdown]
# Ring 1 carries the first half of a block's rows, ring 2 the second half. The blocks that arrive in
# one step are multiplied in the next step. Step 0 multiplies the local block. Each of steps 1 to 7
# multiplies four halves. The opposite device's block arrives in quarters, one from each side of
# each ring. Step 8 sends nothing.
#
# ## 5. The same result
#
# This is a gather and a matmul on sixteen CPU devices, naive and with two rings.

# %%
plane = jaxpar.make_mesh("x=4,y=4")
AXES = ("x", "y")
x = jax.random.normal(jax.random.key(0), (64, 32))
w = jax.random.normal(jax.random.key(1), (32, 48))


def gathered(mode):
    def local(x, w):  # x: f32[m/16, k], w: f32[k, n/16]
        return jaxpar.all_gather_matmul(x, w, AXES, mode=mode)  # f32[m, n/16]

    specs = {"in_specs": (P(AXES), P(None, AXES)), "out_specs": P(None, AXES)}
    return jax.jit(jax.shard_map(local, mesh=plane, **specs))


results = {mode: np.asarray(gathered(mode)(x, w)) for mode in ("naive", "multi-ring")}
np.testing.assert_allclose(results["multi-ring"], results["naive"], rtol=1e-5, atol=1e-5)
np.testing.assert_allclose(results["naive"], x @ w, rtol=1e-4, atol=1e-4)
sends = str(jax.make_jaxpr(gathered("multi-ring"))(x, w)).count("ppermute")
print(f"equal; {sends} transfers in the program")
assert sends == sum(len(step.blocks) for step in program) == 4 * 8

# %% [markdown]
# ## 6. Timelines and floors
#
# Now we compile for v5p: 64 chips as `dp=4,x=4,y=4`. `make_mesh` lays `x` and `y` along two
# dimensions of the torus. `ring_hops` counts links. Every step of both rings uses one link.

# %%
chips = target("v5p:4x4x4", "dp=4,x=4,y=4")
assert all((jaxpar.ring_hops(chips.mesh, name) == 1).all() for name in AXES)
for ring in jaxpar.edge_disjoint_rings(chips.mesh, AXES):
    along = Mesh(chips.mesh.devices.reshape(4, 16)[:, ring], ("dp", "ring"))
    hops = jaxpar.ring_hops(along, "ring")
    print(*hops[0])
    assert (hops == 1).all()

# %% [markdown]
# Each group of 16 gathers the rows of `x`, and each device multiplies them by its columns of a
# weight. A *floor* is the longer of two times: the single full matmul, and the transfer of the
# bytes alone. There are two floors: `floor.of_one_ring` is for the two links of one ring, and
# `floor.total` is for all four links. (`floor.one_ring` and `floor.transfer` are the transfer times
# in these two.)
#
# The last number that the cell prints, *cuts*, is the time to split blocks that travel in parts.

# %% tags=["varies"]
M, K, N = 16384, 8192, 8192
MODES = {"naive": "naive", "one ring": "bidirectional", "two rings": "multi-ring"}
ROWS = P(("dp", *AXES))
kept = tempfile.mkdtemp()  # a cache: "auto" chooses one of the other modes, compiled already


def compiled(mode, rows=M):
    def local(x, w):  # x: bf16[m/16, k], w: bf16[k, n/16]
        return jaxpar.all_gather_matmul(x, w, AXES, mode=mode)

    step = jax.shard_map(local, in_specs=(ROWS, P(None, AXES)), out_specs=P("dp", AXES))
    args = (
        jax.ShapeDtypeStruct((4 * rows, K), jnp.bfloat16, sharding=ROWS),
        jax.ShapeDtypeStruct((K, N), jnp.bfloat16, sharding=P(None, AXES)),
    )
    return compile_for(step, chips, *args, cache=kept)


lines = {name: timeline(compiled(mode)) for name, mode in MODES.items()}
sent = 15 / 16 * M * K * 2
floor = matmul_floor(chips, "mk,kn->mn", (M, K), (K, N // 16), sent, axis=AXES)
print(f"the matmul in one piece: {1e6 * floor.compute:5.0f} us")
print(f"floor of one ring:       {1e6 * floor.of_one_ring:5.0f} us")
print(f"floor of all links:      {1e6 * floor.total:5.0f} us")
for name, line in lines.items():
    matmuls = sum(event.seconds for event in line.events if event.is_matmul)
    cuts = sum(event.seconds for event in line.events if event.op.endswith("/slice"))
    print(
        f"{name:>9}: {1e6 * line.total:5.0f} us: exposed {1e6 * line.exposed:.0f}, "
        f"matmuls {1e6 * matmuls:.0f}, cuts {1e6 * cuts:.0f}"
    )

assert floor.one_ring == 2 * floor.transfer
assert floor.of_one_ring < lines["one ring"].total < lines["naive"].total
assert floor.total < lines["two rings"].total < 0.65 * floor.of_one_ring

# %% jupyter={"source_hidden": true} tags=["drawing", "varies", "docs/links_timeline.png"]
figure, panels = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, height_ratios=(3, 5))
for panel, name in zip(panels, ("one ring", "two rings"), strict=True):
    lanes = sorted({event.row for event in lines[name].transfers})
    rows = {row: place for place, row in enumerate(["compute", *lanes])}
    spans = {}
    for event in lines[name].events:
        if event.row in rows:
            span = 1e6 * event.start, 1e6 * event.seconds
            spans.setdefault((event.row, event.kind), []).append(span)
    for (row, kind), several in spans.items():
        ring = int(" ring 2" in row)
        style = {
            "compute": {"fc": "0.45", "ec": "white", "lw": 0.4},
            "wait": {"fc": "white", "ec": "#D0021B", "hatch": "xxxx", "lw": 0},
            "transfer": {"fc": RINGS[ring], "hatch": (None, "////")[ring], "ec": "white"},
        }[kind]
        panel.broken_barh(several, (rows[row] - 0.42, 0.84), **style)
    panel.set_yticks(list(rows.values()), list(rows), size=10)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    bound = 1e6 * (floor.of_one_ring if name == "one ring" else floor.total)
    panel.axvline(bound, color="0.1", ls=":", lw=1.2)
    panel.set_title(f"{name}: {1e6 * lines[name].total:.0f} us; dotted: floor {bound:.0f}", size=11)
    panel.tick_params(length=0)
    panel.spines[["top", "right"]].set_visible(False)
computes = plt.Rectangle((0, 0), 1, 1, fc="0.45")
waits = plt.Rectangle((0, 0), 1, 1, fc="white", ec="#D0021B", hatch="xxxx", lw=0)
panels[-1].legend([computes, waits], ["computes", "waits"], loc="center right", frameon=False)
panels[-1].set_xlabel("microseconds (a model)")
figure.tight_layout()
plt.show()
for name, links in (("one ring", 2), ("two rings", 4)):
    transfers = lines[name].transfers
    assert len({event.row for event in transfers}) == links
    assert not any(event.synchronous for event in transfers)

# %% [markdown]
# Transfers limit both programs, and two rings have twice the links. Two rings also have a cost:
# smaller pieces, with twice as many matmuls of half the rows each. Here that cost is small.
#
# ## 7. The choice of `"auto"`
#
# With few rows the small pieces cost more than the links gain. `"auto"` predicts this with a model.
# `jaxpar tune` compiles all modes in your own program, and finds the best.

# %% tags=["varies"]
print("rows    " + "".join(f"{name:>12}" for name in (*MODES, "auto")))
totals = {M: {name: line.total for name, line in lines.items()}}
for rows in (M, 256):
    row = totals.setdefault(rows, {})
    for name, mode in {**MODES, "auto": "auto"}.items():
        if name not in row:
            row[name] = timeline(compiled(mode, rows)).total
    print(f"{rows:<8}" + "".join(f"{1e6 * row[name]:12.0f}" for name in row))
assert totals[M]["auto"] == totals[M]["two rings"] == min(totals[M].values())
assert totals[256]["auto"] == totals[256]["naive"] < totals[256]["two rings"]

# %% [markdown]
# `"auto"` takes two rings only on a mesh of `make_mesh` whose axes are closed rings of links. A
# slice of v6e or v5e has wrap-around links only along dimensions of 16. On 4 x 4 chips of v6e,
# `make_mesh` lays `y` along squares of four neighbours, which are closed rings. Neighbours along
# `x` are up to two links apart, so `"auto"` does not take two rings.

# %%
for slice_of, axes in {"v5p:4x4x4": "dp=4,x=4,y=4", "v6e:4x4": "x=4,y=4"}.items():
    mesh = target(slice_of, axes).mesh
    hops = {name: jaxpar.ring_hops(mesh, name).max() for name in AXES}
    print(f"{slice_of:>9}: most links of a step: {hops['x']} along x, {hops['y']} along y")
    assert (max(hops.values()) == 1) == (slice_of == "v5p:4x4x4")

# %% [markdown]
# ## In short
#
# - A ring uses two links of a chip. Two edge-disjoint rings use all four of a plane, and three use
#   all six of a cube.
# - Use `mode="multi-ring"`, or `"auto"` on a mesh of `make_mesh`.
# - `jaxpar.edge_disjoint_rings(mesh, axes)` returns the rings. `ring_hops` counts the links of each
#   step.
# - This command compares both modes with their floors:
#
#       jaxpar predict --target v5p:4x4x4 --mesh dp=4,x=4,y=4 --axis x,y \
#           --modes bidirectional,multi-ring
#
# - Figures and open questions: [Use every link, send fewer bits](../docs/links.md).
