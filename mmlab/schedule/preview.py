"""Schedulers side by side before any training: plan some epochs with each, measure the plans. Reads sizes only."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, unknown_name
from mmlab.schedule.base import Scheduler, require_at_least, sizes_of
from mmlab.schedule.classic import FixedSize
from mmlab.schedule.cost import PATCH, PaddedTokens
from mmlab.schedule.metrics import cells
from mmlab.schedule.packed import Packed
from mmlab.schedule.report import report_plan
from mmlab.types import SampleSizes

if TYPE_CHECKING:
    import pandas as pd

    from mmlab.types import Samples

FIGURES = (
    "num_batches",
    "text_waste",
    "image_waste",
    "combined_waste",
    "peak_over_budget",
    "straggler",
    "randomness",
    "collision_ratio",
    "coverage",
    "num_duplicates",
    "plan_cpu_s",
)
_AVERAGED = ("text_waste", "image_waste", "combined_waste", "straggler", "collision_ratio")
_DEFAULT_BATCH_SIZE = 32
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Preview:
    """One row a scheduler. All ratios are fractions; `randomness` is None where only one epoch was planned."""

    figures: dict[str, dict[str, float | None]]  # scheduler -> `FIGURES`
    budget: float  # padded tokens a batch

    def as_dict(self) -> dict[str, dict[str, float | None]]:
        """Scheduler -> figure -> number, ready for JSON."""
        return self.figures

    @property
    def table(self) -> pd.DataFrame:
        """One row a scheduler, one column a figure."""
        import pandas as pd

        return pd.DataFrame.from_dict(self.figures, orient="index", columns=list(FIGURES))

    def __str__(self) -> str:
        shown = self.table.copy()
        for name in (
            "text_waste",
            "image_waste",
            "combined_waste",
            "straggler",
            "collision_ratio",
            "coverage",
        ):
            shown[name] = [f"{100 * value:.2f} %" for value in shown[name]]
        shown["num_batches"] = [f"{value:.0f}" for value in shown["num_batches"]]
        return f"budget: {self.budget:.0f} padded tokens a batch\n{shown.to_string(float_format='{:.3f}'.format)}"

    def _repr_html_(self) -> str:
        return self.table.to_html(border=0, float_format="{:.4f}".format)


def preview(
    samples: Samples,
    schedulers: Iterable[str],
    *,
    budget: float | None = None,
    patch: int = PATCH,
    ranks: int = 8,
    epochs: int = 2,
    seed: int = 0,
    **changes: Any,
) -> Preview:
    """Plan `epochs` epochs with each scheduler and measure the plans.

    Schedulers of a fixed batch size take as many average samples as the budget holds.

    Args:
        samples: what to plan; sizes as the model will see them.
        schedulers: names in `SCHEDULERS`.
        budget: padded tokens that a batch may cost; None takes 32 average samples.
        patch: side of an image patch in pixels.
        ranks: ranks that step together, for `straggler`, and for which plans are made even.
        epochs: how many to plan; figures are means over them, peaks are the highest.
        changes: options of schedulers, such as `window=4096`; each scheduler takes those that it has.

    Raises:
        OptionError: an unknown name, a number out of range, or a budget below the costliest sample.
    """
    from mmlab.schedule.schedulers import SCHEDULERS, scheduler_type

    for name, value in (("ranks", ranks), ("epochs", epochs), ("patch", patch)):
        require_at_least(name, value, 1)
    sizes = sizes_of(samples)
    cost = PaddedTokens(patch)
    patches = cells(sizes.height, patch) * cells(sizes.width, patch)
    mean = float((sizes.num_tokens + patches).mean()) if len(sizes) else 1.0
    if budget is None:
        budget = max(_DEFAULT_BATCH_SIZE * mean, float((sizes.num_tokens + patches).max(initial=0)))
    fields = {name for kind in SCHEDULERS.values() for name in kind.__dataclass_fields__}
    for name in changes:
        if name not in fields:
            raise unknown_name("scheduler option", name, fields)
    figures = {}
    for name in schedulers:
        kind = scheduler_type(name)
        options: dict[str, Any] = {"seed": seed, "world_size": ranks}
        options |= kind.options_among(changes)
        if issubclass(kind, FixedSize):
            options["batch_size"] = max(1, round(budget / max(1.0, mean)))
        else:
            options |= {"budget": budget} | ({"patch": patch} if issubclass(kind, Packed) else {"cost": cost})
        figures[name] = _measure(kind(**options), sizes, budget, ranks, epochs)
    return Preview(figures, budget)


def _measure(
    scheduler: Scheduler,
    sizes: SampleSizes,
    budget: float,
    ranks: int,
    epochs: int,
) -> dict[str, float | None]:
    few = sizes.take(np.arange(min(len(sizes), 64)))
    rng = np.random.default_rng(0)
    scheduler.make_batches(few, np.arange(len(few)), rng, scheduler.limits(sizes))  # compiles, off the clock
    start_s = time.process_time()
    plans = [scheduler.plan(sizes, epoch=epoch) for epoch in range(epochs)]
    for plan in plans:
        len(plan)
    plan_cpu_s = (time.process_time() - start_s) / epochs
    reports = [
        report_plan(plan, budget=budget, num_ranks=ranks, following=following)
        for plan, following in zip_longest(plans, plans[1:])
    ]
    scores = [report.randomness for report in reports if report.randomness is not None]
    return {
        "num_batches": reports[0].num_batches,
        **{name: float(np.mean([getattr(report, name) for report in reports])) for name in _AVERAGED},
        "peak_over_budget": max(report.peak_over_budget or 0.0 for report in reports),
        "randomness": float(np.mean(scores)) if scores else None,
        "coverage": min(report.coverage for report in reports),
        "num_duplicates": max(report.num_duplicates for report in reports),
        "plan_cpu_s": plan_cpu_s,
    }


def read_lengths(path: str | Path) -> SampleSizes:
    """Read sizes from a CSV or Parquet file: the columns height, width, num_tokens and, optionally, image_id.

    Rows of one `image_id` share an image; without that column every row has its own.

    Raises:
        DataError: a missing file or column, an empty file, or a value that is not a whole number >= 0, with its row.
    """
    try:
        text = _parquet_as_csv(path) if Path(path).suffix == ".parquet" else Path(path).read_text("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"no file {path}") from None
    rows = list(csv.reader(text.splitlines()))
    header = [name.strip() for name in rows[0]] if rows else []
    missing = [name for name in ("height", "width", "num_tokens") if name not in header]
    if missing:
        raise DataError(
            f"{path}: no column {', '.join(missing)}; found {', '.join(header) or 'an empty file'}; "
            "expected height,width,num_tokens[,image_id]"
        )
    columns = {name: _whole_numbers(path, rows, header, name) for name in ("height", "width", "num_tokens")}
    if "image_id" in header:
        place = header.index("image_id")
        images = [row[place] if place < len(row) else "" for row in rows[1:]]
        columns["group"] = np.unique(images, return_inverse=True)[1]
    else:
        columns["group"] = np.arange(len(rows) - 1)
    return SampleSizes(**columns)


def _parquet_as_csv(path: str | Path) -> str:
    import pandas as pd

    return pd.read_parquet(path).to_csv(index=False)


def _whole_numbers(path: str | Path, rows: list[list[str]], header: list[str], name: str) -> np.ndarray:
    place = header.index(name)
    values = []
    for number, row in enumerate(rows[1:], start=2):
        text = row[place].strip() if place < len(row) else ""
        if not text.isdecimal() or int(text) > _LARGEST:
            raise DataError(
                f"{path}: line {number}, column {name}: expected a whole number >= 0, found {text!r}"
            )
        values.append(int(text))
    return np.array(values, dtype=np.int64)
