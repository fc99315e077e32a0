"""Schedulers side by side before any training: plan some epochs with each, measure the plans. Reads sizes only."""

from __future__ import annotations

import os
import tarfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.errors import DataError, OptionError, check_name, check_numbers, listed
from mmlab.machine import regular
from mmlab.schedule.base import Scheduler, sizes_of
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.dense import DEFAULT_MEAN_SAMPLES
from mmlab.schedule.metrics import lengths
from mmlab.schedule.packed import PACKED_NOTE
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.report import report_plan, shown
from mmlab.schedule.schedulers import SCHEDULERS, scheduler_among
from mmlab.types import PATCH, Samples, SampleSizes

if TYPE_CHECKING:
    import pandas as pd


_Summary = Callable[[list[float]], float]
# figure -> how the preview summarises its values over several epochs
_OVER_EPOCHS: dict[str, _Summary] = {
    "num_batches": max,
    "text_waste": fmean,
    "image_waste": fmean,
    "combined_waste": fmean,
    "peak_over_budget": max,
    "straggler": fmean,
    "randomness": fmean,
    "collision_ratio": fmean,
    "coverage": min,
    "num_duplicates": max,
}
_PRICES: dict[str, _Summary] = {"epoch_s": fmean, "peak_bytes": max, "epoch_price": fmean}
Prices = Callable[["BatchPlan", int], Mapping[str, float | None]]  # of a plan shared by this many ranks
_LEGEND = (  # each entry begins with a figure's name, or with the end of one
    "waste: share of the padded batch that is padding; peak_over_budget: costliest batch / budget; straggler: time lost to the "
    "slowest rank; randomness: 0 same batches every epoch, 1 new ones; collision_ratio: samples beside another of their image; "
    "coverage: samples seen; epoch_s: seconds of an epoch, - if no batch has two images; peak_bytes: of the costliest batch; "
    "epoch_price: in the currency of the price an hour"
)


@dataclass(frozen=True, slots=True)
class Preview:
    """One row per scheduler. Ratios are fractions; `randomness` is None where only one epoch was planned."""

    figures: dict[str, dict[str, float | None]]  # scheduler -> figure -> number
    budget: float | None  # padded tokens a batch
    setting: str  # budget, ranks and epochs, in words

    def as_dict(self) -> dict[str, dict[str, float | None]]:
        """Scheduler -> figure -> number, ready for JSON."""
        return self.figures

    @property
    def table(self) -> pd.DataFrame:
        """One row per scheduler, one column per figure."""
        import pandas as pd

        names = dict.fromkeys(name for figures in self.figures.values() for name in figures)
        return pd.DataFrame.from_dict(self.figures, orient="index", columns=[*names] or [*_OVER_EPOCHS])

    @property
    def headline(self) -> str:
        """What `random` would gain by another scheduler, in a sentence; empty where it is not there, or alone."""
        key = "epoch_s" if any(row.get("epoch_s") for row in self.figures.values()) else "combined_waste"
        found = {name: figures[key] for name, figures in self.figures.items() if figures.get(key) is not None}
        if len(found) < 2 or "random" not in found:
            return ""
        best = min(found, key=found.__getitem__)  # type: ignore[arg-type]
        if best == "random":
            return "In short: no scheduler is better than random here."
        what, form = ("an epoch takes", "{:.3g} s") if key == "epoch_s" else ("padding is", "{:.0%}")
        return f"In short: {what} {form.format(found['random'])} under random, {form.format(found[best])} under {best}."

    def _shown(self) -> tuple[pd.DataFrame, str]:
        """The first column and those in which schedulers differ, as people read them; the others, and what all of them mean."""
        table = self.table.apply(lambda column: column.map(lambda value: shown(str(column.name), value)))
        same = [name for name in [*table][1:] if len(table) > 1 and table[name].nunique() == 1]
        notes = ["all have " + ", ".join(f"{name} {table[name].iloc[0]}" for name in same)] if same else []
        for entry in _LEGEND.split("; "):
            if any(name.endswith(entry.partition(":")[0]) for name in table):
                notes.append(entry)
        if "packed" in table.index:
            notes.append(PACKED_NOTE if "epoch_s" in table else PACKED_NOTE.partition(";")[0])
        return table.drop(columns=same), "; ".join(notes)

    def __str__(self) -> str:
        table, notes = self._shown()
        return "\n".join(filter(None, (self.setting, table.to_string(), notes, self.headline)))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        table, notes = self._shown()
        table = table.rename(columns=lambda name: name.replace("_", " "))  # headers may wrap there
        html = table.to_html(border=0).replace("<table", '<table style="font-size: 11px"', 1)
        return f"<p>{self.setting}</p>{html}<p>{escape(notes)}</p><p>{escape(self.headline)}</p>"


def preview(
    samples: Samples,
    schedulers: Iterable[str] | Mapping[str, Scheduler],
    *,
    budget: float | None = None,
    patch: int = PATCH,
    ranks: int = 1,
    epochs: int = 2,
    seed: int = 0,
    prices: Prices | None = None,
    **changes: Any,
) -> Preview:
    """Plan `epochs` epochs with each scheduler and measure the plans.

    Schedulers of a fixed batch size take as many average samples as the budget holds.

    Args:
        samples: what to plan; sizes as the model will see them.
        schedulers: names in `SCHEDULERS`; or the schedulers by name, which have their own options and no budget in
            common.
        budget: padded tokens that a batch may cost; None takes 32 average samples.
        patch: side of an image patch in pixels.
        ranks: number of ranks: plans are made even for them, and `straggler` is measured over them.
        epochs: how many to plan; most figures are means over them, peaks and counts the highest, coverage the
            lowest.
        prices: gives further figures of a plan: `epoch_s`, `peak_bytes`, `epoch_price`.
        changes: options of schedulers, such as `window=4096`; each scheduler takes those that it has.

    Raises:
        OptionError: an unknown name, a number out of range, a budget below the costliest sample; or, beside
            schedulers, a budget, options, or other `ranks` than they plan for.
    """
    check_numbers(locals())
    sizes = sizes_of(samples)
    if isinstance(schedulers, Mapping):
        planned_for = {scheduler.world_size for scheduler in schedulers.values()}
        if budget is not None or changes or not planned_for <= {ranks}:
            raise OptionError(
                f"these schedulers have options of their own, and plan for {', '.join(map(str, planned_for))} ranks: "
                "give that as ranks, and neither a budget nor options"
            )
        planners, setting = dict(schedulers), ""
    else:
        length = np.add(*lengths(sizes, patch))
        mean = float(length.mean()) if len(sizes) else 1.0
        budget = budget or max(DEFAULT_MEAN_SAMPLES * mean, float(length.max(initial=0)))
        known = {name for kind in SCHEDULERS.values() for name in kind.__dataclass_fields__}
        for name in changes:
            check_name("scheduler option", name, known)
        size = int(np.clip(budget / max(1.0, mean), 1, 2**16).round())
        options = {"seed": seed, "world_size": ranks, "budget": budget, "cost": PaddedTokens(patch)}
        options |= {"patch": patch, "batch_size": size, **changes}
        planners = {name: scheduler_among(name, options) for name in listed(schedulers)}
        setting = f"budget: {budget:,.0f} padded tokens a batch, or {options['batch_size']} samples where the size is fixed; "
    figures = {}
    for name, scheduler in planners.items():
        plans = [scheduler.plan(sizes, epoch=epoch) for epoch in range(epochs)]
        figures[name] = _measure(plans, budget, ranks, prices, patch)
    return Preview(figures, budget, f"{setting}ranks: {ranks}; epochs: {epochs}")


def _measure(
    plans: list[BatchPlan], budget: float | None, ranks: int, prices: Prices | None, patch: int
) -> dict[str, float | None]:
    reports = [
        report_plan(plan, budget=budget, num_ranks=ranks, following=following, patch=patch)
        for plan, following in zip_longest(plans, plans[1:])
    ]
    wanted = [name for name in _OVER_EPOCHS if name != "peak_over_budget" or budget is not None]
    found = [{name: getattr(report, name) for name in wanted} for report in reports]
    if prices is not None:
        for row, plan in zip(found, plans, strict=True):
            row |= prices(plan, ranks)
    figures: dict[str, float | None] = {}
    for name in found[0]:
        values = [row[name] for row in found if row[name] is not None]
        figures[name] = {**_OVER_EPOCHS, **_PRICES}[name](values) if values else None
    return figures


def read_lengths(path: str | Path) -> SampleSizes:
    """Read sizes from a CSV or Parquet file: the columns height, width, num_tokens and, optionally, image_id.

    Rows of one `image_id` share an image; a row without one has its own.

    Raises:
        DataError: a missing file or column, an empty file, a value that is not a whole number >= 0, or an image of one side,
            with its row.
    """
    import pandas as pd

    try:
        os.close(regular(os.fspath(path), os.O_RDONLY))
        if Path(path).suffix == ".parquet":
            table = pd.read_parquet(path).reset_index(drop=True)
        else:
            options: Any = {"dtype": str, "na_filter": False, "index_col": False, "skip_blank_lines": False}
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # values without a column
                table = pd.read_csv(path, encoding="utf-8-sig", **options)
    except FileNotFoundError:
        raise DataError(f"no file {path}") from None
    except pd.errors.EmptyDataError:
        table = pd.DataFrame()
    # of a parser, a decoder or the disk
    except (ValueError, OSError, tarfile.TarError, pd.errors.ParserWarning) as error:
        raise DataError(f"{path} cannot be read as a table: {error}") from error
    table = table.rename(columns=lambda name: str(name).strip())
    wanted = ["height", "width", "num_tokens"]
    if missing := [name for name in wanted if name not in table]:
        raise DataError(
            f"{path}: no column {', '.join(missing)}; found {', '.join(map(str, table)) or 'an empty file'}; "
            "expected height,width,num_tokens[,image_id]"
        )
    if table.empty:
        raise DataError(f"{path}: no rows found")
    columns: dict[str, Any] = {}
    for name in wanted:
        # pandas writes ".0" in a column with gaps
        text = table[name].astype(str).str.strip().str.removesuffix(".0")
        numbers = text.where(text.str.fullmatch("[0-9]{1,10}"), "-1").astype(np.int64)
        wrong = np.flatnonzero((numbers < 0) | (numbers >= 2**31))
        if len(wrong):
            raise DataError(
                f"{path}: line {wrong[0] + 2}, column {name}: expected a whole number, 0 for no image or text, found {text[wrong[0]]!r}"
            )
        columns[name] = numbers.to_numpy()
    one_side = np.flatnonzero((columns["height"] == 0) != (columns["width"] == 0))
    if len(one_side):
        raise DataError(f"{path}: line {one_side[0] + 2}: height or width is 0; without an image, both are")
    if "image_id" not in table:
        return SampleSizes(**columns, group=np.arange(len(table)))
    ids = table["image_id"]
    known = ids.astype(str).where(ids.notna() & (ids != ""))
    return SampleSizes(**columns, group=pd.factorize(known)[0])  # -1: unknown
