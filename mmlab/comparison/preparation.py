"""What every run needs before it starts: two data sets, a device, a folder, and facts about the machine.

Shared by comparisons and single runs, so that both hold out the same pairs and describe themselves alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.readers import read_records
from mmlab.data.records import Records
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError, OptionError
from mmlab.loading.cache.build import build_cache
from mmlab.loading.cache.key import cache_key
from mmlab.loading.cache.store import SampleCache
from mmlab.machine import GIB, describe_host
from mmlab.model.packing import enable_packing
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.schedule.plan import BatchPlan
from mmlab.types import parse_image_policy

COST = PaddedTokens()


def make_datasets(
    data: str | Path | Records,
    *,
    image: str,
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
        limit: use only the first pairs.

    Raises:
        DataError: the data cannot be used, or are too few to hold any out.
        OptionError: an option cannot work; the message names it.
    """
    if limit is not None and limit < 2:
        raise OptionError(f"limit must be at least 2 pairs, found {limit}")
    policy = parse_image_policy(image)
    records = data if isinstance(data, Records) else read_records(data, progress=progress)
    parts = hold_out(records if limit is None else records[:limit], seed=seed)
    text_tokenizer = load_tokenizer(tokenizer, records=parts[0], save_to=save_tokenizer_to)
    train_set, held_out_set = (
        MultimodalDataset(part, tokenizer=text_tokenizer, image_policy=policy, max_tokens=max_tokens)
        for part in parts
    )
    return train_set, held_out_set


def fill_cache(
    datasets: Sequence[MultimodalDataset],
    folder: str | Path,
    *,
    limit_gib: float | None = None,
    progress: bool = True,
) -> None:
    """Give data sets one cache, and make what it has not; under `torchrun` every rank makes a part.

    Data sets must be prepared alike, as those of `make_datasets` are. What cannot be made is the loader's affair,
    which is told what to do with bad samples.

    Raises:
        OptionError: the folder holds other things, or the limit is too low.
        RunError: another rank has given up.
    """
    limit_bytes = None if limit_gib is None else int(limit_gib * GIB)
    for dataset in datasets:
        key = cache_key(dataset, among=datasets)
        dataset.cache = SampleCache(folder, key=key, limit_bytes=limit_bytes)
        build_cache(dataset, progress=progress)


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


def suit(model: nn.Module, plan: BatchPlan) -> nn.Module:
    """Turn packed execution on where the plan lays samples end to end; changes no weight.

    Raises:
        OptionError: a model that cannot be packed.
    """
    return model if plan.limits.streams is None else enable_packing(model)


def costs_of(plan: BatchPlan) -> NDArray[np.float64]:
    """(n,) tokens and patches of each batch of a plan: with padding, or without where samples lie end to end."""
    if plan.limits.streams is None:
        return batch_costs(COST, plan.shape_columns)
    alone = plan.sizes.take(plan.columns.order).alone
    return np.add.reduceat(batch_costs(COST, alone), plan.columns.starts)


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader must know of the machine to place its figures."""
    return {
        **describe_host(),
        "device_name": torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU",
    }
