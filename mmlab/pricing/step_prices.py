"""Bytes and seconds of a training step of any model in any loop, from a dozen real steps.

`price_steps` is for models that mmlab cannot price by a trace, such as decoders that read images among the
text. It runs your own steps on batches of your samples and fits cost models for plans: seconds for `fastest`,
bytes for `memory`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmlab.data.conversation_batches import ConversationCollator, Packer
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.data.conversations import read_conversations
from mmlab.errors import OptionError, check_numbers
from mmlab.machine import cpu_name, progress_bar
from mmlab.model.conversation_model import ConversationModel, named_processor
from mmlab.model.parameters import trainable_parameters
from mmlab.pricing.closed_form import held_out_errors
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.time_model import TimeModel, fit_polynomial, fit_seconds
from mmlab.pricing.timing import loading_seconds, low_seconds
from mmlab.runs.folders import TIME_MODEL
from mmlab.runs.meters import Held, LiveBytes
from mmlab.schedule.columns import Limits
from mmlab.schedule.cost import MaxPolynomial, PaddedTokens, batch_costs, for_images_of
from mmlab.schedule.dense import DEFAULT_MEAN_SAMPLES
from mmlab.schedule.plan import BatchPlan
from mmlab.training.loop import FusionTrainer
from mmlab.training.precision import Precision
from mmlab.training.strategy import Strategy
from mmlab.types import SampleSizes

_NUM_HELD_OUT = 4


class StepPrices(NamedTuple):
    """Cost models of a step by its padded shape, and their errors."""

    seconds: MaxPolynomial
    bytes: MaxPolynomial  # at least what every measured step needed
    seconds_held_out: dict[str, float]  # relative errors on four steps that were not fitted
    bytes_held_out: dict[str, float]  # before the margin was added
    spread_ratio: float  # how far apart repeats of one step were in time


def price_steps(
    train_step: Callable[[Any], Any],
    sizes: SampleSizes,
    *,
    prepare: Callable[[list[int]], Any] | None = None,
    peak_step: Callable[[Any], Any] | None = None,
    holds: Sequence[Held],
    budget: float,
    packed: bool = False,
    num_probes: int = 12,
    repeats: int = 3,
    progress: bool = True,
) -> StepPrices:
    """Fit seconds and bytes to real steps on batches of different sizes.

    ::

        def train_step(rows):
            model(**collate([talks[row] for row in rows])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    The steps change the weights: save them before, or set the learning rate to 0. The peak is measured in a
    step of each batch that is not timed: on a GPU it is the allocator's, on a CPU live tensors are counted.

    Args:
        train_step: trains on the samples of these rows, or on what `prepare` makes of them.
        sizes: of all samples.
        prepare: what a loader does ahead of a step; it is not timed.
        peak_step: the step whose bytes count, if not `train_step`.
        holds: the model, the optimizer and tensors that exist before a step.
        budget: the most padded tokens and patches of a measured batch; beyond it prices are extrapolated.
        packed: the step lays its samples end to end; packs are priced, for the scheduler `packed`.
        num_probes: batches that the cost models are fitted to, at least 7.
        repeats: timed steps of each batch.

    Raises:
        OptionError: too few probes, no repeat, or a budget below two of the largest samples.
    """
    check_numbers({"num_probes": num_probes, "repeats": repeats})
    batches, shapes = _probes(sizes, num_probes + _NUM_HELD_OUT, budget, packed)
    batch_of = prepare or (lambda rows: rows)
    costliest = batches[int(batch_costs(PaddedTokens(), shapes).argmax())]
    train_step(batch_of(costliest))  # makes the optimizer's state
    peaks, times = np.empty(len(batches)), np.empty((len(batches), repeats))
    rng = np.random.default_rng(0)
    with progress_bar(total=(1 + repeats) * len(batches), name="pricing", unit="step", show=progress) as bar:
        for place, rows in enumerate(batches):
            peaks[place] = peak_of(lambda rows: (peak_step or train_step)(batch_of(rows)), rows, holds)
            bar.update()
        for number in range(repeats):
            for place in rng.permutation(len(batches)).tolist():
                batch, started = batch_of(batches[place]), time.perf_counter()
                train_step(batch)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                times[place, number] = time.perf_counter() - started
                bar.update()
    low_s, spread_ratio = low_seconds(times)
    seconds = fit_seconds(shapes[:num_probes], low_s[:num_probes])
    needed = fit_polynomial(shapes[:num_probes], peaks[:num_probes])
    if not packed:
        needed = for_images_of(sizes, needed)
    margin = max(1.0, float((peaks / batch_costs(needed, shapes)).max()))
    unseen = shapes[num_probes:]
    return StepPrices(
        seconds=seconds,
        bytes=replace(needed, coefficients=margin * needed.coefficients, unit="bytes"),
        seconds_held_out=held_out_errors(batch_costs(seconds, unseen), low_s[num_probes:]),
        bytes_held_out=held_out_errors(batch_costs(needed, unseen), peaks[num_probes:]),
        spread_ratio=spread_ratio,
    )


def price_model(
    model: nn.Module,
    dataset: Any,
    collate: Callable[..., dict[str, Tensor]],
    sizes: SampleSizes,
    *,
    precision: str = "fp32",
    **options: Any,
) -> StepPrices:
    """`price_steps` for a model whose output has a `.loss`, on the model's device; its weights do not change.

    A step reads its samples, collates them, and runs forward pass, backward pass and AdamW with a learning
    rate of 0. Frozen weights, such as those around adapters (LoRA), have no moments.

    Args:
        dataset: with items for `collate`, in the order of `sizes`.
        collate: makes the model's arguments, by name, from a list of items. If it packs them, packs are
            priced.
        precision: of the forward pass under autocast: fp32, tf32, bf16 or fp16.
        options: `budget` and others of `price_steps`.

    Raises:
        OptionError: as `price_steps`, or an unknown precision.
    """
    from transformers import BatchFeature

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=0.0)
    device = next(model.parameters()).device
    computing = Precision(precision, device)

    def train_step(rows: list[int]) -> None:
        batch = collate([dataset[row] for row in rows])
        with computing.autocast():
            loss = model(**BatchFeature(batch).to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    packed = isinstance(getattr(collate, "pack", None), Packer)
    return price_steps(train_step, sizes, holds=(model, optimizer), packed=packed, **options)


def price_dataset(
    model: ConversationModel, dataset: ConversationDataset, *, num_workers: int | None = None, **setting: Any
) -> tuple[MemoryModel, TimeModel]:
    """Bytes and seconds of steps of mmlab's own trainer, on the model's device; its weights do not change.

    Measures batches that cost up to as much as 32 mean samples, or as two of the largest if that is more;
    packs if the model packs its batches. Measures their loading as well.

    Args:
        num_workers: of the loader.
        setting: `precision`, `checkpointing`, `accumulating` and `gradient_buckets` of
            `mmlab.pricing.trace.StepSetting`.
    """
    own: dict[str, Any] = {"fingerprint": fingerprint(model), "conditions": _conditions(model, setting)}
    accumulating, buckets = (setting.pop(name, False) for name in ("accumulating", "gradient_buckets"))
    sizes, device = dataset.sizes, str(next(model.parameters()).device)
    alone: Any = {"strategy": Strategy(), "on_out_of_memory": "raise"}  # one rank measures for all
    trainer = FusionTrainer(model, lr=0.0, device=device, **setting, **alone)
    weights = trainable_parameters(model) if accumulating and buckets else []
    costs = batch_costs(PaddedTokens(), np.vstack([sizes.alone, [2, *sizes.alone[:, 1:].max(axis=0)]]))
    take_first_step(trainer, dataset.collate([dataset[row] for row in range(min(2, len(dataset)))]))
    found = price_steps(
        lambda batch: trainer.train_step([batch]),
        sizes,
        prepare=lambda rows: dataset.collate([dataset[row] for row in rows]),
        # in a second micro-batch, gradients exist throughout
        peak_step=lambda batch: trainer.train_step([batch] * (2 if accumulating or buckets else 1)),
        holds=(trainer.model, trainer.optimizer, *map(torch.zeros_like, weights)),
        packed=model.is_packed,
        budget=max(costs[-1], DEFAULT_MEAN_SAMPLES * costs[:-1].mean()),
    )
    memory = MemoryModel(rows=found.bytes, held_out=found.bytes_held_out, **own)
    own |= {"spread_ratio": found.spread_ratio} | loading_seconds(dataset, trainer, num_workers=num_workers)
    return memory, TimeModel(rows=found.seconds, held_out=found.seconds_held_out, **own)


def packing(model: ConversationModel, dataset: ConversationDataset) -> ConversationModel:
    """The same model, which packs its batches from now on.

    Raises:
        OptionError: a model that cannot be packed.
    """
    model.pack = ConversationCollator(dataset.collator.processor, packed_for=model.module).pack
    return model


def saved_or_priced(
    saved: Path, model: ConversationModel, dataset: ConversationDataset, **setting: Any
) -> tuple[MemoryModel, TimeModel]:
    """The prices in `saved` and beside it, so that a resumed run has the same plans; else new ones."""
    priced = cache(lambda: price_dataset(model, dataset, **setting))
    about: Any = {"fingerprint": fingerprint(model), "conditions": lambda: _conditions(model, setting)}
    memory = MemoryModel.load_or_fit(saved, lambda: priced()[0], **about)
    return memory, TimeModel.load_or_fit(saved.with_name(TIME_MODEL), lambda: priced()[1], **about)


def _conditions(model: ConversationModel, setting: Mapping[str, Any]) -> dict[str, Any]:
    device = next(model.parameters()).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    return {"method": "measured", "device": name, "precision": "fp32", "packed": model.is_packed, **setting}


def named_dataset(
    data: str, images: str | None, processor: str, *, errors: str = "raise", **options: Any
) -> ConversationDataset:
    """The conversations of a file, as a named processor prepares them.

    Args:
        errors: as for `read_conversations`.
        options: of `ConversationDataset`.

    Raises:
        DataError: conversations that cannot be used.
        OptionError: no such processor.
    """
    talks = read_conversations(data, images=images, errors=errors)
    return ConversationDataset(talks, named_processor(processor), **options)


def _probes(
    sizes: SampleSizes, number: int, budget: float, packed: bool
) -> tuple[list[list[int]], NDArray[np.int64]]:
    """Batches of neighbours in order of tokens or of area; batch sizes are spread evenly on a log scale."""
    rng = np.random.default_rng(0)
    areas = sizes.height.astype(np.int64) * sizes.width
    orders = [np.argsort(column, kind="stable") for column in (sizes.num_tokens, areas)]
    batches: list[list[int]] = []
    for probe in range(number):
        order = orders[probe % 2]
        rows = order[max(0, min(int(rng.integers(len(order))), len(order) - 2)) :]
        counts = np.arange(1, len(rows) + 1)
        most = np.maximum.accumulate(sizes.alone[rows, 1:], axis=0)
        allowed = int((batch_costs(PaddedTokens(), np.column_stack([counts, most])) <= budget).sum())
        if allowed < min(2, len(sizes)):
            raise OptionError(
                f"a budget of {budget:.0f} padded tokens does not hold two of the largest samples; raise it"
            )
        batches.append(rows[: max(1, round(allowed ** ((probe + 1) / number)))].tolist())
    shapes = BatchPlan.from_batches(batches, sizes, Limits(streams=(0, 0) if packed else None)).step_shapes()
    mixed = rng.permutation(number)  # so that held-out batches are of all sizes
    return [batches[place] for place in mixed], shapes[mixed]


def take_first_step(trainer: FusionTrainer, batch: Any) -> None:
    """Train until a step is not skipped, as the first ones under fp16 are, so that the optimizer has its state."""
    for _ in range(20):  # each has half the loss scale of the one before
        if not trainer.train_step([batch])["skipped"]:
            return


def peak_of(train_step: Callable[[Any], Any], batch: Any, holds: Sequence[Held]) -> int:
    """Peak bytes of one training step: of the allocator where the model is on a GPU, else of live tensors.

    Args:
        holds: the model, the optimizer and tensors that exist before the step.
    """
    devices = [next(thing.parameters()).device for thing in holds if isinstance(thing, nn.Module)]
    gpu = next((device for device in devices if device.type == "cuda"), None)
    if gpu is not None:
        torch.cuda.reset_peak_memory_stats(gpu)
        train_step(batch)
        return torch.cuda.max_memory_allocated(gpu)
    with LiveBytes().add(*holds) as live:
        train_step(batch)
    return live.peak_bytes
