"""The parts of a run: two data sets, a model, what chooses samples, and facts about the machine.

Shared by comparisons and single runs, so that both hold out the same pairs and describe themselves alike.
`mmlab.comparison.plan` has the schedulers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mmlab.comparison.options import ComparisonOptions, SamplingOptions
from mmlab.data.augment import Augment
from mmlab.data.complexity import image_complexity
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError, OptionError, check_name
from mmlab.loading.adaptive import difficulty
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import GIB, describe_host
from mmlab.model.conversation_model import ConversationModel, named_processor, named_vlm
from mmlab.model.packing import enable_packing
from mmlab.model.presets import build_model
from mmlab.pricing.step_prices import packing
from mmlab.schedule.base import Scheduler
from mmlab.schedule.cost import PaddedTokens
from mmlab.schedule.live import LivePlan
from mmlab.schedule.mixing import Mixed
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.schedule.weighted import Weighted
from mmlab.types import parse_image_policy

Rows = TypeVar("Rows", Records, Conversations)
COST = PaddedTokens()
EVAL_BATCH_SIZE = 32
AUGMENTATIONS: dict[str, Augment | None] = {
    "none": None,
    "crop": Augment(),
    "colour": Augment(brightness=0.4, contrast=0.4, saturation=0.4),
    "randaugment": Augment(num_operations=2),
}
_UNIFORM_SHARE = 0.1  # of a sample's weight, whatever its difficulty


def augmentation(name: str) -> Augment | None:
    """The augmentation of a name in `AUGMENTATIONS`.

    Raises:
        OptionError: an unknown name.
    """
    check_name("augmentation", name, AUGMENTATIONS)
    return AUGMENTATIONS[name]


def make_datasets(
    data: str | Path | Records,
    *,
    image: str,
    images: str | None = None,
    tokenizer: str = "builtin",
    limit: int | None = None,
    max_tokens: int = 512,
    seed: int = 0,
    progress: bool = True,
    save_tokenizer_to: str | Path | None = None,
) -> tuple[MultimodalDataset, MultimodalDataset]:
    """Training and held-out pairs under one tokenizer and one image policy.

    Args:
        data: anything that `read_records` takes, or records.
        image: image policy in short form, see `parse_image_policy`.
        images: folder of the images, where they are not beside the data.
        limit: use so many pairs, drawn by `seed` from every split.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work; the message names it.
    """
    if limit is not None and limit < 2:
        raise OptionError(f"limit must be at least 2 pairs, found {limit}")
    policy = parse_image_policy(image)
    if not isinstance(data, Records):
        data = read_records(data, images=images, progress=progress)
    elif images is not None:
        raise OptionError("images= goes with the path of the data; records know where their images are")
    train, held_out = hold_out(data.sample(limit, seed=seed), seed=seed)
    shared: dict[str, Any] = {"image_policy": policy, "max_tokens": max_tokens}
    shared["tokenizer"] = load_tokenizer(tokenizer, records=train, save_to=save_tokenizer_to)
    return MultimodalDataset(train, **shared), MultimodalDataset(held_out, **shared)


def make_conversation_sets(
    data: Any,
    processor: str,
    *,
    images: str | None = None,
    limit: int | None = None,
    cache: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> tuple[ConversationDataset, ConversationDataset]:
    """Training and held-out conversations, which share no image, under a named processor.

    Args:
        data: anything that `read_conversations` takes, or conversations.
        images, limit: as for `make_datasets`.
        cache: folder that remembers their sizes.
    """
    loaded = named_processor(processor)
    if not isinstance(data, Conversations):
        data = read_conversations(data, images=images, progress=progress)
    train, held_out = hold_out(data.sample(limit, seed=seed), seed=seed)
    make = partial(ConversationDataset, processor=loaded, cache=cache, progress=progress)
    return make(train), make(held_out)


def hold_out(records: Rows, *, seed: int = 0) -> tuple[Rows, Rows]:
    """Training and held-out pairs: by the data's own split `val` or `test`, else a tenth of the images, at least two.

    Raises:
        DataError: fewer than two images on one side; a pair is judged against others.
    """
    splits = np.array(records.splits or [None] * len(records), dtype=object)
    held_out = np.isin(splits, ("val", "test"))
    if held_out.any():
        name = "val" if "val" in splits else "test"
        sides = [records.select(np.flatnonzero(side)) for side in (~held_out, splits == name)]
    else:
        share = max(0.1, 2 / max(1, len(np.unique(records.group))))
        sides = list(records.hold_out(min(0.5, share), seed=seed))
    for part, purpose in zip(sides, ("train on", "hold out"), strict=True):
        num_groups = len(np.unique(part.group))
        if num_groups < 2:
            raise DataError(
                f"{records.source or 'the data'}: of {len(records)} pairs {len(part)} are left to {purpose}, captions of "
                f"{num_groups} image{'s' * (num_groups != 1)} (groups), at least 2 are needed; give more images, or a "
                "higher limit"
            )
    return sides[0], sides[1]


def held_out_loader(dataset: Any, scheduler: str = "sorted") -> PlannedLoader:
    """Held-out batches, decoded in the caller's thread."""
    return PlannedLoader(dataset, make_scheduler(scheduler, batch_size=EVAL_BATCH_SIZE), num_workers=0)


def make_model(options: Mapping[str, Any], *, vocab_size: int, seed: int) -> nn.Module:
    """A model with the same first weights for the same seed, whatever was drawn before.

    Args:
        options: of `build_model`.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(**options, vocab_size=vocab_size)


def model_of(options: ComparisonOptions, dataset: Any) -> nn.Module:
    """The model that a comparison trains, with its first weights."""
    if options.processor is not None:
        return ConversationModel(named_vlm(options.model))
    return make_model({"preset": options.model}, vocab_size=len(dataset.tokenizer), seed=options.seed)


def fill_cache(
    datasets: Sequence[MultimodalDataset],
    folder: str | Path,
    *,
    limit_gib: float | None = None,
    progress: bool = True,
) -> None:
    """Give data sets one cache, and add what it lacks; under `torchrun` every rank adds a part.

    The data sets must be prepared alike, as those of `make_datasets` are. A sample that cannot be decoded is left to
    the loader, which knows what to do with it.

    Raises:
        OptionError: the folder holds other things, or the limit is too low.
        RunError: another rank has failed.
    """
    limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
    for dataset in datasets:
        key = cache_key(dataset, among=datasets)
        dataset.cache = SampleCache(folder, key=key, limit_bytes=limit_bytes)
        build_cache(dataset, progress=progress)


def sampled(
    scheduler: Scheduler, dataset: MultimodalDataset, options: SamplingOptions, *, progress: bool = True
) -> tuple[Scheduler, NDArray[np.float64] | None]:
    """The scheduler, on top of it what chooses the samples of an epoch; and (N,) weights in the loss, or None.

    Measuring how difficult samples are decodes every image once, unless that was done before.
    """
    shared: Any = {"inner": scheduler, "seed": scheduler.seed, "world_size": scheduler.world_size}
    weights = np.ones(0)
    if options.adaptive != "off":
        records = dataset.records
        found = difficulty(image_complexity(records, progress=progress), records.num_tokens)
        weights = _UNIFORM_SHARE + (1 - _UNIFORM_SHARE) * found
    if options.adaptive == "sampling":
        return Weighted(weights=weights, **shared), 1 / weights if options.correct else None
    if options.ratios is not None:
        scheduler = Mixed(ratios=options.ratios, length=options.length, **shared)
    return scheduler, weights if options.adaptive == "loss" else None


def suit(model: nn.Module, plan: BatchPlan | LivePlan, dataset: Any = None) -> nn.Module:
    """Turn packed execution on where the plan lays samples end to end; changes no weight.

    Args:
        dataset: of conversations, whose processor makes the batches that the model is tried on.

    Raises:
        OptionError: a model that cannot be packed.
    """
    packed = isinstance(plan, BatchPlan) and plan.limits.streams is not None
    if packed and isinstance(model, ConversationModel):
        return packing(model, dataset)
    return enable_packing(model) if packed else model


def costs_of(plan: BatchPlan | LivePlan) -> NDArray[np.float64]:
    """(n,) tokens and patches of each batch of a plan: with padding, or without where samples lie end to end.

    Ones for a plan that is still to change.
    """
    return plan.costs(COST) if isinstance(plan, BatchPlan) else np.ones(len(plan))


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know of the machine to place its figures."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return {**describe_host(), "device_name": name}
