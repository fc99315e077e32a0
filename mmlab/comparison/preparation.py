"""The parts of a run: two data sets, a model, the choice of samples, and facts about the machine.

Comparisons and single runs share these, so both hold out the same pairs and record the same facts.
`mmlab.comparison.plan` makes the schedulers.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mmlab.comparison.options import ComparisonOptions, DataOptions, SamplingOptions
from mmlab.data.augment import Augment
from mmlab.data.complexity import image_complexity
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import errors_of, read_records
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
from mmlab.schedule.mixing import Mixed, Weighted
from mmlab.schedule.plan import BatchPlan
from mmlab.schedule.schedulers import make_scheduler
from mmlab.training.step_meter import plan_costs
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


def augmentation(name: str) -> Augment | None:
    """The augmentation with this name in `AUGMENTATIONS`.

    Raises:
        OptionError: an unknown name.
    """
    check_name("augmentation", name, AUGMENTATIONS)
    return AUGMENTATIONS[name]


def make_datasets(
    data: Any, options: DataOptions, *, ratios: Any = None, seed: int = 0, progress: bool = True
) -> tuple[Any, Any]:
    """Training and held-out samples, which share no image and are prepared alike.

    Args:
        data: anything that `read_records` takes, or records; with a processor, anything that `read_conversations` takes,
            or conversations.
        options: how they are prepared; `path` and the loader's options are not used. Samples that the cache lacks are
            decoded into it now, under `torchrun` a part by every rank. A sample that cannot be decoded is left to the
            loader. For conversations the cache stores the sizes.
        ratios: the shares of an epoch, if any are asked for; rows with only a text or an image are then kept.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work; the message names it.
        RunError: another rank failed while the cache was being filled.
    """
    if options.limit is not None and options.limit < 2:
        raise OptionError(f"limit must be at least 2 samples, found {options.limit}")
    kind: type[Any] = Records
    read: Any = partial(read_records, allow_missing_modality=ratios is not None)
    if options.processor is None:
        policy = parse_image_policy(options.image)
    else:
        loaded, kind, read = named_processor(options.processor), Conversations, read_conversations
    if not isinstance(data, kind):
        data = read(data, images=options.images, errors=errors_of(options.skip_bad_rows), progress=progress)
    elif options.images is not None:
        raise OptionError("images= applies only to data given as a path; records have their own paths")
    train, held_out = hold_out(data.sample(options.limit, seed=seed), seed=seed)
    if options.processor is not None:
        talks = partial(ConversationDataset, processor=loaded, cache=options.cache, progress=progress)
        return talks(train), talks(held_out)
    words = load_tokenizer(options.tokenizer, records=train)
    pairs = partial(MultimodalDataset, image_policy=policy, max_tokens=options.max_tokens, tokenizer=words)
    both = pairs(train), pairs(held_out)
    if (folder := options.cache) is not None:
        limit_bytes = None if options.cache_limit_gib is None else int(options.cache_limit_gib * GIB)
        for dataset in both:
            dataset.cache = SampleCache(folder, key=cache_key(dataset, among=both), limit_bytes=limit_bytes)
            build_cache(dataset, progress=progress)
    return both


def hold_out(records: Rows, *, seed: int = 0) -> tuple[Rows, Rows]:
    """Training and held-out pairs: by the data's own split, else a tenth of the images, at least two.

    Validation is held out (`val`, `valid`, `validation`, `dev`, `eval`, in any case), or `test` where there is none;
    neither is trained on, nor are pairs of an image that is held out. Data of such splits alone count as data
    without splits.

    Raises:
        DataError: fewer than two images on one side; a pair is judged against others.
    """
    splits = np.array([str(name).lower() for name in records.splits or [None] * len(records)], dtype=object)
    validation, test = np.isin(splits, ("val", "valid", "validation", "dev", "eval")), splits == "test"
    trained, held_out = ~(validation | test), validation if validation.any() else test
    if trained.any() and held_out.any():
        shared = trained & np.isin(records.group, records.group[held_out])
        if num := shared.sum():
            warnings.warn(f"{num:,} training pairs show images held out too; they are left out", stacklevel=3)
        sides = records.select(trained & ~shared), records.select(held_out)
    else:
        share = max(0.1, 2 / max(1, len(np.unique(records.group))))
        sides = records.hold_out(min(0.5, share), seed=seed)
    for part, purpose in zip(sides, ("train on", "hold out"), strict=True):
        if (num_groups := len(np.unique(part.group))) < 2:
            raise DataError(
                f"{records.source or 'the data'}: of {len(records)} samples {len(part)} are left to {purpose}, in {num_groups} "
                f"group{'s' * (num_groups != 1)} (samples that share an image), at least 2 are needed; give more images, or "
                "a higher limit"
            )
    return sides


def held_out_loader(dataset: Any, scheduler: str = "sorted", **options: Any) -> PlannedLoader:
    """A loader of held-out batches, which decodes in the caller's thread; the other options are those of the loader."""
    planner = make_scheduler(scheduler, batch_size=EVAL_BATCH_SIZE)
    return PlannedLoader(dataset, planner, **options | {"num_workers": 0})


def make_model(options: Mapping[str, Any], dataset: Any, *, seed: int) -> nn.Module:
    """A model; one seed gives the same initial weights, whatever random numbers were drawn before.

    Args:
        options: of `build_model`; of `named_vlm` if the data set holds conversations.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(dataset, ConversationDataset):
            return ConversationModel(named_vlm(**options))
        return build_model(**options, vocab_size=len(dataset.tokenizer))


def model_of(options: ComparisonOptions, dataset: Any) -> nn.Module:
    """The model that a comparison trains, with its initial weights."""
    named = {"preset" if options.processor is None else "name": options.model}
    return make_model(named, dataset, seed=options.seed)


def with_sampling(
    scheduler: Scheduler, dataset: MultimodalDataset, options: SamplingOptions, *, progress: bool = True
) -> tuple[Scheduler, NDArray[np.float64] | None]:
    """The scheduler, wrapped in one that chooses samples if asked for; (N,) weights in the loss, or None.

    Measuring how difficult samples are decodes every image once, unless that was done before.
    """
    shared: Any = {"inner": scheduler, "seed": scheduler.seed, "world_size": scheduler.world_size}
    weights = np.ones(0)
    if options.adaptive != "off":
        weights = difficulty(image_complexity(dataset.records, progress=progress), dataset.records.num_tokens)
    if options.adaptive == "sampling":
        return Weighted(weights=weights, **shared), 1 / weights if options.correct else None
    if options.ratios is not None:
        scheduler = Mixed(ratios=options.ratios, length=options.length, **shared)
    return scheduler, weights if options.adaptive == "loss" else None


def packed_if_planned(model: nn.Module, plan: BatchPlan | LivePlan, dataset: Any = None) -> nn.Module:
    """Enable packed execution if the plan lays samples end to end; changes no weight.

    Args:
        dataset: conversations, on whose batches a vision-language model is tried first.

    Raises:
        OptionError: the model cannot be packed.
    """
    packed = isinstance(plan, BatchPlan) and plan.limits.streams is not None
    if packed and isinstance(model, ConversationModel):
        return packing(model, dataset)
    return enable_packing(model) if packed else model


def costs_of(plan: BatchPlan | LivePlan) -> NDArray[np.float64]:
    """(n,) tokens and patches of each batch of a plan: with padding, or without where samples lie end to end.

    Ones for a plan that changes during the epoch.
    """
    return plan_costs(plan) if isinstance(plan, BatchPlan) else np.ones(len(plan))


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know about the machine to interpret its figures."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"
    return {**describe_host(), "device_name": name}
