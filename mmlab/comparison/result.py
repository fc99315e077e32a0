"""The result of a comparison: one row per scheduler, every repetition kept, and the table, figure and page
made from it.

A `Comparison` is data: `mmlab.compare` makes one, `load_comparison` reads one back from its folder, and everything that
is shown is derived from it. Drawing needs matplotlib, but no display.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from itertools import combinations, permutations
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.comparison.charts import draw_comparison
from mmlab.errors import DataError
from mmlab.machine import replace_file
from mmlab.runs.figures import to_bytes
from mmlab.runs.folders import COMPARISON, COMPARISON_FILES, folder_now
from mmlab.runs.summaries import FASTER, are_level, base_of, too_short

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_OTHER_PACE = 0.15  # if all predictions are off this far in one direction, the machine was at another pace


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """The figures of one scheduler. Ratios are fractions; medians are over epochs, without warm-up steps."""

    scheduler: str
    options: dict[str, Any]  # how the scheduler was configured
    num_samples: int  # trained in the first epoch; under ratios not as many as there are
    num_batches: int  # optimizer steps of the first epoch
    samples_per_s: float  # median over epochs
    step_s: float  # median over measured steps, data wait not included
    data_wait_ratio: float  # time waiting for data / (waiting + stepping)
    text_waste: float  # share of text tokens that is padding
    image_waste: float  # share of image patches that is padding
    combined_waste: float  # of both together
    planned_combined_waste: float  # the same, predicted from metadata before training
    peak_over_budget: float  # costliest batch / budget, or its predicted bytes / the memory limit
    batches_over_budget: int
    shape_mismatches: int  # batches of another shape than planned; 0 when the plan was right
    peak_bytes: int
    peak_source: str
    num_unlearnt_samples: int  # in batches without negatives (captions of one image only), over all epochs
    final_loss: float  # on the held-out pairs, a mean over samples in candidate sets of one fixed size
    image_to_text_r1: float | None  # None where the model gives no embeddings
    text_to_image_r1: float | None
    chance_r1: float | None
    predicted_samples_per_s: float | None = None  # by the time model; None without one
    epochs: list[dict[str, float]] = field(default_factory=list)  # every repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A finished (or interrupted) comparison.

    `config` says what was run and on what; `arms` has one result per scheduler, in the order given.
    """

    config: dict[str, Any]
    arms: list[ArmResult]
    interrupted: bool = False
    folder: Path | None = None  # where it was saved; the runs' events lie below it

    @property
    def table(self) -> pd.DataFrame:
        """One row per scheduler, figures as measured, indexed by its name."""
        import pandas as pd

        rows = pd.DataFrame([asdict(arm) for arm in self.arms])
        return rows.set_index("scheduler").drop(columns=["epochs", "options"])

    @property
    def steps(self) -> pd.DataFrame:
        """Every training step of every arm, from the runs' event files; empty when nothing was saved."""
        import pandas as pd

        from mmlab.runs.events import read_runs

        if self.folder is None:
            return pd.DataFrame()
        runs = folder_now(self.folder, COMPARISON, lambda text: text == self._text) / "runs"
        if not runs.is_dir():
            return pd.DataFrame()
        events = read_runs(runs)
        return events[events["kind"] == "step"].dropna(axis="columns", how="all")

    def as_dict(self) -> dict[str, Any]:
        """The content of `comparison.json`."""
        return {**self.config, "interrupted": self.interrupted, "arms": [asdict(arm) for arm in self.arms]}

    @property
    def _text(self) -> str:
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def summary(self) -> pd.DataFrame:
        """The table for reading: per cent, milliseconds and MiB, with units in the headings."""
        import pandas as pd

        table = self.table.rename_axis(None)  # an index name would take a line of its own
        return pd.DataFrame(
            {
                "batches": table["num_batches"],
                "text waste %": (100 * table["text_waste"]).round(1),
                "image waste %": (100 * table["image_waste"]).round(1),
                "combined waste %": (100 * table["combined_waste"]).round(1),
                "peak / budget": table["peak_over_budget"].round(2),
                "samples/s": table["samples_per_s"].round(1),
                "predicted samples/s": table["predicted_samples_per_s"].astype(float).round(1),
                "median step ms": (1000 * table["step_s"]).round(1),
                "data wait %": (100 * table["data_wait_ratio"]).round(1),
                "peak MiB": (table["peak_bytes"] / 2**20).round(1),
                "held-out loss": table["final_loss"].round(3),
                "R@1 image > text %": (100 * table["image_to_text_r1"].astype(float)).round(1),
                "R@1 text > image %": (100 * table["text_to_image_r1"].astype(float)).round(1),
            }
        ).dropna(axis="columns", how="all")  # what this model has no figures of

    @property
    def ok(self) -> bool:
        """Whether every scheduler finished all its epochs."""
        return not self.interrupted

    def notes(self) -> list[str]:
        """How to read the figures: what was held equal, and what was not."""
        return [
            *self._warnings(),
            self._setting(),
            *self._limit_notes(),
            *self._data_notes(),
            *self._measure_notes(),
            *self._difference_notes(),
        ]

    def _warnings(self) -> Iterator[str]:
        """Why the figures may say less than they seem to; a reader must see these first."""
        if self.interrupted:
            num = f"{len(self.arms[0].epochs)} of {self.config['epochs']}"
            yield f"Interrupted: the figures cover the {num} epochs that every scheduler finished."
        if self._too_short:
            yield f"{self._too_short.capitalize()}: give more data, or smaller batches."
        if self._all_overlap:
            yield "No scheduler is faster than another: all epochs overlap in samples/s. Give more epochs or data."

    def _setting(self) -> str:
        config = self.config
        samples = "pairs" if config.get("processor") is None else "conversations"
        return (
            f"{config['num_train']} training and {config['num_held_out']} held-out {samples}, {config['epochs']} "
            f"epoch{'s' * (config['epochs'] != 1)}; same initial weights and same samples for every scheduler. Epochs "
            f"of the schedulers alternate; the first {config['warmup_steps']} steps of each are not timed."
        )

    def _limit_notes(self) -> Iterator[str]:
        config = self.config
        if config["equal"] != "memory":
            budget = f"{config['budget']:.0f} {config['budget_unit']} a batch"
            if config["equal"] is None:
                yield f"Schedulers as they were configured; peak / budget is of {budget}."
            else:
                yield f"Budget {budget}; fixed batch size {config['batch_size']}."
            return
        given = f"the predicted peak of random with {config['batch_size']} samples a batch"
        if config["memory_gb"] is not None:
            given = f"what is free of {config['memory_gb']:g} GiB, less what Python and torch take"
        sizes = ", ".join(f"{arm.scheduler} {_size(arm)}" for arm in self.arms)
        yield (
            f"Equal memory: a step may need {config['memory_limit_bytes'] / 2**20:.0f} MiB ({given}); every scheduler "
            f"has the largest batches that are predicted to fit. A batch holds at most: {sizes}."
        )
        if config.get("processor") is None and any(arm.scheduler == "packed" for arm in self.arms):
            yield (
                "packed, whose bytes are not predicted: its largest packs were measured, and made smaller to fit; its "
                "seconds are predicted from steps on some of its packs."
            )
        yield from self._prediction_notes()

    def _prediction_notes(self) -> Iterator[str]:
        """Whether the time model was right."""
        if wrong := ", ".join(f"{faster} is faster than {slower}" for faster, slower in self.misranked):
            spread = f"{self.config['time_model']['spread_ratio']:.0%}"
            yield (
                f"Predicted in the wrong order: in fact {wrong}. Repeats of one step varied by {spread} when the steps were timed."
            )
        elif not (self._all_overlap or self._too_short):
            yield (
                "Predicted and measured samples/s rank the schedulers alike, apart from those within 5 % of each other "
                "and those whose epochs overlap."
            )
        speeds = [(arm.predicted_samples_per_s, arm.samples_per_s) for arm in self.arms]
        if off := [predicted / measured - 1 for predicted, measured in speeds if predicted]:
            pace = "slower" if max(off) < -_OTHER_PACE else "faster" if min(off) > _OTHER_PACE else None
            so = f": the machine was probably {pace} when steps were timed." if pace else "."
            yield f"Predicted samples/s are {min(off):+z.0%} to {max(off):+z.0%} off those measured{so}"

    def _data_notes(self) -> Iterator[str]:
        config = self.config
        if config["limit"] is not None:
            yield f"limit={config['limit']}: pairs drawn by seed {config['seed']} from every split."
        if num_bad := config.get("num_bad_rows"):
            yield f"Rows that cannot be used, and are left out: {num_bad}."
        if config["batch_size"] > config["num_train"]:
            yield f"batch_size {config['batch_size']} is more than the training pairs: no batch is that large."

    def _measure_notes(self) -> Iterator[str]:
        """What the columns of memory, loss and recall are."""
        yield f"Peak memory is {' and '.join(sorted({arm.peak_source for arm in self.arms}))}."
        chances = [arm.chance_r1 for arm in self.arms if arm.chance_r1 is not None]
        if not chances:
            yield "Held-out loss is a mean over the tokens of the answers."
            return
        yield f"R@1 ranks all held-out pairs; chance is {100 * max(chances):.1f} %."
        yield (
            "Held-out loss is a mean over samples, each ranked against a fixed number of candidates, so the batch size "
            "does not move it."
        )

    def _difference_notes(self) -> Iterator[str]:
        """In what the schedulers differ besides speed."""
        if len({arm.num_batches for arm in self.arms}) > 1:
            yield "The number of optimizer steps differs between schedulers."
        pairs = ", ".join(f"{one} and {other}" for one, other in self.overlapping)
        if pairs and not self._all_overlap:
            yield f"Not distinguishable, because their epochs overlap in samples/s: {pairs}."
        apart = all(arm.options.get("allow_collisions") == "False" for arm in self.arms)
        if apart and self.config.get("processor") is None:
            yield "No batch of any scheduler holds two captions of one image."
        counts = {arm.scheduler: arm.num_unlearnt_samples for arm in self.arms}
        if unlearnt := ", ".join(f"{name} {count}" for name, count in counts.items() if count):
            yield f"Samples without another image in their batch, from which a contrastive loss learns nothing: {unlearnt}."

    @property
    def misranked(self) -> list[tuple[str, str]]:
        """Pairs (faster, slower) by measured speed that were predicted the other way round.

        Pairs within 5 % of each other, or whose epochs overlap, do not count, and none where epochs are too short.
        """
        arms = [arm for arm in self.arms if arm.predicted_samples_per_s is not None and not self._too_short]
        return [
            (one.scheduler, other.scheduler)
            for one, other in permutations(arms, 2)
            if one.samples_per_s > FASTER * other.samples_per_s
            and not _overlap(one, other)
            and (one.predicted_samples_per_s or 0) < (other.predicted_samples_per_s or 0)
        ]

    @property
    def overlapping(self) -> list[tuple[str, str]]:
        """Pairs of schedulers that samples/s do not rank, see `mmlab.runs.summaries.are_level`."""
        pairs = combinations(self.arms, 2)
        return [(one.scheduler, other.scheduler) for one, other in pairs if _overlap(one, other)]

    @property
    def _all_overlap(self) -> bool:
        return len(self.overlapping) == comb(len(self.arms), 2) > 0

    @property
    def _too_short(self) -> str:
        """Says that an epoch has too few steps, where it has."""
        return too_short(min(arm.num_batches for arm in self.arms))

    @property
    def headline(self) -> str:
        """One sentence: how much faster the fastest scheduler is than `random`, else than the first, else than the next fastest."""
        ranked = sorted(self.arms, key=lambda arm: -arm.samples_per_s)
        best = ranked[0]
        given = "At the batch sizes given"
        if self.config["equal"] == "memory":
            given = f"At equal memory ({self.config['memory_limit_bytes'] / 2**20:.0f} MiB a step)"
        if len(ranked) == 1:
            return f"{given}, {best.scheduler} trains {best.samples_per_s:.0f} samples a second"
        base = base_of([arm.scheduler for arm in self.arms])
        rival = ranked[1] if best.scheduler == base else next(arm for arm in ranked if arm.scheduler == base)
        gain = best.samples_per_s / rival.samples_per_s
        level = [arm.scheduler for arm in ranked[1:] if _overlap(best, arm)]
        but = "their epochs overlap" if rival.scheduler in level else self._too_short
        beside = ", ".join(name for name in level if name != rival.scheduler)
        name = f"{best.scheduler} (level with {beside})" if beside else best.scheduler
        return f"{given}, {name} trains {gain:.2f} times as many samples/s as {rival.scheduler}{but and f', but {but}'}"

    def figure(self) -> Figure:
        """Six panels side by side: waste, throughput, time, memory, cost of each batch, loss over seconds."""
        return draw_comparison(self)

    def html(self, picture: bytes | None = None) -> str:
        """One self-contained page: configuration, table, figure (drawn unless given as PNG bytes), notes."""
        return page_of(
            self.summary(),
            picture or to_bytes(self.figure()),
            heading="What each batch scheduler costs",
            about=(self.config["data"], self.config["device"], self.config["date"]),
            notes=self.notes(),
            details={"Configuration": json.dumps(self.config, indent=2)},
        )

    def __repr__(self) -> str:
        return self.summary().to_string()

    def _repr_html_(self) -> str:
        notes = "".join(f"<li>{escape(note)}</li>" for note in self.notes())
        table = self.summary().to_html(border=0).replace("<table", '<table style="font-size: 11px"', 1)
        return f"{table}<ul>{notes}</ul>"

    def __str__(self) -> str:
        lines = [self.summary().to_string(), *(f"- {note}" for note in self.notes())]
        files = [self.folder / name for name in COMPARISON_FILES[:-1]] if self.folder else []
        if written := [f"  {path}" for path in files if path.exists()]:
            lines += ["Written:", *written]
        return "\n".join(lines)

    def save(self, folder: str | Path) -> Path:
        """Write `comparison.json`, `table.csv`, `figure.png` and `report.html` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_numbers(folder)
        picture = to_bytes(self.figure())
        replace_file(folder / "figure.png", picture)
        replace_file(folder / "report.html", self.html(picture))
        return folder

    def save_numbers(self, folder: Path) -> None:
        """Write `comparison.json` and `table.csv` only, in milliseconds."""
        replace_file(folder / COMPARISON, self._text)
        replace_file(folder / "table.csv", self.table.to_csv())


def load_comparison(folder: str | Path) -> Comparison:
    """Read a saved comparison back.

    Raises:
        DataError: there is no `comparison.json`, or mmlab did not write it.
    """
    path = Path(folder) / COMPARISON
    try:
        saved = json.loads(path.read_text())
        if not (arms := [ArmResult(**arm) for arm in saved.pop("arms")]):
            raise ValueError("it has no scheduler")
        return Comparison(config=saved, arms=arms, interrupted=saved.pop("interrupted"), folder=path.parent)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"no comparison in {folder}: expected {path}, which `mmlab compare --out {folder}` writes"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not a comparison that this version of mmlab wrote: {error}") from error


def _overlap(one: ArmResult, other: ArmResult) -> bool:
    """Whether the samples/s of their epochs overlap, so that they do not rank the two."""
    ours, theirs = ([epoch["samples_per_s"] for epoch in arm.epochs] for arm in (one, other))
    return are_level(ours, theirs)


def _size(arm: ArmResult) -> str:
    """The batch size or the budget of a scheduler."""
    if "batch_size" in arm.options:
        return f"{arm.options['batch_size']} samples"
    packs_priced = arm.scheduler == "packed" and "PaddedTokens" not in arm.options["cost"]
    if arm.scheduler in ("memory", "fastest") or packs_priced:
        return "whatever fits"
    return f"{arm.options['budget']} padded tokens" if "budget" in arm.options else "as configured"


def page_of(table: pd.DataFrame, picture: bytes, **texts: Any) -> str:
    """One self-contained page with a table and a PNG picture.

    Args:
        texts: `heading`; `about`, whose first item is the title; `notes`; `details` by name.
    """
    from jinja2 import Template

    encoded = base64.b64encode(picture).decode()
    page = resources.files(__package__).joinpath("page.html").read_text("utf-8")
    return Template(page, autoescape=True).render(table=table.to_html(border=0), picture=encoded, **texts)
