"""The arguments of the command, and what is refused before anything runs."""

import argparse
from collections.abc import Sequence

from jaxpar.arguments.dtypes import LOW_BIT
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.shared_options import add_processes, parse_processes, require_folders
from language_model.config import DTYPES, Model, Training
from language_model.data import VOCABULARY
from language_model.parallel import AXES
from language_model.wire import from_options

DISPATCHES = ("auto", "ragged", "all_gather")
MODES = ("auto", "naive", "unidirectional", "bidirectional")

DESCRIPTION = """\
Trains a decoder transformer on the sources of Python's standard library, byte by byte, with the
layers of jaxpar. --mesh changes how the work is divided, and nothing else: every mesh, and any
number of processes, has the same loss curve.
"""
EPILOG = """\
mesh axes:
  pp    the layers are divided into stages, through which microbatches pass
  dp    the batch is divided, each device has all weights
  fsdp  the batch and the weights are divided; weights are gathered where they are used
  ep    the batch and the experts are divided; tokens travel to their experts and back
  cp    the sequence is divided, in a ring of attention blocks
  tp    heads, hidden features and vocabulary are divided, and the sequence between them
What does not divide (batch, sequence, heads, hidden, vocabulary, experts) is padded and masked.

examples:
  python benchmarks/language_model --mesh dp=2,fsdp=2,tp=2
  python benchmarks/language_model --mesh fsdp=4,tp=2 --dtype bfloat16 --microbatches 2
  python benchmarks/language_model --mesh pp=2,tp=2,dp=2 --microbatches 4 --virtual-stages 2
  python benchmarks/language_model --mesh dp=2,ep=4 --experts 16 --top-k 2
  python benchmarks/language_model --mesh fsdp=4,tp=2 --wire-dtype int8
  python benchmarks/language_model --mesh dp=1 --log one.json
  python benchmarks/language_model --mesh cp=4,tp=2 --compare one.json --plot curves.png
  python benchmarks/language_model --mesh dp=8 --checkpoint DIR --stop 100
  python benchmarks/language_model --mesh tp=8 --checkpoint DIR
  python benchmarks/language_model --mesh fsdp=16,tp=4 --target v5p:4x4x4 --steps 0
two processes, of four CPU devices each where there are no others:
  two="python benchmarks/language_model --coordinator localhost:9876 --num-processes 2"
  $two --process-id 0 & $two --process-id 1
"""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the arguments; `model` and `training` are made of them.

    Raises:
      UsageError: one that cannot be served.
    """
    args = _parser().parse_args(argv)
    head_size = args.head_size
    if head_size is None:
        if args.width % args.heads:
            raise UsageError(
                f"--width {args.width} does not divide among --heads {args.heads}; give --head-size"
            )
        head_size = args.width // args.heads
    args.model = Model(
        vocabulary=VOCABULARY,
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads or args.heads,
        head_size=head_size,
        hidden=args.hidden or _hidden(args.width, args.top_k if args.experts else 1),
        tied=not args.untied,
        dtype=args.dtype,
        experts=args.experts,
        top_k=args.top_k,
        capacity_factor=args.capacity_factor,
    )
    args.training = Training(
        steps=args.steps,
        batch=args.batch,
        sequence=args.sequence,
        learning_rate=args.learning_rate,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        clip=args.clip,
        seed=args.seed,
        validation_batches=args.validation_batches,
        balance_loss=args.balance_loss,
        router_z_loss=args.router_z_loss,
    )
    _check(args)
    return args


def _hidden(width: int, parts: int) -> int:
    """As many features as two matrices of four times the width have, and of them a part."""
    return -(-width * 8 // (3 * 32 * parts)) * 32


def _check(args: argparse.Namespace) -> None:
    for name in ("microbatches", "virtual_stages", "save_every", "print_every"):
        if getattr(args, name) < 1:
            option = name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, got {getattr(args, name)}")
    args.stop = args.steps if args.stop is None else args.stop
    if not 0 <= args.stop <= args.steps:
        raise UsageError(f"--stop must be within --steps {args.steps}, got {args.stop}")
    args.wire_dtype = from_options(args)
    args.process_id, args.num_processes = parse_processes(args)
    if args.coordinator is not None and args.target:
        raise UsageError("--target needs one process; predict with --steps 0 in a run of its own")
    require_folders(args, ("log", "plot", "plot-loads"))
    if args.compare and not (args.plot or args.plot_loads):
        raise UsageError("--compare draws curves over each other; give --plot FILE.png as well")
    if args.plot_loads and not args.experts:
        raise UsageError("--plot-loads draws those of experts; give --experts as well")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="language_model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_parallel(parser)
    _add_model(parser)
    _add_experts(parser)
    _add_training(parser)
    _add_files(parser)
    return parser


def _add_parallel(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("parallelism").add_argument
    add(
        "--mesh",
        default="dp=-1",
        help=f"sizes of {', '.join(AXES)}; 1 where left out, -1 for the rest of the devices "
        "(default: %(default)s)",
    )
    add(
        "--microbatches",
        type=int,
        default=1,
        metavar="N",
        help="gradients summed before a step; with pp, what passes through the stages",
    )
    add("--virtual-stages", type=int, default=1, metavar="N", help="of each device of pp")
    add("--mode", choices=MODES, default="auto", help="of the matmuls and gathers")
    add(
        "--wire-dtype",
        choices=LOW_BIT,
        help="in which what is gathered travels, with scales (default: as it is)",
    )
    add("--wire-columns", type=int, metavar="N", help="that share a scale (default: a row)")
    add("--exact-cotangents", action="store_true", help="which then travel as they are")
    add("--target", metavar="CHIP:LAYOUT", help="predict the step for it, as in v5p:4x4x4, first")
    add_processes(add)


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--width", type=int, default=128, help="(default: %(default)s)")
    add("--layers", type=int, default=4, help="(default: %(default)s)")
    add("--heads", type=int, default=8, help="(default: %(default)s)")
    add("--kv-heads", type=int, help="heads of keys and values, which --heads share (default: all)")
    add("--head-size", type=int, help="(default: width / heads)")
    add(
        "--hidden",
        type=int,
        help="of the gated MLP, or of each expert (default: 8/3 of the width, for experts over "
        "--top-k, up to 32s)",
    )
    add("--untied", action="store_true", help="another table for the logits than for the tokens")
    add("--dtype", choices=DTYPES, default="float32", help="of the arithmetic; weights are float32")


def _add_experts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("mixture of experts").add_argument
    add(
        "--experts",
        type=int,
        default=0,
        metavar="N",
        help="in the place of each MLP (default: none)",
    )
    add("--top-k", type=int, default=2, metavar="K", help="of each token (default: %(default)s)")
    add(
        "--capacity-factor",
        type=float,
        metavar="F",
        help="an expert drops what is more than F times a balanced load, of each device (default: "
        "drops nothing)",
    )
    add("--dispatch", choices=DISPATCHES, default="auto", help="how tokens reach their experts")


def _add_training(parser: argparse.ArgumentParser) -> None:
    add, usual = parser.add_argument_group("training").add_argument, Training()
    for name, text in {
        "steps": "of the schedule",
        "batch": "sequences a step",
        "sequence": "bytes of each",
        "learning_rate": "at its peak",
        "warmup": "steps up to it; a cosine down to a tenth follows",
        "weight_decay": "of what is not a norm's scale",
        "clip": "largest global norm of a gradient",
        "seed": "of the weights and the batches",
        "validation_batches": "of held-out text, at the end",
        "balance_loss": "times what is 1 where experts are used alike",
        "router_z_loss": "times what keeps the logits of routers small",
    }.items():
        value = getattr(usual, name)
        option, text = name.replace("_", "-"), f"{text} (default: %(default)s)"
        add(f"--{option}", type=type(value), default=value, help=text)


def _add_files(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("files and reports").add_argument
    add("--checkpoint", metavar="DIR", help="save there, and resume from what is there")
    add("--save-every", type=int, default=50, metavar="STEPS", help="(default: %(default)s)")
    add("--stop", type=int, metavar="STEP", help="end there, the schedule being that of --steps")
    add("--print-every", type=int, default=10, metavar="STEPS", help="where there is no terminal")
    add("--log", metavar="FILE.json", help="write the curve")
    add("--plot", metavar="FILE.png", help="draw it")
    add("--plot-loads", metavar="FILE.png", help="draw how evenly experts are used")
    add("--compare", metavar="FILE.json", nargs="+", default=[], help="with curves of --log")
