"""The commands of `mmlab`: functions whose docstrings are the help and whose parameters are the arguments.

A parameter's type is `Annotated[type, help]`. Those before `*` are positional, the others are flags;
`**options` are the fields of a dataclass. A command returns a dataclass or an object with `as_dict()`; if its
`ok` is False, the exit code is 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Timer
from typing import Annotated, Any, Literal, NoReturn

from mmlab.cli.cache import CacheFolder, cache_info, clear_cache, verify_cache
from mmlab.cli.doctor import diagnose
from mmlab.cli.printed import Printed
from mmlab.cli.tour import copy_tour
from mmlab.comparison.options import COMPARED, ComparisonOptions, scheduler_names
from mmlab.errors import OptionError
from mmlab.machine import GIB, place_in_launch
from mmlab.parallel.bench_options import BenchOptions

Data = Annotated[str, "image-text pairs: a folder, or a COCO, CSV, JSON, Parquet or tar file, ..."]
Image = Annotated[str, "pixels of an image: square:SIDE, or aspect:SIDE[:MULTIPLE], which keeps its shape"]
Tokenizer = Annotated[str, "builtin, or a Hugging Face name or path"]
SkipBadRows = Annotated[bool, "leave out rows that cannot be used, with a warning"]
Images = Annotated[str | None, "folder of the images, where they are not beside the data"]
Processor = Annotated[str | None, "that of a vision-language --model; --data then has conversations"]
Limit = Annotated[int | None, "use N pairs, drawn from every split (default: all)"]
Precision = Annotated[str, "of the training: fp32, tf32, bf16 or fp16"]
Names = Annotated[str, "names of schedulers, separated by commas"]
Plot = Annotated[str | None, "a file to draw it into as well, as PNG, SVG or PDF"]
Seed = Annotated[int, "of all that is drawn"]
_COMPARED = ",".join(COMPARED)


def compare(
    *,
    data: Data,
    schedulers: Names = _COMPARED,
    out: Annotated[str | None, "folder for the results (default: runs/compare-DATE-TIME)"] = None,
    **options: Annotated[Any, ComparisonOptions],
) -> Any:
    """Train the same model under several batch schedulers, side by side."""
    from datetime import datetime

    from mmlab.comparison.experiment import compare

    _end_by(signal.default_int_handler)  # as on Ctrl-C, the epochs that all have finished are kept
    out = out or f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}"
    return compare(data, _names(schedulers), out=out, **options)


def train(
    config: Annotated[str, "TOML file of the run, such as examples/train.toml (mmlab tour copies it)"],
    *,
    resume: Annotated[str, "from: auto (its newest checkpoint), never, or a checkpoint's path"] = "never",
    set: Annotated[tuple[str, ...], "change one key, as in trainer.lr=3e-4; may be repeated"] = (),
    runs: Annotated[str, "folder of all runs"] = "runs",
) -> Any:
    """Train a model as a TOML file says; resume after a stop or a kill."""
    from mmlab.comparison.config import load_config
    from mmlab.comparison.train import train

    _end_by(lambda received, _: sys.exit(128 + received))  # an exception: the run ends with a checkpoint
    return train(load_config(config, set), runs=runs, resume=resume)


def _end_by(handler: Callable[[int, Any], Any]) -> None:
    """Let a request to end call this; under nohup, a terminal that closes is none.

    Python drops an exception that is raised while a finalizer runs: such a request is made once more.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
    report = sys.unraisablehook

    def repeat(dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt | SystemExit):
            number = getattr(dropped.exc_value, "code", 128 + signal.SIGINT) - 128
            Timer(0.1, os.kill, (os.getpid(), number)).start()
        else:
            report(dropped)

    sys.unraisablehook = repeat


def watch(
    folder: Annotated[str, "a run's folder, or one above"],
    *,
    once: Annotated[bool, "print what there is now, and end"] = False,
    json: Annotated[bool, "the same as one JSON document"] = False,
) -> Any:
    """Show the runs below a folder live, whoever started them; quitting does not affect them."""
    from shutil import get_terminal_size

    from mmlab.runs.watch import follow, summary, text_of

    if not (once or json):
        return Printed(document=follow(folder), text="")
    found = summary(folder)
    return Printed(document=found, text=text_of(found, get_terminal_size((160, 24)).columns))


def app(
    notebook: Annotated[str | None, "default: the live dashboard"] = None,
    *,
    port: Annotated[int, "0 takes a free one"] = 0,
) -> NoReturn:
    """Serve a notebook as a page without code, on this machine only (needs voila)."""
    from mmlab.lab.app import find_notebook, voila_command

    path = find_notebook(notebook)
    command, environment = voila_command(path, port=port)
    os.chdir(path.parent)
    os.execve(command[0], command, environment)  # voila takes this process's place, and says its address


def export(
    run: Annotated[str, "the run's folder"],
    target: Annotated[str, "TensorBoard's folder, a project, or MLflow's address"],
    *,
    to: Annotated[str, "tensorboard, wandb or mlflow"],
) -> Any:
    """Export a run to TensorBoard, Weights & Biases or MLflow."""
    from mmlab.runs.trackers import export_run

    count = export_run(run, to, target)
    document = {"run": run, "to": to, "target": target, "num_points": count}
    return Printed(document=document, text=f"Exported {count} points of {run} to {to} at {target}")


def plan(
    *,
    data: Annotated[str | None, "image-text pairs: a folder, or a COCO, CSV, ... file"] = None,
    images: Images = None,
    skip_bad_rows: SkipBadRows = False,
    lengths: Annotated[str | None, "a CSV with height,width,num_tokens and optionally image_id"] = None,
    schedulers: Annotated[str | None, "names by commas (default: all but memory; fastest if --model)"] = None,
    image: Image = "aspect:224",
    processor: Processor = None,
    model: Annotated[str | None, "tiny, small, base, ... or a transformers model: adds epoch_s"] = None,
    device_name: Annotated[str | None, "predict for A100, H100, L4, ... (default: measure here)"] = None,
    price_per_hour: Annotated[float | None, "of one device: adds epoch_price"] = None,
    precision: Precision = "fp32",
    budget: Annotated[float | None, "padded tokens and patches a batch (default: 32 mean samples)"] = None,
    memory_gb: Annotated[float | None, "GiB to fill, with --model (default: random's at 32 samples)"] = None,
    ranks: Annotated[int, "ranks that step together, for the straggler figure"] = 1,
    epochs: Annotated[int, "epochs to plan; randomness needs two"] = 2,
    seed: Seed = 0,
) -> Any:
    """Show what each scheduler's batches would waste, and what an epoch would take, before any training."""
    from mmlab.data.readers import errors_of, read_records
    from mmlab.schedule.preview import preview, read_lengths
    from mmlab.schedule.schedulers import SCHEDULERS
    from mmlab.types import Aspect, parse_image_policy

    if (data is None) == (lengths is None):
        raise OptionError("mmlab plan takes one of --data and --lengths")
    if lengths is not None and images is not None:
        raise OptionError("--lengths has the sizes of images, which are not read: leave --images out")
    if model is None and (device_name, price_per_hour, memory_gb, precision) != (None, None, None, "fp32"):
        raise OptionError("add --model NAME, for --device-name, --price-per-hour, --memory-gb or --precision")
    if model is not None and budget is not None:
        raise OptionError("with --model, batches fill the same memory: give --memory-gb, not --budget")
    policy, errors = parse_image_policy(image), errors_of(skip_bad_rows)
    if model is not None:
        from mmlab.pricing.plan_prices import price_plans, side_of_patch
    if processor is not None:
        if data is None:
            raise OptionError("--processor takes --data with conversations")
        if image != "aspect:224":
            raise OptionError("--processor determines the sizes of images: leave --image out")
        from mmlab.pricing.step_prices import named_dataset

        dataset = named_dataset(data, images, processor, errors=errors)
        sizes, made = dataset.sizes, f"as {processor} makes them"
    else:
        dataset = None
        if lengths is not None:
            sizes = read_lengths(lengths)
        else:
            sizes = read_records(data, images=images, tokenizer="builtin", errors=errors).sizes()
        if model is not None and isinstance(policy, Aspect) and image.count(":") == 1:
            policy = replace(policy, multiple=side_of_patch(model))
        sizes, made = sizes.resized(policy), str(policy)
    left_out = ("memory", "fastest") if model is None else ("memory",)
    usual = [name for name in SCHEDULERS if name not in left_out]
    names = scheduler_names(_names(schedulers) if schedulers else usual)
    # captions of one image are kept apart, as in `compare`
    options: Any = {"seed": seed, "allow_collisions": False}
    if model is None:
        found = preview(sizes, names, budget=budget, ranks=ranks, epochs=epochs, **options)
        hint = "batches cost as many tokens, not as many bytes; with --model they take equal memory, and seconds are shown"
        return Printed(document=found.as_dict(), text=f"images: {made}; {found}\n{hint}")
    options |= {"device_name": device_name, "price_per_hour": price_per_hour, "precision": precision}
    options |= {"dataset": dataset, "memory_gb": memory_gb, "epochs": epochs, "world_size": ranks}
    prices, planners = price_plans(model, sizes, names, **options)
    patch = prices.memory.patch
    found = preview(sizes, planners, prices=prices.figures, patch=patch, ranks=ranks, epochs=epochs)
    seconds = {"seconds": prices.time.conditions["method"]}
    document = {name: figures | seconds for name, figures in found.as_dict().items()}
    return Printed(document=document, text=f"{prices}\nimages: {made}; model: {model}; {found}")


def memory(
    *,
    model: Annotated[str, "tiny, small, base, resnet18, resnet50, or a transformers model (name or path)"],
    data: Data,
    plot: Plot = None,
    save: Annotated[str | None, "a file for the fitted memory model, as JSON"] = None,
    memory_gb: Annotated[float | None, "plan for so many GiB (default: ask the device)"] = None,
    device: Annotated[str, "cuda or cpu; it need not be here"] = "cuda",
    precision: Precision = "fp32",
    checkpointing: Annotated[bool, "compute activations twice, to keep fewer"] = False,
    accumulating: Annotated[bool, "a step has several micro-batches"] = False,
    optimizer: Annotated[str, "adamw or sgd"] = "adamw",
    image: Image = "aspect:224",
    tokenizer: Tokenizer = "builtin",
    limit: Limit = None,
    images: Images = None,
    skip_bad_rows: SkipBadRows = False,
    processor: Processor = None,
) -> Any:
    """Predict the memory each batch needs, and plan batches that fill a device."""
    options = {name: value for name, value in locals().items() if name not in ("plot", "save")}
    from mmlab.pricing.memory_report import memory_report
    from mmlab.runs.figures import check_suffix, save_figure

    if plot:  # check now: pricing takes a while
        check_suffix(plot)
    if save and (Path(save).is_dir() or not Path(save).parent.is_dir()):
        wrong = "it is a folder" if Path(save).is_dir() else f"there is no folder {Path(save).parent}"
        raise OptionError(f"cannot save to {save}: {wrong}")
    report = memory_report(**options)
    if plot:
        save_figure(report.figure(), plot)
    if save:
        report.memory.save(save)
    return report


def make(
    out: Annotated[str, "folder to write; must not exist or be empty"],
    *,
    num_images: Annotated[int, "images"] = 200,
    captions_per_image: Annotated[int, "captions of each"] = 5,
    max_side: Annotated[int, "longest side in pixels"] = 640,
    val_fraction: Annotated[float, "share of images in the split 'val'"] = 0.1,
    seed: Seed = 0,
) -> Any:
    """Write a seeded data set of learnable scenes and captions, in COCO format."""
    options = locals()
    from mmlab.data.synthetic import make_dataset

    path, count = make_dataset(**options), num_images * captions_per_image
    document = {"path": str(path), "num_images": num_images, "num_captions": count}
    return Printed(document=document, text=f"Wrote {num_images} images and {count} captions to {path}")


def inspect(
    path: Data,
    *,
    image: Image = "aspect:224",
    images: Images = None,
    tokenizer: Tokenizer = "builtin",
    skip_bad_rows: SkipBadRows = False,
    plot: Plot = None,
) -> Any:
    """Show sizes, aspects, lengths, and the padding that four of the schedulers would cause."""
    from mmlab.comparison.overview import overview
    from mmlab.data.readers import errors_of, read_records
    from mmlab.runs.figures import save_figure
    from mmlab.types import parse_image_policy

    policy, errors = parse_image_policy(image), errors_of(skip_bad_rows)
    found = overview(read_records(path, images=images, tokenizer=tokenizer, errors=errors), policy)
    if plot:
        save_figure(found.figure(), plot)
    return found


def cache_build(
    folder: CacheFolder,
    *,
    data: Data,
    image: Image = "square:224",
    images: Images = None,
    skip_bad_rows: SkipBadRows = False,
    engine: Annotated[Literal["threads", "ray"], "who decodes: threads of every rank, or Ray"] = "threads",
    threads: Annotated[int | None, "decoders (default: one a core)"] = None,
    limit_gib: Annotated[float | None, "size that the cache may have (default: no limit)"] = None,
) -> Any:
    """Decode and resize the images of a data set into a cache; continues where it stopped."""
    from mmlab.data.dataset import MultimodalDataset
    from mmlab.data.readers import errors_of, read_records
    from mmlab.loading.cache import SampleCache, build_cache, build_cache_on_ray, cache_key
    from mmlab.types import parse_image_policy

    shown = place_in_launch()[0] == 0
    records = read_records(data, images=images, errors=errors_of(skip_bad_rows), progress=shown)
    dataset = MultimodalDataset(records, image_policy=parse_image_policy(image))
    limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
    dataset.cache = SampleCache(folder, key=cache_key(dataset), limit_bytes=limit_bytes)
    if not (Path(folder).is_dir() and os.access(folder, os.W_OK)):
        raise OptionError(f"cannot write into {folder}; name another folder")
    if engine == "ray":
        return build_cache_on_ray(dataset, num_actors=threads)
    return build_cache(dataset, num_threads=threads)


def bench_io(
    *,
    data: Data,
    model: Annotated[str, "preset: tiny, small, base, resnet18 or resnet50"] = "tiny",
    image: Image = "square:224",
    tokenizer: Tokenizer = "builtin",
    batch_size: Annotated[int, "samples a batch"] = 32,
    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto",
    precision: Precision = "fp32",
    limit: Limit = None,
    images: Images = None,
    skip_bad_rows: SkipBadRows = False,
) -> Any:
    """Measure every stage from the disk to the training step; name the bottleneck."""
    options = locals()
    from mmlab.comparison.io_bench import bench_io

    return bench_io(**options)


def bench_parallel(
    *,
    strategies: Annotated[str | None, "names, separated by commas (default: all that can run)"] = None,
    **options: Annotated[Any, BenchOptions],
) -> Any:
    """Train with several parallel strategies in real processes; say which wins, and predict more devices."""
    from mmlab.parallel.bench import bench_parallel

    return bench_parallel(None if strategies is None else _names(strategies), **options)


_CACHE = {"build": cache_build, "info": cache_info, "verify": verify_cache, "clear": clear_cache}
COMMANDS: dict[str, Any] = {  # as --help lists them; a group is a pair of its help and the commands in it
    "data": ("Make or look at a data set.", {"make": make, "inspect": inspect}),
    "plan": plan,
    "memory": memory,
    "compare": compare,
    "train": train,
    "watch": watch,
    "app": app,
    "export": export,
    "cache": ("Keep decoded samples on disk.", _CACHE),
    "bench": ("Measure this machine.", {"io": bench_io, "parallel": bench_parallel}),
    "tour": copy_tour,
    "doctor": diagnose,
}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] or [text]  # refused as an unknown name
