"""`jaxpar layout`: shows what each device holds of a model."""

import argparse
from typing import Any

from jax.sharding import AbstractMesh

from jaxpar.layout import Layout, LayoutError
from jaxpar.mesh import make_mesh
from jaxpar.tools.cli.console import UsageError, print_error, status_of
from jaxpar.tools.cli.predict_programs import find_function
from jaxpar.tools.cli.shared_options import mesh_error, require_folders
from jaxpar.tools.toolkit_api import write_text

DESCRIPTION = """\
Shows how a model is sharded on a mesh: the shape, spec, local block and bytes of each array, those
with the most copies first. If all sizes of the mesh are given, no devices are needed.
"""
EPILOG = """\
examples:
  jaxpar layout model:lay_out --mesh fsdp=16,tp=8    # returns a Layout for this mesh
  jaxpar layout model:lay_out --mesh fsdp=2,tp=4 --picture layers/0/query --json a.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add("function", metavar="module:function", help="called with the mesh, returns a Layout")
    add("--mesh", default="tp=-1", help="axis names and sizes (default: %(default)s)")
    add(
        "--rows",
        type=int,
        default=30,
        help="print at most so many rows; 0: all (default: %(default)s)",
    )
    add("--picture", metavar="PATH", help="show which devices hold which block of this array")
    add("--json", metavar="FILE", help="write everything")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar layout", lambda: _show(args))


def _show(args: argparse.Namespace) -> int:
    if args.rows < 0:
        raise UsageError(f"--rows {args.rows} must not be negative")
    require_folders(args, ["json"])
    function, mesh = find_function(args.function), _mesh(args.mesh)
    try:
        layout = function(mesh)
    except LayoutError as error:
        print_error("jaxpar layout", error)
        return 1
    if not isinstance(layout, Layout):
        raise UsageError(
            f"{args.function}, called with the mesh, returned {type(layout).__name__}; return what "
            "LayoutMap.layout gives"
        )
    table = layout.table()
    if args.json:
        write_text(args.json, table.json())
    print(table.text(args.rows or None))
    if args.picture is not None:
        try:
            array = layout[args.picture]
        except KeyError as reason:
            raise UsageError(f"--picture: {reason.args[0].removeprefix('Layout: ')}") from None
        print(f"\n{array.picture()}")
    return 0


def _mesh(text: str) -> Any:
    # The mesh is abstract and needs no devices, if all sizes are given.
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    sizes = {name: size for name, _, size in parts}
    if all(size.isdecimal() and int(size) for size in sizes.values()) and all(sizes):
        return AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes))
    try:
        return make_mesh(text)
    except ValueError as reason:
        raise UsageError(mesh_error(text, reason)) from None
