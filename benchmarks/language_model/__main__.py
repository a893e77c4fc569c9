"""A language model that trains on any mesh: python benchmarks/language_model --help."""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.tools.cli.console import status_of
from jaxpar.tools.cli.workers import start_jax
from language_model.arguments import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    return status_of("language_model", partial(_main, argv))


def _main(argv: Sequence[str] | None) -> int:
    args = parse(argv)
    if args.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    with start_jax(args.coordinator, args.process_id, args.num_processes):
        _run(args)
    return 0


def _run(args: argparse.Namespace) -> None:
    from language_model import curves, loads
    from language_model.data import standard_library
    from language_model.parallel import build_mesh
    from language_model.predict import predict, summary
    from language_model.progress import say
    from language_model.run import run
    from language_model.train import Trainer
    from language_model.weights import count
    from language_model.wire import describe

    model, training = args.model, args.training
    options = ("microbatches", "mode", "dispatch", "wire_dtype", "virtual_stages")
    how = {name: getattr(args, name) for name in options}
    others = [curves.read(path) for path in args.compare]  # before minutes of work
    if args.plot_loads:
        loads.check(others)
    if args.target:
        say(summary(predict(args.target, args.mesh, model, training, **how)))
    if not args.stop:
        return

    trainer = Trainer(model, training, build_mesh(args.mesh), **how)
    say(
        f"{count(model):,} weights, {model.dtype} | {trainer.mesh.size} x "
        f"{trainer.mesh.devices.flat[0].device_kind}, mesh {curves.mesh_text(trainer.mesh)}"
        f"{describe(args.wire_dtype)}"
    )
    text = standard_library()
    say(f"{len(text.train):,} bytes to learn from, {len(text.validation):,} held out")
    result = run(
        trainer,
        text,
        stop=args.stop,
        checkpoint=args.checkpoint,
        save_every=args.save_every,
        print_every=args.print_every,
    )
    say(
        f"loss {result.losses[-1]:.4f} at step {len(result.losses)}; "
        f"{result.tokens_per_second:,.0f} tokens/s"
    )
    if result.validation is not None:
        say(f"loss on held-out text: {result.validation:.4f} nats a byte")
    if jax.process_index() == 0:
        found = curves.record(trainer, text.digest, result)
        if args.log:
            curves.write(args.log, found)
        if args.plot:
            curves.draw(args.plot, [found, *others])
        if args.plot_loads:
            loads.draw(args.plot_loads, [found, *others])


if __name__ == "__main__":
    raise SystemExit(main())
