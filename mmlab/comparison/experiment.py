"""The one place that joins the parts: read, plan, train under each scheduler, measure, compare.

Notebooks, dashboard and command line all go through `compare`. What makes a comparison fair is decided here:

* every arm starts from the same weights and sees the same samples the same number of times;
* arms take turns epoch by epoch, in rotating order, so that a slow minute of the machine does not fall on one
  of them;
* every image file is read once beforehand, so that no arm pays for a cold page cache;
* the first steps of every turn are not timed, medians over epochs are reported and every epoch is kept;
* peak memory is measured apart: one step on the arm's costliest batch, alone, with a fresh model and
  optimizer.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tqdm.auto import tqdm

from mmlab.comparison.arms import WARMUP_STEPS, Arm, Bench, take_turns
from mmlab.comparison.preparation import COST, describe_machine, make_datasets
from mmlab.comparison.result import Comparison
from mmlab.data.records import Records
from mmlab.errors import OptionError
from mmlab.loading.loader import default_num_workers
from mmlab.machine import resolve_device, signals_held, versions
from mmlab.runs.control import Control
from mmlab.runs.folders import COMPARISON_FILES, fresh_folder
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import batch_costs
from mmlab.schedule.dense import Memory
from mmlab.schedule.schedulers import scheduler_type

NUM_NEGATIVES = 31  # negatives that the training loss is normalised to, whatever the batch size


def compare(
    data: str | Path | Records,
    schedulers: Sequence[str] | Mapping[str, Scheduler] = ("random", "sorted", "bucket", "budget"),
    *,
    budget: float | None = None,
    batch_size: int = 32,
    epochs: int = 3,
    limit: int | None = None,
    image: str = "aspect:128",
    model: str = "tiny",
    tokenizer: str = "builtin",
    lr: float = 1e-3,
    device: str = "auto",
    precision: str = "fp32",
    seed: int = 0,
    num_workers: int | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    control: Control | None = None,
) -> Comparison:
    """Train the same model on the same pairs under each scheduler and report what each cost.

    Pairs marked with a split `val` or `test` are held out; without one, a tenth of the images is.

    Args:
        data: anything that `read_records` takes, or records.
        schedulers: names from `SCHEDULERS`, or configured schedulers by the name that they shall have.
        budget: padded tokens that a batch may cost, for schedulers with a budget; `batch_size` mean samples
            unless given.
        batch_size: samples a batch, for schedulers with a fixed size.
        epochs: turns of every arm; each is one repetition.
        limit: use only the first pairs.
        image: image policy in short form, see `parse_image_policy`.
        model: a preset's name, see `mmlab.model.PRESETS`.
        out: folder for `comparison.json`, `table.csv`, `figure.png`, `report.html` and the runs' events; a
            comparison that is already there is moved to `previous-N` inside it. Nothing is written when None.
        control: where pause and stop are read; `mmlab.runs.control.send(out, "pause")` holds the arm in hand, `"stop"` ends
            with the epochs that every arm finished.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work; the message names it.
    """
    if epochs < 1:
        raise OptionError(f"epochs must be at least 1, found {epochs}")
    if batch_size < 1:
        raise OptionError(f"batch size must be at least 1, found {batch_size}")
    if seed < 0:
        raise OptionError(f"seed must not be negative, found {seed}")
    control = control or Control(out)
    chosen_device = resolve_device(device)
    train_set, held_out_set = make_datasets(
        data, image=image, tokenizer=tokenizer, limit=limit, seed=seed, progress=progress
    )
    budget = batch_size * float(batch_costs(COST, train_set.sizes.alone).mean()) if budget is None else budget
    planners = _planners(schedulers, batch_size=batch_size, budget=budget, seed=seed)
    workers = default_num_workers() if num_workers is None else num_workers
    config = {
        "data": train_set.records.source,
        "num_train": len(train_set),
        "num_held_out": len(held_out_set),
        "budget": budget,
        "budget_unit": COST.unit,
        "batch_size": batch_size,
        "epochs": epochs,
        "image": str(train_set.image_policy),
        "model": model,
        "tokenizer": tokenizer,
        "precision": precision,
        "lr": lr,
        "num_negatives": NUM_NEGATIVES,
        "warmup_steps": WARMUP_STEPS,
        "seed": seed,
        "num_workers": workers,
        "device": chosen_device,
        "machine": describe_machine(chosen_device),
        "versions": versions(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    folder = None if out is None else fresh_folder(Path(out), COMPARISON_FILES)
    bench = Bench(
        config=config,
        train_set=train_set,
        held_out_set=held_out_set,
        folder=folder,
        control=control,
        memory=next((planner for planner in planners.values() if isinstance(planner, Memory)), None),
    )
    arms = [Arm(name, planner, bench) for name, planner in planners.items()]
    _warm_page_cache(train_set.records, progress)
    interrupted = take_turns(arms, bench, progress)
    finished = min(len(arm.epochs) for arm in arms)
    if not finished:
        raise KeyboardInterrupt
    with signals_held(signal.SIGINT):  # minutes of training must not be lost in the last second
        comparison = Comparison(
            config=config,
            arms=[arm.result(finished) for arm in arms],
            interrupted=interrupted,
            folder=folder,
        )
        if folder is not None:
            comparison.save(folder)
    return comparison


def _planners(
    schedulers: Sequence[str] | Mapping[str, Scheduler], *, batch_size: int, budget: float, seed: int
) -> dict[str, Scheduler]:
    """Configured schedulers by name; a name takes those of these options that its scheduler has."""
    if not schedulers:
        raise OptionError("no schedulers to compare; give at least one name")
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    twice = {name for name in schedulers if list(schedulers).count(name) > 1}
    if twice:
        raise OptionError(f"scheduler {sorted(twice)[0]!r} is named twice; name each once")
    shared = {"batch_size": batch_size, "budget": budget, "seed": seed}
    kinds = {name: scheduler_type(name) for name in schedulers}
    return {name: kind(**kind.options_among(shared)) for name, kind in kinds.items()}


def _warm_page_cache(records: Records, progress: bool) -> None:
    """Read every image file once."""
    one_per_image = np.unique(records.group, return_index=True)[1]
    rows = [int(row) for row in one_per_image if records.image_paths[row] is not None]
    with ThreadPoolExecutor(8) as pool:
        for _ in tqdm(
            pool.map(records.read_image, rows),
            total=len(rows),
            desc="reading files",
            disable=None if progress else True,
        ):
            pass
