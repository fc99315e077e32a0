"""What a data set's batches need on a device of a given size, before any training: `mmlab memory`.

The model's memory is fitted without a device (`mmlab.pricing`), for the training asked for and for two
alternatives: the other precision, and activation checkpointing switched on or off. For each, an epoch is
planned that fills the memory. Costs three fits (10 to 20 s each for the base preset) and three plans; no
image is decoded.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mmlab.data.readers import errors_of, read_records
from mmlab.data.text import load_tokenizer, measure_tokens
from mmlab.errors import DataError, OptionError
from mmlab.machine import GIB, MemoryLimit, memory_limit
from mmlab.pricing.fit import fit_memory
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.named_model import conversation_model, named_model
from mmlab.pricing.step_prices import named_dataset
from mmlab.pricing.trace import StepSetting
from mmlab.runs.figures import GREY, PALETTE
from mmlab.schedule.columns import images_apart
from mmlab.schedule.cost import batch_costs, max_batch_size
from mmlab.schedule.dense import DEFAULT_MEAN_SAMPLES
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import PATCH, SampleSizes, parse_image_policy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_SHOWN = 8  # rows of a table of shapes


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """An epoch under a memory model and a limit."""

    memory: MemoryModel
    sizes: SampleSizes
    limit_bytes: int  # of the device
    target_bytes: float  # the part of the limit that a batch may take
    plan: BatchPlan | None  # None if a sample alone needs more than the target

    @property
    def sample_bytes(self) -> NDArray[np.float64]:
        """(N,) what a step on each sample alone would need."""
        return batch_costs(self.memory, self.sizes.alone)

    @property
    def batch_bytes(self) -> NDArray[np.float64]:
        """(M,) what each planned batch needs; empty without a plan."""
        return np.empty(0) if self.plan is None else batch_costs(self.memory, self.plan.shape_columns)

    @property
    def limited_by_images(self) -> bool:
        """Whether a batch has a sample of every image: it could not grow without two samples of one image."""
        num_images = len(np.unique(images_apart(self.sizes.group)))
        return self.plan is not None and self.plan.columns.counts.max() == num_images < len(self.sizes)

    def figures(self) -> dict[str, float | None]:
        """The figures of the epoch; those of the plan are None if there is none."""
        alone, sizes = self.sample_bytes, self.sizes
        longest, highest, widest = (int(side.max()) for side in (sizes.num_tokens, sizes.height, sizes.width))
        names = ("num_batches", "mean_batch_size", "mean_use_ratio", "max_use_ratio", "combined_waste")
        of_plan: dict[str, float | None] = dict.fromkeys(names)
        if self.plan is not None:
            used = self.batch_bytes / self.limit_bytes
            waste = self.plan.report().combined_waste
            found = (len(used), len(sizes) / len(used), float(used.mean()), float(used.max()), waste)
            of_plan = dict(zip(names, found, strict=True))
        return of_plan | {
            "fixed_batch_size": max_batch_size(self.memory, longest, highest, widest, self.target_bytes),
            "costliest_sample_bytes": float(alone.max()),
            "num_too_large": int((alone > self.target_bytes).sum()),
        }

    def figure(self) -> Figure:
        """A figure of every planned batch: its samples (equal batches share a dot, of their area), and its predicted bytes."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 2.8), layout="constrained")
        counts, needed = figure.subplots(1, 2)
        limit_gib = self.limit_bytes / GIB
        if self.plan is not None:
            shapes, times = np.unique(self.plan.shape_columns, axis=0, return_counts=True)
            samples, tokens, *sides = shapes.T
            dots = counts.scatter(np.prod(sides, axis=0), samples, c=tokens, s=8 * times, alpha=0.7)
            figure.colorbar(dots, label="tokens")
            needed.plot(self.batch_bytes / GIB, ".", ms=4, color=PALETTE[0])
        needed.axhline(limit_gib, color=GREY, lw=1, ls="--")
        counts.set(title="batches (area: how many)", xlabel="padded pixels", ylabel="samples", ylim=(0, None))
        needed.set(title="predicted peak; -- limit", xlabel="batch", ylabel="GiB", ylim=(0, 1.05 * limit_gib))
        needed.xaxis.get_major_locator().set_params(integer=True)
        return figure


def plan_memory(memory: MemoryModel, sizes: SampleSizes, limit_bytes: int) -> PlannedMemory:
    """Plan an epoch by the scheduler `memory`."""
    scheduler = make_scheduler("memory", cost=memory, budget=limit_bytes)
    target_bytes = scheduler.target_ratio * limit_bytes  # type: ignore[attr-defined]
    fits = batch_costs(memory, sizes.alone).max() <= target_bytes
    return PlannedMemory(memory, sizes, limit_bytes, target_bytes, scheduler.plan(sizes) if fits else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """What `memory_report` found; printing it gives its tables."""

    source: str
    model: str
    limit: MemoryLimit
    plans: dict[str, PlannedMemory]  # by precision and checkpointing; the training asked for is the first
    of_conversations: bool = False

    @property
    def planned(self) -> PlannedMemory:
        """The epoch of the training asked for."""
        return next(iter(self.plans.values()))

    @property
    def ok(self) -> bool:
        """Whether there is a plan: every sample fits."""
        return self.planned.plan is not None

    @property
    def memory(self) -> MemoryModel:
        """The fitted model of the training asked for."""
        return self.planned.memory

    @property
    def table(self) -> pd.DataFrame:
        """The epoch's figures, a row for each way to train."""
        import pandas as pd

        figures = {name: plan.figures() for name, plan in self.plans.items()}
        return pd.DataFrame.from_dict(figures, orient="index")

    @property
    def largest_shapes(self) -> pd.DataFrame:
        """The distinct shapes whose batches need most, each with the largest batch of such samples."""
        import pandas as pd

        shapes, counts = np.unique(self.planned.sizes.alone, axis=0, return_counts=True)
        many = np.column_stack([np.full(len(shapes), DEFAULT_MEAN_SAMPLES), shapes[:, 1:]])
        costliest = np.argsort(-batch_costs(self.memory, many), kind="stable")[:_SHOWN]
        shapes, counts = shapes[costliest], counts[costliest]
        table = pd.DataFrame(shapes[:, 1:], columns=["num_tokens", "height", "width"])
        if self.of_conversations:  # whose columns stand for patches
            table["num_patches"] = table.pop("height") * table.pop("width") // PATCH**2
        table["num_samples"] = counts
        table["alone_bytes"] = batch_costs(self.memory, shapes).round().astype(np.int64)
        table["best_batch_size"] = [
            max_batch_size(self.memory, text, height, width, self.planned.target_bytes)
            for _, text, height, width in shapes.tolist()
        ]
        return table

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab memory --json` prints."""
        return {
            "source": self.source,
            "model": self.model,
            "fingerprint": self.memory.fingerprint,
            "num_samples": len(self.planned.sizes),
            "conditions": dict(self.memory.conditions),
            "limit": {**asdict(self.limit), "usable_bytes": self.limit.usable_bytes},
            "held_out": dict(self.memory.held_out),
            "plans": {name: plan.figures() for name, plan in self.plans.items()},
            "largest_shapes": self.largest_shapes.to_dict(orient="records"),
        }

    def figure(self) -> Figure:
        """A figure of the batches of the training asked for."""
        return self.planned.figure()

    def __str__(self) -> str:
        held_out = self.memory.held_out
        head = [
            f"{self.model} on {self.source}, {len(self.planned.sizes)} samples",
            str(self.limit),
            f"prediction against simulation on {held_out['num_shapes']} larger shapes: 95 % were within "
            f"{held_out['p95_ratio']:.2%}, and none was more than {held_out['worst_under_ratio']:.2%} too low",
        ]
        if self.planned.plan is None:
            head.append(
                f"{self.planned.figures()['num_too_large']} samples do not fit even alone, so there is no plan"
            )
        elif self.planned.limited_by_images:
            head.append(
                "no batch has two captions of one image, so none can have more samples than there are images, "
                f"{self.planned.plan.columns.counts.max()}: the memory is not filled"
            )
        if self.memory.conditions["device"] == "cuda":
            head.append("a real GPU can need more, a ResNet in fp32 most: see docs/internals/gpu.md")
        about = "(use: share of the memory that a batch needs; fixed batch size: the most samples if all were the largest)"
        head += [
            f"\nan epoch within this memory, and what would change it {about}:",
            _shown(self.table).to_string(),
        ]
        largest = _shown(self.largest_shapes).to_string(index=False)
        return "\n".join([*head, "\nsamples whose batches need most:", largest])

    def _repr_html_(self) -> str:
        return "".join(_shown(table).to_html(border=0) for table in (self.table, self.largest_shapes))


def memory_report(
    model: str,
    data: str | Path,
    *,
    memory_gb: float | None = None,
    device: str = "cuda",
    image: str = "aspect:224",
    tokenizer: str = "builtin",
    limit: int | None = None,
    images: str | None = None,
    skip_bad_rows: bool = False,
    processor: str | None = None,
    progress: bool = True,
    **setting: Any,
) -> MemoryReport:
    """Price a data set's batches for a model, and plan an epoch within the memory.

    Args:
        model: a preset's name (`mmlab.model.PRESETS`), or the path or name of a transformers model, of which only the
            configuration is read.
        data: anything that `read_records` takes.
        memory_gb: GiB to plan for; None asks the device, see `memory_limit`.
        device: "cuda" or "cpu": the device whose kernels and allocator are priced.
        image: image policy in short form, see `parse_image_policy`.
        tokenizer: see `load_tokenizer`.
        limit: number of samples to use, drawn from every split.
        images: folder of the images, if they are not beside the data.
        skip_bad_rows: leave out rows that cannot be used, with a warning.
        processor: name of a vision-language model's processor, if the data are conversations; it determines
            the sizes of images and texts.
        setting: other fields of `mmlab.pricing.trace.StepSetting`: `precision`, `checkpointing`, ...

    Raises:
        DataError: no records.
        OptionError: no such model, a model that cannot be priced, or an impossible limit.
    """
    memory_bytes = memory_limit(device, memory_gb=memory_gb)
    network: nn.Module
    dataset, source, errors = None, str(data), errors_of(skip_bad_rows)
    if processor is not None:
        if (image, tokenizer, limit) != ("aspect:224", "builtin", None):
            raise OptionError("--processor determines these: leave --image, --tokenizer and --limit out")
        dataset = named_dataset(source, images, processor, errors=errors, progress=progress)
        sizes, network = dataset.sizes, conversation_model(model)
    else:
        records = read_records(data, images=images, limit=limit, errors=errors)
        if not len(records):
            raise DataError(f"{data} has no records to price")
        tokens = load_tokenizer(tokenizer, records=records)
        sizes = measure_tokens(records, tokens).sizes(parse_image_policy(image))
        network = named_model(model, vocab_size=len(tokens), tokenizer=tokens)
        source = records.source or source
    setting["device"] = device.partition(":")[0]
    asked = StepSetting(**setting)
    other_precision = "bf16" if asked.precision == "fp32" else "fp32"
    plans = {}
    for change in ({}, {"precision": other_precision}, {"checkpointing": not asked.checkpointing}):
        options = {"num_held_out": 0 if change else 6, **setting, **change}
        memory = fit_memory(network, dataset=dataset, progress=progress, **options)
        title = memory.conditions["precision"]
        title += ", checkpointing" if memory.conditions["checkpointing"] else ""
        plans[title] = plan_memory(memory, sizes, memory_bytes.usable_bytes)
    return MemoryReport(
        source=source, model=model, limit=memory_bytes, plans=plans, of_conversations=dataset is not None
    )


def _shown(table: pd.DataFrame) -> pd.DataFrame:
    """Bytes in GiB and shares in per cent, rounded."""
    shown = {}
    for name in table.columns:
        column = table[name]
        if name.endswith("_bytes"):
            shown[name.removesuffix("_bytes") + " GiB"] = (column / GIB).round(2)
        elif name.endswith(("_ratio", "_waste")):
            shown[name.removesuffix("_ratio") + " %"] = (100 * column.astype(float)).round(1)
        else:
            shown[name] = column.round(1) if column.dtype == float else column
    return type(table)(shown).rename(columns=lambda name: name.replace("_", " "))
