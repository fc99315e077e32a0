"""The command line: `mmlab COMMAND ...`.

Exit codes: 0 done, 1 failed, 2 bad input or usage with one clear line on stderr. With `--json` stdout holds
one JSON document and nothing else; progress bars and notes go to stderr. Each command imports what it needs,
so `mmlab --help` is instant.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mmlab import __version__
from mmlab.errors import DataError, OptionError
from mmlab.machine import share_cores

DEFAULT_SCHEDULERS = "random,sorted,bucket,budget"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    share_cores()
    try:
        with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
            document, text = options.run(options)
        print(json.dumps(document, indent=2, allow_nan=False) if options.json else text)
    except (DataError, OptionError) as error:
        print(f"mmlab: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mmlab: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("MMLAB_DEBUG"):
            raise
        print(f"mmlab: failed: {type(error).__name__}: {error} (MMLAB_DEBUG=1 shows where)", file=sys.stderr)
        return 1
    return 1 if options.failed(document) else 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mmlab", description="Plan, price, train and compare image-text batches.")
    parser.add_argument("--version", action="version", version=f"mmlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        parent: Any, name: str, run: Callable[[argparse.Namespace], tuple[Any, str]], summary: str
    ) -> Any:
        command = parent.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        command.set_defaults(run=run, failed=lambda document: False)
        return command

    compare = add(
        commands, "compare", _compare, "Train the same model under several batch schedulers, side by side."
    )
    compare.add_argument(
        "--data", required=True, metavar="PATH", help="image-text pairs in any format that mmlab reads"
    )
    compare.add_argument(
        "--schedulers", default=DEFAULT_SCHEDULERS, metavar="A,B,C", help="names, separated by commas"
    )
    compare.add_argument(
        "--budget", type=float, help="padded tokens a batch may cost (default: a mean fixed batch)"
    )
    compare.add_argument(
        "--batch-size", type=int, default=32, help="samples a batch, for schedulers with a fixed size"
    )
    compare.add_argument("--epochs", type=int, default=3, help="epochs; each is one repetition of the timing")
    compare.add_argument("--limit", type=int, help="use only the first N pairs")
    compare.add_argument("--image", default="aspect:128", help="square:SIDE or aspect:SIDE[:MULTIPLE]")
    compare.add_argument("--model", default="tiny", help="preset of the fusion model")
    compare.add_argument("--tokenizer", default="builtin", help="builtin, or a Hugging Face name or path")
    compare.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    compare.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16")
    compare.add_argument("--seed", type=int, default=0, help="seed of weights, plans and the held-out split")
    compare.add_argument(
        "--out", metavar="DIR", help="folder for the results (default: runs/compare-DATE-TIME)"
    )
    compare.set_defaults(failed=lambda document: document["interrupted"])

    plan = add(
        commands, "plan", _plan, "Show what each scheduler's batches would waste, before any training."
    )
    source = plan.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", metavar="PATH", help="image-text pairs in any format that mmlab reads")
    source.add_argument(
        "--lengths", metavar="CSV", help="columns height,width,num_tokens and optionally image_id"
    )
    plan.add_argument(
        "--schedulers", default="random,sorted,bucket,length_grouped,aspect_bucket,budget,packed"
    )
    plan.add_argument(
        "--budget", type=float, help="padded tokens a batch may cost (default: 32 mean samples)"
    )
    plan.add_argument(
        "--max-side", type=int, default=384, help="images keep their aspect within this side squared"
    )
    plan.add_argument("--patch", type=int, default=16, help="side of an image patch in pixels")
    plan.add_argument(
        "--ranks", type=int, default=8, help="ranks that step together, for the straggler figure"
    )
    plan.add_argument("--epochs", type=int, default=2, help="epochs to plan; randomness needs two")
    plan.add_argument("--seed", type=int, default=0)

    data = commands.add_parser(
        "data", help="Make or look at a data set.", description="Make or look at a data set."
    )
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = add(
        actions, "make", _make, "Write a seeded data set of learnable scenes and captions, in COCO format."
    )
    make.add_argument("out", metavar="DIR", help="folder to write; must not exist or be empty")
    make.add_argument("--num-images", type=int, default=200)
    make.add_argument("--captions-per-image", type=int, default=5)
    make.add_argument("--max-side", type=int, default=640, help="longest side in pixels")
    make.add_argument(
        "--alt-text-ratio", type=float, default=0.0, help="share of long, alt-text like captions"
    )
    make.add_argument("--val-fraction", type=float, default=0.1, help="share of images in the split 'val'")
    make.add_argument("--seed", type=int, default=0)
    inspect = add(
        actions,
        "inspect",
        _inspect,
        "Show sizes, aspects, lengths, and the padding each scheduler would cause.",
    )
    inspect.add_argument("path", metavar="PATH")
    inspect.add_argument("--image", default="aspect:224", help="square:SIDE or aspect:SIDE[:MULTIPLE]")
    inspect.add_argument("--tokenizer", default="builtin", help="builtin, or a Hugging Face name or path")
    inspect.add_argument("--plot", metavar="FILE", help="also draw it, as PNG, SVG or PDF")
    inspect.add_argument("--skip-bad-rows", action="store_true", help="list bad rows and go on without them")

    doctor = add(
        commands, "doctor", _doctor, "Say what this machine has, how fast it reads, and what is missing."
    )
    doctor.add_argument("--data", metavar="PATH", help="measure the disk that holds this")
    doctor.set_defaults(failed=lambda document: not document["ok"])
    return parser


def _compare(options: argparse.Namespace) -> tuple[Any, str]:
    from mmlab.experiment import compare

    comparison = compare(
        options.data,
        _names(options.schedulers),
        budget=options.budget,
        batch_size=options.batch_size,
        epochs=options.epochs,
        limit=options.limit,
        image=options.image,
        model=options.model,
        tokenizer=options.tokenizer,
        device=options.device,
        precision=options.precision,
        seed=options.seed,
        out=options.out or _dated_folder(),
    )
    written = "\n".join(
        f"  {comparison.folder}/{name}"
        for name in ("comparison.json", "table.csv", "figure.png", "report.html")
    )
    return comparison.as_dict(), f"{comparison}\nWritten:\n{written}"


def _plan(options: argparse.Namespace) -> tuple[Any, str]:
    from mmlab.images import Aspect
    from mmlab.schedule import preview, read_lengths

    if options.lengths:
        sizes = read_lengths(options.lengths)
    else:
        sizes = _measured_records(options.data, "builtin").sizes()
    policy = Aspect(options.max_side**2, options.patch)
    report = preview(
        sizes.resized(policy),
        _names(options.schedulers),
        budget=options.budget,
        patch=options.patch,
        ranks=options.ranks,
        epochs=options.epochs,
        seed=options.seed,
    )
    return report.as_dict(), str(report)


def _make(options: argparse.Namespace) -> tuple[Any, str]:
    from mmlab.synthetic import make_dataset

    path = make_dataset(
        options.out,
        num_images=options.num_images,
        captions_per_image=options.captions_per_image,
        seed=options.seed,
        max_side=options.max_side,
        alt_text_ratio=options.alt_text_ratio,
        val_fraction=options.val_fraction,
    )
    count = options.num_images * options.captions_per_image
    document = {"path": str(path), "num_images": options.num_images, "num_captions": count}
    return document, f"Wrote {options.num_images} images and {count} captions to {path}"


def _inspect(options: argparse.Namespace) -> tuple[Any, str]:
    from mmlab.images import parse_image_policy
    from mmlab.overview import overview

    policy = parse_image_policy(options.image)
    records = _measured_records(
        options.path, options.tokenizer, errors="report" if options.skip_bad_rows else "raise"
    )
    result = overview(records, policy)
    if options.plot:
        result.save_figure(options.plot)
    return result.as_dict(), str(result)


def _doctor(options: argparse.Namespace) -> tuple[Any, str]:
    from mmlab.doctor import diagnose

    diagnosis = diagnose(options.data)
    return diagnosis.as_dict(), str(diagnosis)


def _measured_records(path: str, tokenizer: str, **reading: Any) -> Any:
    """Records with text lengths counted by the tokenizer."""
    from mmlab.readers import read_records
    from mmlab.text import load_tokenizer, measure_tokens

    records = read_records(path, **reading)
    return measure_tokens(records, load_tokenizer(tokenizer, records=records))


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _dated_folder() -> str:
    from datetime import datetime

    return f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}"


if __name__ == "__main__":
    sys.exit(main())
