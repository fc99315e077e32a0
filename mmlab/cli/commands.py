"""What each command does: options in, a document for `--json` and a text out. Each imports what it needs."""

from __future__ import annotations

import os
import signal
import sys
from argparse import Namespace
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mmlab.errors import OptionError
from mmlab.machine import GIB

Printed = tuple[Any, str]  # ready for JSON; for people


def run_compare(options: Namespace) -> Printed:
    """Train the same model under several batch schedulers, side by side."""
    from mmlab.comparison.experiment import compare
    from mmlab.comparison.options import ComparisonOptions

    comparison = compare(
        options.data,
        _names(options.schedulers),
        out=options.out or _dated_folder(),
        **{option.name: getattr(options, option.name) for option in fields(ComparisonOptions)},
    )
    written = "\n".join(
        f"  {comparison.folder}/{name}"
        for name in ("comparison.json", "table.csv", "figure.png", "report.html")
    )
    return comparison.as_dict(), f"{comparison}\nWritten:\n{written}"


def run_train(options: Namespace) -> Printed:
    """Train a model as a TOML file says; go on after a stop or a kill."""
    from mmlab.comparison.config import load_config
    from mmlab.comparison.train import train

    config = load_config(options.config, options.set)
    _exit_on_sigterm()  # so that the run is told of it
    result = train(config, runs=options.runs, resume=options.resume)
    return asdict(result), str(result)


def run_watch(options: Namespace) -> Printed:
    """Show the runs below a folder live, whoever started them; ending it leaves them alone."""
    from mmlab.runs.watch import follow, summary, text_of

    if options.once or options.json:
        found = summary(options.folder)
        return found, text_of(found)
    return follow(options.folder, interval_s=options.interval), ""


def run_app(options: Namespace) -> Printed:
    """Serve a notebook as a page without code, on this machine only (needs voila)."""
    from mmlab.lab.app import App

    _exit_on_sigterm()  # so that the server and its kernels end as well
    with App(options.notebook, port=options.port) as app:
        print(
            f"Serving at {app.url}\nCtrl-C ends it.",
            file=sys.stderr if options.json else sys.stdout,
            flush=True,
        )
        app.wait()
    return {"url": app.url}, "Ended."


def _exit_on_sigterm() -> None:
    """Leave by an exception, which lets every block clean up behind it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def run_export(options: Namespace) -> Printed:
    """Give a run to TensorBoard, Weights & Biases or MLflow."""
    from mmlab.runs.trackers import export_run

    num_points = export_run(options.folder, options.to, options.target)
    document = {"run": options.folder, "to": options.to, "target": options.target, "num_points": num_points}
    return document, f"Gave {num_points} points of {options.folder} to {options.to} at {options.target}"


def run_plan(options: Namespace) -> Printed:
    """Show what each scheduler's batches would waste, before any training."""
    from mmlab.schedule.preview import preview, read_lengths
    from mmlab.types import Aspect

    if options.lengths:
        sizes = read_lengths(options.lengths)
    else:
        sizes = _measured_records(options.data, "builtin").sizes()
    policy = Aspect(options.max_side**2, options.patch)
    report = preview(
        sizes.resized(policy),
        _names(options.schedulers),
        **_chosen(options, "budget patch ranks epochs seed"),
    )
    return report.as_dict(), str(report)


def run_memory(options: Namespace) -> Printed:
    """Say what memory each batch needs, and plan batches that fill a device."""
    from mmlab.pricing.memory_report import memory_report

    if options.save and not Path(options.save).parent.is_dir():  # pricing takes a while
        raise OptionError(f"cannot save to {options.save}: there is no folder {Path(options.save).parent}")
    report = memory_report(
        options.model,
        options.data,
        **_chosen(
            options, "memory_gb device precision checkpointing accumulating optimizer image tokenizer limit"
        ),
    )
    if options.plot:
        report.save_figure(options.plot)
    if options.save:
        report.memory.save(options.save)
    return report.as_dict(), str(report)


def run_make(options: Namespace) -> Printed:
    """Write a seeded data set of learnable scenes and captions, in COCO format."""
    from mmlab.data.synthetic import make_dataset

    path = make_dataset(
        options.out,
        **_chosen(options, "num_images captions_per_image seed max_side val_fraction"),
    )
    count = options.num_images * options.captions_per_image
    document = {"path": str(path), "num_images": options.num_images, "num_captions": count}
    return document, f"Wrote {options.num_images} images and {count} captions to {path}"


def run_inspect(options: Namespace) -> Printed:
    """Show sizes, aspects, lengths, and the padding each scheduler would cause."""
    from mmlab.comparison.overview import overview
    from mmlab.types import parse_image_policy

    policy = parse_image_policy(options.image)
    records = _measured_records(
        options.path, options.tokenizer, errors="report" if options.skip_bad_rows else "raise"
    )
    result = overview(records, policy)
    if options.plot:
        result.save_figure(options.plot)
    return result.as_dict(), str(result)


def run_cache_build(options: Namespace) -> Printed:
    """Decode, resize and tokenise a data set into a cache; goes on where it stopped."""
    from mmlab.data.dataset import MultimodalDataset
    from mmlab.data.readers import read_records
    from mmlab.loading.cache.build import build_cache
    from mmlab.loading.cache.key import cache_key
    from mmlab.loading.cache.on_ray import build_cache_on_ray
    from mmlab.loading.cache.store import SampleCache
    from mmlab.types import parse_image_policy

    speaks = os.environ.get("RANK", "0") == "0"
    dataset = MultimodalDataset(
        read_records(options.data, progress=speaks),
        tokenizer=options.tokenizer,
        image_policy=parse_image_policy(options.image),
        max_tokens=options.max_tokens,
    )
    limit_bytes = None if options.limit_gib is None else int(options.limit_gib * GIB)
    dataset.cache = SampleCache(options.folder, key=cache_key(dataset), limit_bytes=limit_bytes)
    if options.engine == "ray":
        report = build_cache_on_ray(dataset, num_actors=options.threads)
    else:
        report = build_cache(dataset, num_threads=options.threads)
    return asdict(report), str(report)


def run_cache_info(options: Namespace) -> Printed:
    """Show what a cache has and what it was made with."""
    from mmlab.cli.cache import cache_info

    info = cache_info(options.folder)
    return asdict(info), str(info)


def run_cache_verify(options: Namespace) -> Printed:
    """Read all of a cache and list what is damaged."""
    from mmlab.cli.cache import verify_cache

    found = verify_cache(options.folder)
    return asdict(found), str(found)


def run_cache_clear(options: Namespace) -> Printed:
    """Remove all that a cache has."""
    from mmlab.cli.cache import clear_cache

    removed = clear_cache(options.folder)
    return removed, f"Removed {removed['num_files']} files, {removed['num_bytes'] / 2**20:,.1f} MiB"


def run_bench_io(options: Namespace) -> Printed:
    """Measure every stage from the disk to the training step; name the bottleneck."""
    from mmlab.comparison.io_bench import bench_io

    found = bench_io(
        options.data, **_chosen(options, "model image tokenizer batch_size device precision limit")
    )
    return found.as_dict(), str(found)


def run_bench_parallel(options: Namespace) -> Printed:
    """Train with several parallel strategies in real processes; say who wins, and what more devices would give."""
    from mmlab.parallel.bench import bench_parallel
    from mmlab.runs.figures import check_plot_name

    if options.plot:  # measuring takes a while
        check_plot_name(options.plot)
    found = bench_parallel(
        None if options.strategies is None else _names(options.strategies),
        **_chosen(options, "ranks model batch_size image_side num_tokens steps rounds device precision seed"),
    )
    if options.plot:
        found.save_figure(options.plot)
    return found.as_dict(), str(found)


def run_doctor(options: Namespace) -> Printed:
    """Say what this machine has, how fast it reads, and what is missing."""
    from mmlab.cli.doctor import diagnose

    diagnosis = diagnose(options.data)
    return diagnosis.as_dict(), str(diagnosis)


def _measured_records(path: str, tokenizer: str, **reading: Any) -> Any:
    """Records with text lengths counted by the tokenizer."""
    from mmlab.data.readers import read_records
    from mmlab.data.text import load_tokenizer, measure_tokens

    records = read_records(path, **reading)
    return measure_tokens(records, load_tokenizer(tokenizer, records=records))


def _chosen(options: Namespace, names: str) -> dict[str, Any]:
    """The options that a function takes under the same names."""
    return {name: getattr(options, name) for name in names.split()}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _dated_folder() -> str:
    from datetime import datetime

    return f"runs/compare-{datetime.now():%Y%m%d-%H%M%S}"
