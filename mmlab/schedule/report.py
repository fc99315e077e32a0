"""What a plan costs, computed from sizes alone: waste, balance, randomness, collisions, coverage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.machine import GIB
from mmlab.schedule import metrics
from mmlab.schedule.columns import Ints
from mmlab.schedule.cost import ROUNDING, PaddedTokens
from mmlab.schedule.epoch import EpochBlocks
from mmlab.types import PATCH

if TYPE_CHECKING:
    from mmlab.schedule.plan import BatchPlan

_FEW_SAMPLES = 16  # a mean batch size below this is pointed out
_SHOWN_ROWS = 5
_PER_CENT = ("text_waste", "image_waste", "combined_waste", "straggler", "collision_ratio", "coverage")


def shown(name: str, value: float | str | None) -> str:
    """A figure as people read it: shares in per cent, bytes in GiB or MiB, other numbers in three digits or more.

    >>> shown("peak_bytes", 3 * 2**20), shown("wait_ratio", 0.25), shown("step_s", 0.123456), shown("mean_cost", 999.7)
    ('3 MiB', '25.0%', '0.123', '1,000')
    """
    if value is None or value != value:  # pandas makes None NaN
        return "-"
    if name.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / GIB:.2f} GiB" if value >= GIB else f"{1024 * value / GIB:.0f} MiB"
    if not isinstance(value, float):
        return str(value)
    if name in _PER_CENT:
        return f"{value:.2%}"
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """What became of one source in an epoch of a scheduler that draws."""

    num_samples: int  # in the data set
    num_drawn: int
    num_repeats: int  # of those drawn, second and later appearances of a sample
    num_left_out: int  # samples that were not drawn
    realised_ratio: float  # share of all that was drawn
    wanted_ratio: float | None

    def __str__(self) -> str:
        wanted = "" if self.wanted_ratio is None else f" (wanted {self.wanted_ratio:.2%})"
        return (
            f"{self.realised_ratio:.2%} of the epoch{wanted}: {self.num_drawn} drawn of {self.num_samples}, "
            f"{self.num_repeats} repeats, {self.num_left_out} left out"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The figures of one plan. Wastes, ratios, straggler, randomness and coverage are fractions."""

    num_samples: int  # in the data set
    num_batches: int
    mean_batch_size: float
    text_waste: float  # share of padded text tokens that are padding
    image_waste: float  # share of padded image patches that are padding
    combined_waste: float  # share of padded tokens and patches together that are padding
    cost_unit: str
    budget: float | None  # most that a batch may cost, in that unit
    mean_cost: float  # of a batch
    peak_cost: float
    peak_over_budget: float | None  # peak cost / budget; 1 is a full batch
    num_over_budget: int  # batches above it
    straggler: float  # 1 - mean / max work (`metrics.work`) or predicted seconds over the batches of one step
    randomness: float | None  # R of this and the next epoch (`metrics.randomness`); None if only one is known
    collision_ratio: float  # share of samples with another sample of the same image in their batch
    coverage: float  # share of the samples that are in the plan
    num_duplicates: int
    sources: dict[str, SourceShare]  # of a scheduler that draws, what became of each source
    notes: tuple[str, ...]  # what deserves attention, in words

    def as_dict(self) -> dict[str, Any]:
        """Name -> figure, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{name:17} {value}" for name, value in self._shown().items()]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{name.replace('_', ' ')}</td><td style='text-align:right'>{value}</td></tr>"
            for name, value in self._shown().items()
        )
        return f"<table>{rows}</table>" + "".join(f"<p>{escape(note)}</p>" for note in self.notes)

    def _shown(self) -> dict[str, str]:
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in ("sources", "notes")}
        return {name: shown(name, value) for name, value in figures.items() if value is not None}


def report_plan(
    plan: BatchPlan, *, budget: float | None, num_ranks: int, following: BatchPlan | None, patch: int = PATCH
) -> PlanReport:
    """Measure a plan (see `BatchPlan.report`), in patches of its own cost model, or of `patch` pixels if it has none."""
    sizes, batches, times_drawn = plan.sizes, plan.columns, plan.times_drawn
    budget = plan.limits.budget if budget is None else budget
    cost = plan.limits.cost or PaddedTokens(patch)
    patch = getattr(cost, "patch", PATCH)
    text, image = metrics.lengths(sizes, patch)
    sample_work = metrics.work(text) + metrics.work(image)
    text, image = text[batches.order], image[batches.order]
    padded_text, padded_image, batch_work = _padded(plan, text, image, patch)
    costs, time = plan.costs(cost), plan.limits.time
    peak_cost = float(costs.max(initial=0.0))
    num_over = int((costs > budget * ROUNDING).sum()) if budget else 0
    shares = {}
    if isinstance(plan.source, EpochBlocks):
        shares = plan.source.scheduler.source_shares(sizes, times_drawn, plan.source.epoch)
    score = None
    if following is not None:
        score = metrics.randomness(batches, following.columns, sample_work, num_ranks)
    return PlanReport(
        num_samples=len(sizes),
        num_batches=len(batches.ends),
        mean_batch_size=len(batches.order) / max(1, len(batches.ends)),
        text_waste=metrics.waste(text.sum(), padded_text.sum()),
        image_waste=metrics.waste(image.sum(), padded_image.sum()),
        combined_waste=metrics.waste(text.sum() + image.sum(), padded_text.sum() + padded_image.sum()),
        cost_unit=cost.unit,
        budget=budget,
        mean_cost=float(costs.mean()) if len(costs) else 0.0,
        peak_cost=peak_cost,
        peak_over_budget=peak_cost / budget if budget else None,
        num_over_budget=num_over,
        straggler=metrics.straggler(batch_work if time is None else plan.costs(time), num_ranks),
        randomness=score,
        collision_ratio=metrics.collision_ratio(batches, sizes.group),
        coverage=float((times_drawn > 0).mean()) if len(sizes) else 1.0,
        num_duplicates=int(np.maximum(times_drawn - 1, 0).sum()),
        sources=shares,
        notes=(*_notes(plan, num_over, budget), *(f"{name}: {share}" for name, share in shares.items())),
    )


def _padded(plan: BatchPlan, text: Ints, image: Ints, patch: int) -> tuple[Ints, Ints, Ints]:
    """(b,) padded tokens, padded patches and work of each batch, from tokens and patches of each sample."""
    if plan.limits.streams is not None:
        sums = plan.columns.totals(text), plan.columns.totals(image)
        padded = metrics.padded_streams(*sums, plan.limits.streams, plan.ranks_in_step)
        return *padded, plan.columns.totals(metrics.work(text) + metrics.work(image))
    counts, longest, height, width = plan.shape_columns.T
    area = metrics.cells(height, patch) * metrics.cells(width, patch)
    return counts * longest, plan.padded_patches(patch), counts * (metrics.work(longest) + metrics.work(area))


def _notes(plan: BatchPlan, num_over: int, budget: float | None) -> list[str]:
    notes, missing = [], plan.dropped
    if len(missing):
        rows = ", ".join(map(str, missing[:_SHOWN_ROWS])) + (", ..." if len(missing) > _SHOWN_ROWS else "")
        notes.append(f"{len(missing)} samples are in no batch: rows {rows}")
    if num_over:
        notes.append(f"{num_over} batches cost more than the budget of {budget:.6g}")
    mean = len(plan.columns.order) / max(1, len(plan.columns.ends))
    if plan.limits.budget and not plan.limits.streams and mean < _FEW_SAMPLES < len(plan.sizes):
        notes.append(
            f"a batch has only {mean:.1f} samples on average; a larger budget, or the scheduler 'packed', "
            "may make larger ones"
        )
    return notes
