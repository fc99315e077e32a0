"""Commands and their options; `SHARED` are those that several commands have."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import Field, fields
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from mmlab import __version__
from mmlab.cli import commands
from mmlab.comparison.options import ComparisonOptions

SHARED: dict[str, dict[str, Any]] = {
    "--data": {
        "required": True,
        "metavar": "PATH",
        "help": "image-text pairs in any format that mmlab reads",
    },
    "--image": {"help": "square:SIDE or aspect:SIDE[:MULTIPLE]"},
    "--tokenizer": {"default": "builtin", "help": "builtin, or a Hugging Face name or path"},
    "--limit": {"type": int, "help": "use only the first N pairs"},
    "--model": {"default": "tiny", "help": "preset of the fusion model"},
    "--batch-size": {"type": int, "default": 32, "help": "samples a batch"},
    "--device": {"default": "auto", "help": "auto, cpu, cuda, cuda:1, ..."},
    "--precision": {"default": "fp32", "help": "fp32, bf16 or fp16"},
    "--plot": {"metavar": "FILE", "help": "also draw it, as PNG, SVG or PDF"},
    "--seed": {"type": int, "default": 0},
}


class _Parser(argparse.ArgumentParser):
    def option(self, name: str, **details: Any) -> None:
        """Add an argument, with what `SHARED` says of it."""
        self.add_argument(name, **SHARED.get(name, {}) | details)

    def options(self, *names: str) -> None:
        """Add arguments as `SHARED` has them."""
        for name in names:
            self.option(name)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of `mmlab`; what it parses has `run`, `json` and `failed`."""
    parser = _Parser(prog="mmlab", description="Plan, price, train and compare image-text batches.")
    parser.add_argument("--version", action="version", version=f"mmlab {__version__}")
    top = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _compare(_command(top, "compare", commands.run_compare))
    _train(_command(top, "train", commands.run_train))
    _watch(_command(top, "watch", commands.run_watch))
    _app(_command(top, "app", commands.run_app))
    _export(_command(top, "export", commands.run_export))
    _plan(_command(top, "plan", commands.run_plan))
    _memory(_command(top, "memory", commands.run_memory))
    data = _group(top, "data", "Make or look at a data set.")
    _make(_command(data, "make", commands.run_make))
    _inspect(_command(data, "inspect", commands.run_inspect))
    _cache(_group(top, "cache", "Keep decoded samples on disk."))
    bench = _group(top, "bench", "Measure this machine.")
    _bench_io(_command(bench, "io", commands.run_bench_io))
    _bench_parallel(_command(bench, "parallel", commands.run_bench_parallel))
    doctor = _command(top, "doctor", commands.run_doctor)
    doctor.add_argument("--data", metavar="PATH", help="measure the disk that holds this")
    doctor.set_defaults(failed=lambda document: not document["ok"])
    return parser


def _command(parent: Any, name: str, run: Callable[[argparse.Namespace], commands.Printed]) -> Any:
    """A command; the docstring of `run` is its help."""
    summary = run.__doc__
    command = parent.add_parser(
        name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    command.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    command.set_defaults(run=run, failed=lambda document: False)
    return command


def _group(parent: Any, name: str, summary: str) -> Any:
    group = parent.add_parser(name, help=summary, description=summary)
    return group.add_subparsers(dest="action", required=True, metavar="ACTION")


def _compare(command: _Parser) -> None:
    command.option("--data")
    command.option(
        "--schedulers",
        default="random,sorted,bucket,budget",
        metavar="A,B,C",
        help="names, separated by commas",
    )
    for option in fields(ComparisonOptions):
        _flag(command, option)
    command.option("--out", metavar="DIR", help="folder for the results (default: runs/compare-DATE-TIME)")
    command.set_defaults(failed=lambda document: document["interrupted"])


def _flag(command: _Parser, option: Field) -> None:
    """The flag of an option: its type, default and help are those of the dataclass."""
    kind, text = get_args(get_type_hints(ComparisonOptions, include_extras=True)[option.name])
    details: dict[str, Any] = {"default": option.default, "help": text}
    kinds = {part for part in get_args(kind) or [kind] if part is not NoneType}
    if get_origin(kind) is Literal:
        details["choices"] = get_args(kind)
    elif kinds == {bool}:
        details["action"] = "store_true"
    else:
        details["type"] = next((plain for plain in (int, float, str) if plain in kinds), shares)
    command.option(f"--{option.name.replace('_', '-')}", **details)


def shares(text: str) -> dict[str, float]:
    """Shares by name.

    >>> shares("image-text=0.7,text-only=0.3")
    {'image-text': 0.7, 'text-only': 0.3}
    """
    return {
        name.strip(): float(share) for name, _, share in (part.partition("=") for part in text.split(","))
    }


def _train(command: _Parser) -> None:
    command.option("config", metavar="CONFIG.toml", help="see examples/train.toml")
    command.option(
        "--resume", default="never", metavar="auto|never|PATH", help="where to go on from, if anywhere"
    )
    command.option(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key, as in trainer.lr=3e-4",
    )
    command.option("--runs", default="runs", metavar="DIR", help="folder of all runs")


def _watch(command: _Parser) -> None:
    command.option("folder", metavar="DIR", help="a run's folder, or one above")
    command.option("--once", action="store_true", help="print what there is now, and end; so does --json")
    command.option("--interval", type=float, default=0.5, metavar="S", help="seconds between two looks")


def _app(command: _Parser) -> None:
    command.option("notebook", nargs="?", metavar="NOTEBOOK", help="default: the live dashboard")
    command.option("--port", type=int, default=0, help="0 takes a free one")


def _export(command: _Parser) -> None:
    command.option("folder", metavar="RUN", help="the run's folder")
    command.option("--to", required=True, help="tensorboard, wandb or mlflow")
    command.option("target", metavar="TARGET", help="TensorBoard's folder, a project, or MLflow's address")


def _plan(command: _Parser) -> None:
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", **SHARED["--data"] | {"required": False})
    source.add_argument(
        "--lengths", metavar="CSV", help="columns height,width,num_tokens and optionally image_id"
    )
    command.option("--schedulers", default="random,sorted,bucket,length_grouped,aspect_bucket,budget,packed")
    command.option("--budget", type=float, help="padded tokens a batch may cost (default: 32 mean samples)")
    command.option(
        "--max-side", type=int, default=384, help="images keep their aspect within this side squared"
    )
    command.option("--patch", type=int, default=16, help="side of an image patch in pixels")
    command.option("--ranks", type=int, default=8, help="ranks that step together, for the straggler figure")
    command.option("--epochs", type=int, default=2, help="epochs to plan; randomness needs two")
    command.option("--seed")


def _memory(command: _Parser) -> None:
    command.option(
        "--model", default=None, required=True, metavar="NAME|PATH", help="a preset, or a transformers model"
    )
    command.option("--data")
    command.option(
        "--memory-gb", type=float, metavar="GIB", help="plan for so much (default: ask the device)"
    )
    command.option("--device", default="cuda", help="cuda or cpu; it need not be here")
    command.option("--precision")
    command.option("--checkpointing", action="store_true", help="compute activations twice, to keep fewer")
    command.option("--accumulating", action="store_true", help="a step has several micro-batches")
    command.option("--optimizer", default="adamw", help="adamw or sgd")
    command.option("--image", default="aspect:224")
    command.options("--tokenizer", "--limit", "--plot")
    command.option("--save", metavar="FILE", help="write the fitted memory model, as JSON")


def _make(command: _Parser) -> None:
    command.option("out", metavar="DIR", help="folder to write; must not exist or be empty")
    command.option("--num-images", type=int, default=200)
    command.option("--captions-per-image", type=int, default=5)
    command.option("--max-side", type=int, default=640, help="longest side in pixels")
    command.option("--val-fraction", type=float, default=0.1, help="share of images in the split 'val'")
    command.option("--seed")


def _inspect(command: _Parser) -> None:
    command.option("path", metavar="PATH")
    command.option("--image", default="aspect:224")
    command.options("--tokenizer", "--plot")
    command.option("--skip-bad-rows", action="store_true", help="list bad rows and go on without them")


def _cache(actions: Any) -> None:
    build = _command(actions, "build", commands.run_cache_build)
    build.option("--data")
    build.option("--image", default="square:224")
    build.option("--tokenizer")
    build.option("--max-tokens", type=int, default=512, help="longer texts are cut")
    build.option(
        "--engine",
        default="threads",
        choices=("threads", "ray"),
        help="who decodes: threads of this process, of each rank under torchrun; or actors of Ray",
    )
    build.option("--threads", type=int, help="decoders (default: one a core)")
    build.option("--limit-gib", type=float, help="size that the cache may have (default: no limit)")
    build.set_defaults(failed=lambda document: bool(document["bad_samples"]))
    info = _command(actions, "info", commands.run_cache_info)
    verify = _command(actions, "verify", commands.run_cache_verify)
    verify.set_defaults(failed=lambda document: bool(document["damage"]))
    clear = _command(actions, "clear", commands.run_cache_clear)
    for action in (build, info, verify, clear):
        action.option("folder", metavar="DIR", help="the cache's folder")


def _bench_io(command: _Parser) -> None:
    command.options("--data", "--model")
    command.option("--image", default="square:224")
    command.options("--tokenizer", "--batch-size", "--device", "--precision", "--limit")


def _bench_parallel(command: _Parser) -> None:
    command.option(
        "--strategies", metavar="A,B,C", help="names, separated by commas (default: all that can run)"
    )
    command.option("--ranks", type=int, default=2, help="processes; on CUDA one a GPU")
    command.option("--model", default="small")
    command.option("--batch-size", default=16, help="samples a step, over all ranks")
    command.option("--image-side", type=int, default=128, help="pixels")
    command.option("--num-tokens", type=int, default=32, help="of the longest text")
    command.option("--steps", type=int, default=4, help="timed in a row")
    command.option("--rounds", type=int, default=3, help="turns of every strategy; figures are medians")
    command.options("--device", "--precision", "--seed", "--plot")
