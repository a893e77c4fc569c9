"""A language model that trains on any mesh: python benchmarks/language_model.py --help."""

import argparse
import sys
from collections.abc import Sequence

import jax

from jaxpar.cli._console import UsageError
from jaxpar.cli._processes import start_jax
from lm.arguments import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    try:
        args = parse(argv)
        if args.model.dtype == "float64":
            jax.config.update("jax_enable_x64", True)
        with start_jax(args.coordinator, args.process_id, args.num_processes):
            _run(args)
    except UsageError as reason:
        print(f"language_model: error: {reason}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    from lm import curves, loads
    from lm.data import standard_library
    from lm.parallel import build_mesh
    from lm.predict import predict, summary
    from lm.progress import say
    from lm.run import run
    from lm.train import Trainer
    from lm.weights import count

    model, training = args.model, args.training
    how = {name: getattr(args, name) for name in ("microbatches", "mode", "dispatch")}
    others = [curves.read(path) for path in args.compare]  # before minutes of work
    if args.plot_loads:
        loads.check(others)
    if args.target:
        say(summary(predict(args.target, args.mesh, model, training, **how)))
    if not args.stop:
        return

    trainer = Trainer(model, training, build_mesh(args.mesh), **how)
    say(
        f"{count(trainer.table):,} weights, {model.dtype} | {trainer.mesh.size} x "
        f"{trainer.mesh.devices.flat[0].device_kind}, mesh {curves.mesh_text(trainer.mesh)}"
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
