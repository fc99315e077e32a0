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

import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from mmlab.arms import COST, WARMUP_STEPS, Arm, Bench, take_turns
from mmlab.comparison import Comparison
from mmlab.cost import batch_costs
from mmlab.dataset import MultimodalDataset
from mmlab.errors import DataError, OptionError
from mmlab.images import parse_image_policy
from mmlab.loader import default_num_workers
from mmlab.machine import cpu_name, num_usable_cores, versions
from mmlab.readers import read_records
from mmlab.records import Records
from mmlab.schedule import SCHEDULERS, BatchScheduler, make_scheduler
from mmlab.text import load_tokenizer

if TYPE_CHECKING:
    from mmlab.types import SampleSizes

NUM_NEGATIVES = 31  # negatives that the training loss is normalised to, whatever the batch size


_WRITTEN = ("comparison.json", "table.csv", "figure.png", "report.html", "runs")


def compare(
    data: str | Path | Records,
    schedulers: Sequence[str] | Mapping[str, BatchScheduler] = ("random", "sorted", "bucket", "budget"),
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
    policy = parse_image_policy(image)
    chosen_device = resolve_device(device)
    records = data if isinstance(data, Records) else read_records(data, progress=progress)
    train_records, held_out_records = hold_out(_first(records, limit), seed=seed)
    text_tokenizer = load_tokenizer(tokenizer, records=train_records)
    train_set, held_out_set = (
        MultimodalDataset(part, tokenizer=text_tokenizer, image_policy=policy)
        for part in (train_records, held_out_records)
    )
    budget = batch_size * mean_cost(train_set.sizes) if budget is None else budget
    planners = _planners(schedulers, batch_size=batch_size, budget=budget, seed=seed)
    workers = default_num_workers() if num_workers is None else num_workers
    config = {
        "data": records.source,
        "num_train": len(train_set),
        "num_held_out": len(held_out_set),
        "budget": budget,
        "budget_unit": COST.unit,
        "batch_size": batch_size,
        "epochs": epochs,
        "image": str(policy),
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
    folder = None if out is None else _fresh_folder(Path(out))
    bench = Bench(config=config, train_set=train_set, held_out_set=held_out_set, folder=folder)
    arms = [Arm(name, planner, bench) for name, planner in planners.items()]
    _warm_page_cache(train_set.records, progress)
    interrupted = take_turns(arms, bench, progress)
    finished = min(len(arm.epochs) for arm in arms)
    if not finished:
        raise KeyboardInterrupt
    comparison = Comparison(
        config=config,
        arms=[arm.result(finished) for arm in arms],
        interrupted=interrupted,
        folder=folder,
    )
    if folder is not None:
        comparison.save(folder)
    return comparison


def hold_out(records: Records, *, seed: int = 0) -> tuple[Records, Records]:
    """Training and held-out pairs: by the data's own split `val` or `test`, else a tenth of the images, at least two.

    Raises:
        DataError: fewer than two images on one side; a pair is judged against others.
    """
    splits = np.array(records.splits if records.splits is not None else [None] * len(records), dtype=object)
    held_out = np.isin(splits, ("val", "test"))
    if held_out.any():
        name = "val" if "val" in splits else "test"
        train_records, held_out_records = (
            records.select(np.flatnonzero(side)) for side in (~held_out, splits == name)
        )
    else:
        num_images = len(np.unique(records.group))
        train_records, held_out_records = records.hold_out(
            min(0.5, max(0.1, 2 / max(1, num_images))), seed=seed
        )
    for part, side in ((train_records, "train on"), (held_out_records, "hold out")):
        num_images = len(np.unique(part.group))
        if num_images < 2:
            raise DataError(
                f"{records.source or 'the data'}: found {num_images} image to {side} in {len(records)} pairs, "
                "at least 2 are needed; give more images, or a higher limit"
            )
    return train_records, held_out_records


def mean_cost(sizes: SampleSizes) -> float:
    """Mean padded tokens of one sample on its own: text tokens + image patches."""
    shapes = np.column_stack(
        [np.ones(len(sizes), dtype=np.int64), sizes.num_tokens, sizes.height, sizes.width]
    )
    return float(batch_costs(COST, shapes).mean())


def resolve_device(name: str) -> str:
    """`auto` is the GPU where there is one, else the CPU.

    Raises:
        OptionError: not a device of this machine.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"device {name!r} cannot be used here ({reason}); try auto or cpu") from error
    return name


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know of the machine to place its figures."""
    return {
        "platform": platform.platform(),
        "processor": cpu_name(),
        "cores": num_usable_cores(),
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
    }


def _first(records: Records, limit: int | None) -> Records:
    if limit is not None and limit < 2:
        raise OptionError(f"limit must be at least 2 pairs, found {limit}")
    return records if limit is None else records[:limit]


def _planners(
    schedulers: Sequence[str] | Mapping[str, BatchScheduler], *, batch_size: int, budget: float, seed: int
) -> dict[str, BatchScheduler]:
    """Configured schedulers by name; a name takes those of these options that its scheduler has."""
    if not schedulers:
        raise OptionError("no schedulers to compare; give at least one name")
    if isinstance(schedulers, Mapping):
        return dict(schedulers)
    twice = {name for name in schedulers if list(schedulers).count(name) > 1}
    if twice:
        raise OptionError(f"scheduler {sorted(twice)[0]!r} is named twice; name each once")
    shared = {"batch_size": batch_size, "budget": budget, "seed": seed}
    return {name: make_scheduler(name, **_taken_by(name, shared)) for name in schedulers}


def _taken_by(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Those options that the scheduler of this name has."""
    known = SCHEDULERS[name].__dataclass_fields__ if name in SCHEDULERS else {}
    return {key: value for key, value in options.items() if key in known}


def _fresh_folder(folder: Path) -> Path:
    """The folder, with the results of a comparison made before moved to `previous-N` inside it."""
    old = [path for name in _WRITTEN if (path := folder / name).exists()]
    if old:
        number = 1 + sum(1 for _ in folder.glob("previous-*"))
        aside = folder / f"previous-{number}"
        aside.mkdir()
        for path in old:
            path.rename(aside / path.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
