"""A comparison: read, plan, train under each scheduler, measure, compare.

Notebooks, dashboard and command line all call `compare`. These rules make a comparison fair:

* every run starts from the same weights and sees the same samples the same number of times;
* runs take turns epoch by epoch, in rotating order, so that a slow minute of the machine does not hit only
  one of them;
* schedulers given by name get the largest batches that one limit on the predicted memory allows
  (`mmlab.comparison.sizing`);
* every image file is read once beforehand, so that no run pays for a cold page cache;
* the first steps of every turn are not timed, medians over epochs are reported and every epoch is kept;
* peak memory is measured separately: one step on the run's costliest batch, alone, with a fresh model and
  optimizer.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from mmlab.comparison.options import COMPARED, ComparisonOptions, DataOptions, read_options, scheduler_names
from mmlab.comparison.preparation import COST, augmentation, describe_machine, make_datasets
from mmlab.comparison.result import Comparison
from mmlab.comparison.sizing import Sized, as_configured, size_schedulers
from mmlab.comparison.turns import NUM_NEGATIVES, ComparisonRun, ComparisonSetup, result_of, take_turns
from mmlab.data.conversations import Conversations
from mmlab.data.records import Records
from mmlab.errors import OptionError, check_is
from mmlab.loading.loader import default_num_workers
from mmlab.machine import progress_bar, resolve_device, signals_held, versions
from mmlab.model.conversation_model import refuse_preset
from mmlab.runs.control import Control
from mmlab.runs.folders import COMPARISON, COMPARISON_FILES, TIME_MODEL, exclusive_folder, move_earlier_aside
from mmlab.runs.summaries import WARMUP_STEPS
from mmlab.schedule.base import Scheduler


def compare(
    data: str | Path | Records | Conversations,
    schedulers: Sequence[str] | Mapping[str, Scheduler] = COMPARED,
    *,
    out: str | Path | None = None,
    progress: bool = True,
    control: Control | None = None,
    **options: Any,
) -> Comparison:
    """Train the same model on the same pairs under each scheduler and report what each costs.

    Pairs of a validation split (`val`, `dev`, ...) or else `test` are held out; without such a split, a tenth of the images.

    Args:
        data: anything that `read_records` takes, or records; with `processor`, what `read_conversations` takes.
        schedulers: names from `SCHEDULERS`, or a mapping from names of your choice to configured schedulers.
            Those given by name get the largest batches that fit the same memory; the model is first priced in
            bytes and seconds for this, which takes half a minute for a small one. With `equal="batch_size"`
            they have one batch size, or a budget of so many average samples.
        out: folder for `comparison.json`, `table.csv`, `figure.png`, `report.html` and the runs' events; a
            comparison that is already there is moved to `previous-N` inside it. Nothing is written when None. The
            first two are also written whenever every run has finished an epoch, and stay if the comparison fails
            or is killed.
        control: where requests to pause and stop are read; `mmlab.runs.control.send(out, "pause")` pauses the
            current run, `"stop"` ends the comparison with the epochs that every run finished.
        options: fields of `mmlab.comparison.options.ComparisonOptions`, such as `equal`, `budget`, `batch_size`, `epochs`,
            `limit`, `image`, `augment`, `ratios`, `adaptive`, `model`, `device`, `precision`, `memory_gb` and `seed`.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work, and the message names it; or another run is using the folder.
        KeyboardInterrupt: it was stopped before every run had finished an epoch, so there is no result.
    """
    check_is("out", out, str | Path, "a folder's path", optional=True)
    chosen = read_options(ComparisonOptions, options, "compare")
    augmentation(chosen.augment)
    num_workers = default_num_workers() if chosen.num_workers is None else chosen.num_workers
    chosen = dataclasses.replace(chosen, device=resolve_device(chosen.device), num_workers=num_workers)
    control = control or Control(out)
    with ExitStack() as stack:
        # no other run writes there
        stack.enter_context(nullcontext() if out is None else exclusive_folder(Path(out)))
        spare_disk = stack.enter_context(ExitStack())
        if out is not None:  # should the disk fill up, this is room for errors, ends and results
            spare_disk.enter_context(TemporaryFile(dir=out, buffering=0)).write(os.urandom(1 << 20))
        names = scheduler_names(schedulers)
        by_batch = "memory" not in names and (chosen.budget or chosen.equal == "batch_size")
        if chosen.memory_gb and (by_batch or isinstance(schedulers, Mapping)):
            raise OptionError("memory_gb needs schedulers by name, at equal memory: drop budget and equal")
        control.report_phase("reading headers")
        train_set, held_out_set = _data_sets(data, chosen, progress)
        control.report_phase("pricing the model and planning")
        if isinstance(schedulers, Mapping):
            sized = as_configured(schedulers, chosen, train_set)
        else:
            sized = size_schedulers(names, chosen, train_set, progress=progress)
        equal = "memory" if sized.budget is None else "batch_size"  # what is the same for all
        config = _description(chosen, sized, train_set, held_out_set)
        setup = ComparisonSetup(
            options=chosen,
            config=config | {"equal": None if isinstance(schedulers, Mapping) else equal},
            train_set=train_set,
            held_out_set=held_out_set,
            folder=None if out is None else move_earlier_aside(Path(out), COMPARISON_FILES, say=progress),
            control=control,
            sized=sized,
        )
        gc.collect()
        gc.freeze()  # else each collection between turns would scan all imported objects
        stack.callback(gc.unfreeze)
        return _train_arms(setup, progress, spare_disk)


def _description(options: ComparisonOptions, sized: Sized, train_set: Any, held_out: Any) -> dict[str, Any]:
    """What is compared, on what and where: the keys of `comparison.json` beside the results."""
    time = sized.time
    return {
        **dataclasses.asdict(options),
        "budget": sized.budget,
        "data": train_set.records.source,
        "num_train": len(train_set),
        "num_held_out": len(held_out),
        "num_bad_rows": len(train_set.records.bad_rows),
        "budget_unit": COST.unit,
        "memory_limit_bytes": sized.limit_bytes,
        "time_model": time and {**time.held_out, "spread_ratio": time.spread_ratio},
        "image": None if options.processor else str(train_set.image_policy),
        "num_negatives": NUM_NEGATIVES,
        "warmup_steps": WARMUP_STEPS,
        "machine": describe_machine(options.device),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _train_arms(setup: ComparisonSetup, progress: bool, spare_disk: ExitStack) -> Comparison:
    """Train under every scheduler, and save the result."""
    folder, time = setup.folder, setup.sized.time
    if folder is not None and time is not None:
        time.save(folder / TIME_MODEL)
    runs = [ComparisonRun(name, planner, setup) for name, planner in setup.sized.planners.items()]
    setup.control.report_phase("reading every image once")
    _warm_page_cache(setup.train_set, progress)
    try:
        interrupted = take_turns(runs, setup, progress, spare_disk)
    except Exception as error:
        if folder is not None and (folder / COMPARISON).exists():
            error.add_note(f"load_comparison({str(folder)!r}) has the epochs that all schedulers finished")
        raise
    if not all(run.epochs for run in runs):
        raise KeyboardInterrupt
    # minutes of training must not be lost in the last second
    with signals_held(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        comparison = result_of(runs, setup, interrupted=interrupted)
        if folder is not None:
            try:
                comparison.save(folder)
            except OSError:  # the disk is full: what was measured is shown, at least
                print(comparison, file=sys.stderr)
                raise
    return comparison


def _data_sets(data: Any, options: ComparisonOptions, progress: bool) -> tuple[Any, Any]:
    """Training and held-out samples: conversations if a processor is given, else pairs."""
    if options.processor is not None:
        refuse_preset(options.model, "model")
        default = ComparisonOptions()
        of_pairs = ("image", "tokenizer", "augment", "adaptive")
        if given := [name for name in of_pairs if getattr(options, name) != getattr(default, name)]:
            raise OptionError(f"{', '.join(given)}: the processor makes the batches; leave that out")
    names = ("processor", "image", "images", "skip_bad_rows", "tokenizer", "limit")
    prepared = DataOptions(path="", **{name: getattr(options, name) for name in names})
    return make_datasets(data, prepared, ratios=options.ratios, seed=options.seed, progress=progress)


def _warm_page_cache(dataset: Any, progress: bool) -> None:
    """Read every image file once."""
    rows = {path: row for row, path in enumerate(dataset.records.image_paths) if path is not None}.values()
    with ThreadPoolExecutor(8) as pool:
        for _ in progress_bar(pool.map(dataset.read, rows), "reading files", len(rows), show=progress):
            pass
