"""Measure a few short training steps on the device at hand, and fit the seconds that any batch takes.

Shapes are spread evenly, on logarithmic scales, over what the data can give: batch size, length of the texts
and size of the images, independently of each other. Every round measures all shapes once, in another order,
so that other load on the machine affects all of them. Other load only ever adds time, so a low quantile of a
shape's repeats is kept. Shapes that are not fitted are measured in the same rounds: `TimeModel.held_out` has
the errors on them, and `TimeModel.spread_ratio` says how far apart repeats of one shape were.

A batch of images whose shape is new takes extra time (`TimeModel.new_shape_s`), and more of it once the
libraries keep as many shapes as they can (oneDNN 1024 operations). So further shapes are measured after the
rounds, once each, and the last of them count.

Costs about `seconds` (three rounds at least, which may take twice that), sixteen steps more, a copy of the model
and AdamW's state.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.quasirandom import SobolEngine

from mmlab.errors import OptionError, check_is, check_numbers
from mmlab.loading.loader import PlannedLoader, default_num_workers
from mmlab.machine import cpu_name, num_usable_cores, progress_bar
from mmlab.pricing.closed_form import held_out_errors
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import patch_of
from mmlab.pricing.time_model import TimeModel, fit_seconds
from mmlab.schedule.cost import PaddedTokens, batch_costs, max_batch_size
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.loop import FusionTrainer
from mmlab.training.noise import noise_batch
from mmlab.training.strategy import Strategy
from mmlab.types import PATCH, Batch, BatchShape, CostModel, SampleSizes

_LOW_QUANTILE = 0.25
_MIN_ROUNDS = 3  # including the first, in which the shapes are new
_NOISY_RATIO = 0.15
_NUM_NEW, _NUM_COUNTED = 16, 8  # shapes measured once, after the others; how many of them count
_NUM_PADDED = 512  # padded image sizes that shapes are chosen from
_LOADED, _NUM_LOADED = 32, 4  # samples in a batch whose loading is timed, and number of such batches
_LOADING_S = 2.0  # of steps while a loader is at work
_MIN_ROWS = 16  # of an embedding table of tokens; those of token types are smaller


def fit_time(
    model: nn.Module,
    sizes: SampleSizes,
    *,
    cost: CostModel | None = None,
    budget: float = 4096,
    num_probes: int = 16,
    num_held_out: int = 8,
    repeats: int = 8,
    seconds: float = 50.0,
    loading: Callable[[FusionTrainer], Mapping[str, float]] | None = None,
    progress: bool = True,
    **options: Any,
) -> TimeModel:
    """Fit the seconds that a training step of a model takes here, for batches of any shape.

    The steps are those of `FusionTrainer`, on a copy: the model's weights and torch's generators do not
    change.

    Args:
        sizes: of the data, after the image policy: the shapes are those that batches of these samples can
            have.
        cost: the cost that limits the measured batches, for example a `MemoryModel`; None counts padded
            tokens.
        budget: the most that a measured batch costs; less where three rounds would take more than twice `seconds`.
            Larger batches are extrapolated.
        num_probes: shapes that the closed form is fitted to, at least 7.
        num_held_out: further shapes on which its errors are reported.
        repeats: rounds after the first one.
        seconds: time limit; once three rounds are done, no round begins that would probably exceed it.
        loading: `loading_seconds` of the data set; None leaves loading out of the epochs that the model
            predicts.
        options: fields of `TrainOptions`: `device`, `precision`, `checkpointing`, `objectives`, ... The learning rate
            is 0 and an out-of-memory an error, whatever they say.

    Raises:
        OptionError: too few probes, a number out of its range, a model without weights, an unknown option, or a budget
            below two of the largest samples.
    """
    check_is("model", model, nn.Module, "a torch.nn.Module, as build_model makes of a preset")
    check_is("sizes", sizes, SampleSizes, "those of a data set, as records.sizes() gives")
    check_numbers(locals())
    if any(weight.is_meta for weight in model.parameters()):
        raise OptionError(
            "the model has no weights to measure a step with: build it on a device, or predict the time (predict_time)"
        )
    patch = patch_of(model)
    trainer, num = timed_trainer(model, **options), num_probes + num_held_out + _NUM_NEW
    drawn = _affordable_shapes(trainer, sizes, num, cost or PaddedTokens(patch), budget, seconds)
    shapes, new = drawn[:-_NUM_NEW], drawn[-_NUM_NEW:]
    times = measure_steps(trainer, shapes, repeats=repeats, seconds=seconds, progress=progress)
    low_s, spread_ratio = low_seconds(times)
    fitted = fit_seconds(shapes[:num_probes], low_s[:num_probes], patch=patch)
    # other programs slow an epoch down as well: as much as they did the repeats
    rows = replace(fitted, coefficients=np.median(times[:, 1:].mean(axis=1) / low_s) * fitted.coefficients)
    extra_s = [timed_step(trainer, batch) for batch in noise_batches(trainer, new)] - batch_costs(rows, new)
    return TimeModel(
        rows=rows,
        fingerprint=fingerprint(model),
        conditions=time_conditions(trainer),
        held_out=held_out_errors(batch_costs(fitted, shapes[num_probes:]), low_s[num_probes:]),
        spread_ratio=spread_ratio,
        new_shape_s=max(0.0, float(np.median(extra_s[-_NUM_COUNTED:]))),
        **dict[str, Any](loading(trainer) if loading else {}),
    )


def loading_seconds(
    dataset: Any, trainer: FusionTrainer, *, num_workers: int | None = None, **options: Any
) -> dict[str, float]:
    """What loading adds to the seconds of an epoch: the fields of a `TimeModel` that end in `_s_per_sample`.

    Some batches are loaded in this thread, and its CPU time is measured: other programs do not disturb it,
    and waiting for a disk is not included. Workers divide that time among themselves. If they run on the
    cores that compute the steps, the same steps are timed without and with a loader at work, and the difference
    counts, if it is half to twice the CPU time: beyond that it is noise. How much of that time makes a step longer
    depends on the workers, the cores and the step.

    Args:
        dataset: with its cache, if there is one.
        trainer: its steps are timed, so its learning rate must be 0 if the weights must not change.
        num_workers, options: of the `PlannedLoader`.
    """
    workers, cores = default_num_workers() if num_workers is None else num_workers, num_usable_cores()
    scheduler, times, loaded = make_scheduler("random", batch_size=_LOADED), [], []
    with PlannedLoader(dataset, scheduler, num_workers=0, **options) as loader:
        batches, started_s = iter(loader), time.thread_time()
        for batch in islice(batches, 1 + _NUM_LOADED):  # the first one opens files
            times.append((time.thread_time() - started_s) / len(batch))
            loaded.append(batch)
            started_s = time.thread_time()
    sample_s = float(np.median(times[1:] or times))
    data_s, shared_s = (sample_s / min(workers, cores), 0.0) if workers else (0.0, sample_s)
    if workers and trainer.device.type == "cpu" and torch.get_num_threads() >= cores:
        with PlannedLoader(dataset, scheduler, num_workers=workers, **options) as loader:
            shared_s = float(np.clip(_slowdown_s(trainer, loaded, loader), sample_s / 2, 2 * sample_s))
    return {"data_s_per_sample": data_s, "shared_s_per_sample": shared_s}


def _slowdown_s(trainer: FusionTrainer, batches: list[Batch], loader: PlannedLoader) -> float:
    """By how many seconds a sample that is loaded makes steps longer, if a batch is loaded for each step."""

    def round_alone() -> list[float]:
        return [timed_step(trainer, batch) for batch in batches]

    alone_s = [round_alone() for _ in range(3)][1:]  # in the first round the shapes are new
    ends_s, counts = [time.perf_counter()], []
    for batch, loaded in zip(cycle(batches), loader, strict=False):
        timed_step(trainer, batch)
        ends_s.append(time.perf_counter())
        counts.append(len(loaded))
        if ends_s[-1] - ends_s[0] > _LOADING_S:
            break
    loader.close()
    alone_s += [round_alone(), round_alone()]  # other programs may take more or less of the machine by now
    added_s = np.diff(ends_s) - np.resize(np.mean(alone_s, axis=0), len(counts))
    first = min(1, len(counts) - 1)  # the first step waits for the loader
    return added_s[first:].sum() / sum(counts[first:])


def timed_trainer(model: nn.Module, **options: Any) -> FusionTrainer:
    """A trainer of a copy of the model, whose steps are measured."""
    options |= {"strategy": Strategy(), "lr": 0.0, "on_out_of_memory": "raise"}  # one rank measures for all
    return FusionTrainer(copy.deepcopy(model), **options)


def time_conditions(trainer: FusionTrainer) -> dict[str, Any]:
    """What a trainer's step time depends on besides model and shape, for `TimeModel.load` to compare."""
    on_gpu, options = trainer.device.type == "cuda", trainer.options
    return {
        "method": "measured",
        "device": torch.cuda.get_device_name(trainer.device) if on_gpu else cpu_name(),
        "num_threads": None if on_gpu else torch.get_num_threads(),
        "precision": trainer.precision.name,
        "objectives": " + ".join(trainer.objectives),
        **{name: getattr(options, name) for name in ("checkpointing", "compile", "channels_last")},
    }


def probe_shapes(sizes: SampleSizes, num: int, cost: CostModel, budget: float) -> NDArray[np.int64]:
    """(num, 4) shapes of batches of two samples or more that cost at most `budget`; the same for the same data.

    Batch size, tokens and image area are spread independently, each evenly on a logarithmic scale. Each image
    size is that of a batch of two images of the data.
    """
    if not len(sizes):
        raise OptionError("no samples: their sizes decide which batches are measured")
    pairs = np.random.default_rng(0).integers(len(sizes), size=(2, _NUM_PADDED))
    images = np.stack([np.maximum(*side[pairs]) for side in (sizes.height, sizes.width)], axis=1)
    images = np.unique(np.maximum(images, PATCH), axis=0).astype(np.int64)
    areas = np.log(images.prod(axis=1))
    lengths = np.log(np.maximum([sizes.num_tokens.min(), sizes.num_tokens.max()], 1))
    shapes: list[tuple[int, ...]] = []
    for of_size, of_text, of_image in SobolEngine(3, scramble=True, seed=0).draw(64 * num).double().tolist():
        num_tokens = round(float(np.exp(lengths[0] + of_text * (lengths[1] - lengths[0]))))
        area = areas.min() + of_image * (areas.max() - areas.min())
        height, width = images[np.abs(areas - area).argmin()].tolist()
        most = max_batch_size(cost, num_tokens, height, width, budget)
        if most >= 2:
            shapes.append((round(2 * (most / 2) ** of_size), num_tokens, height, width))
        if len(shapes) == num:
            return np.array(shapes)
    needed = cost(BatchShape(2, int(sizes.num_tokens.max()), *images.max(axis=0).tolist()))
    raise OptionError(
        f"two samples can cost {needed:.0f} {cost.unit}, and a batch may cost {budget:.0f}; "
        "give a budget (or memory_gb) that holds two of the largest, or more images"
    )


def _affordable_shapes(
    trainer: FusionTrainer, sizes: SampleSizes, num: int, cost: CostModel, budget: float, seconds: float
) -> NDArray[np.int64]:
    """`probe_shapes` of the budget, or of a smaller one if the fewest rounds would take more than twice `seconds`."""
    shapes = probe_shapes(sizes, num, cost, budget)
    tokens = batch_costs(PaddedTokens(), shapes)
    middle = np.argsort(tokens)[num // 2]
    [batch] = noise_batches(trainer, shapes[[middle]])
    token_s = min(timed_step(trainer, batch) for _ in range(2)) / tokens[middle]
    with suppress(OptionError):  # half of the budget holds no two samples
        while _MIN_ROUNDS * token_s * batch_costs(PaddedTokens(), shapes).sum() > 2 * seconds:
            budget /= 2
            shapes = probe_shapes(sizes, num, cost, budget)
    return shapes


def low_seconds(times: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """The low quantile of each shape's repeats, and `TimeModel.spread_ratio`; warns where that is large.

    Args:
        times: (n, r) seconds of r repeats of n shapes.
    """
    low_s = np.quantile(times, _LOW_QUANTILE, axis=1, method="lower")  # with few repeats, the shortest
    spread_ratio = float(np.median(np.quantile(times, 1 - _LOW_QUANTILE, axis=1) / low_s)) - 1
    if spread_ratio > _NOISY_RATIO:
        warnings.warn(
            f"repeats of one step vary by {spread_ratio:.0%}, so predicted seconds are no more accurate than that; "
            "fit again while nothing else runs on this machine",
            stacklevel=3,
        )
    return low_s, spread_ratio


def measure_steps(
    trainer: FusionTrainer, shapes: NDArray[np.int64], *, repeats: int, seconds: float, progress: bool
) -> NDArray[np.float64]:
    """(n, 1 + r) seconds of a step of each shape, round after round; in the first round the shapes are new."""
    batches = noise_batches(trainer, shapes)
    rng, started = np.random.default_rng(0), time.perf_counter()
    rounds: list[NDArray[np.float64]] = []
    with progress_bar(total=(1 + repeats) * len(shapes), name="timing", unit="step", show=progress) as bar:
        while len(rounds) < max(_MIN_ROUNDS, 1 + repeats):
            elapsed_s = time.perf_counter() - started
            if len(rounds) >= _MIN_ROUNDS and elapsed_s * (1 + 1 / len(rounds)) > seconds:
                bar.total = bar.n  # the time is up, so these steps were all
                break
            times = np.empty(len(batches))
            for place in rng.permutation(len(batches)):
                times[place] = timed_step(trainer, batches[place])
                bar.update()
            rounds.append(times)
    return np.stack(rounds, axis=1)


def noise_batches(trainer: FusionTrainer, shapes: NDArray[np.int64]) -> list[Batch]:
    """A batch of noise of each shape, with token ids that the trainer's model has."""
    tables = (module.num_embeddings for module in trainer.model.modules() if isinstance(module, nn.Embedding))
    num_ids = min((rows for rows in tables if rows >= _MIN_ROWS), default=_MIN_ROWS)
    return [noise_batch(BatchShape(*shape), num_ids=num_ids, ragged=True) for shape in shapes.tolist()]


def timed_step(trainer: FusionTrainer, batch: Batch) -> float:
    """Seconds of a step; the batch is moved to the device before it, as a loader does."""
    return trainer.train_step([batch.to(trainer.device)])["step_s"]
