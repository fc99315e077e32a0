"""The loader: a plan decides which samples form a batch, workers decode them, collation pads them together.

Here dataset and schedule meet. The engine is torch's DataLoader with worker processes, pinned memory,
prefetching and persistent workers; order comes from the plan alone, so it does not depend on the number of
workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from mmlab.dataset import MultimodalDataset, Sample
from mmlab.images import PATCH
from mmlab.machine import num_usable_cores
from mmlab.schedule import BatchPlan, BatchScheduler
from mmlab.types import Batch


def collate(samples: Sequence[Sample], *, pad_token_id: int = 0) -> Batch:
    """Pad samples to the largest height, width and text among them.

    Images sit in the top left corner; padding is zero in `pixel_values`, `pad_token_id` in `input_ids` and
    False in the masks. A batch without any image (or text) still gets one fully masked patch (or token), so
    that no tensor is empty.

    Returns:
        Batch of B samples, `pixel_values` (B, 3, H, W) uint8, `input_ids` (B, T) int64.
    """
    height = max(
        (sample["image"].shape[1] for sample in samples if sample["image"] is not None), default=PATCH
    )
    width = max(
        (sample["image"].shape[2] for sample in samples if sample["image"] is not None), default=PATCH
    )
    num_tokens = max(1, *(len(sample["input_ids"]) for sample in samples))
    pixel_values = torch.zeros(len(samples), 3, height, width, dtype=torch.uint8)
    pixel_mask = torch.zeros(len(samples), height, width, dtype=torch.bool)
    input_ids = torch.full((len(samples), num_tokens), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros(len(samples), num_tokens, dtype=torch.bool)
    for row, sample in enumerate(samples):
        image, ids = sample["image"], sample["input_ids"]
        if image is not None:
            pixel_values[row, :, : image.shape[1], : image.shape[2]] = image
            pixel_mask[row, : image.shape[1], : image.shape[2]] = True
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = True
    labels = [sample["label"] for sample in samples]
    return Batch(
        pixel_values=pixel_values,
        pixel_mask=pixel_mask,
        input_ids=input_ids,
        attention_mask=attention_mask,
        labels=None if None in labels else torch.tensor(labels),
        record_ids=[sample["id"] for sample in samples],
        groups=torch.tensor([sample["group"] for sample in samples]),
    )


def default_num_workers() -> int:
    """Worker processes to start when none are asked for: one a core that this process may use, at most 8."""
    return min(8, num_usable_cores())


class PlannedLoader:
    """Iterates over the batches of one epoch's plan; `set_epoch` plans the next.

    Args:
        dataset: what to load.
        scheduler: plans each epoch from `dataset.sizes`.
        num_workers: processes that decode; 0 decodes in this one; None takes `default_num_workers()`.
        pin_memory: page-locked batches for fast copies to a GPU; None pins when one is there.
        prefetch_factor: batches that each worker prepares ahead.
    """

    def __init__(
        self,
        dataset: MultimodalDataset,
        scheduler: BatchScheduler,
        *,
        num_workers: int | None = None,
        pin_memory: bool | None = None,
        prefetch_factor: int = 2,
    ) -> None:
        self.dataset = dataset
        self.scheduler = scheduler
        self._sizes = dataset.sizes
        self._order = _CurrentPlan(scheduler.plan(self._sizes, epoch=0))
        self.epoch = 0
        workers = default_num_workers() if num_workers is None else num_workers
        options: dict[str, Any] = (
            {"prefetch_factor": prefetch_factor, "persistent_workers": True} if workers else {}
        )
        self._loader = DataLoader(
            dataset,
            batch_sampler=self._order,
            collate_fn=partial(collate, pad_token_id=dataset.tokenizer.pad_token_id),
            num_workers=workers,
            pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
            generator=torch.Generator(),  # making an iterator must not draw from the global generator
            **options,
        )

    @property
    def plan(self) -> BatchPlan:
        """The batches of the current epoch."""
        return self._order.plan

    @plan.setter
    def plan(self, plan: BatchPlan) -> None:
        self._order.plan = plan

    def set_epoch(self, epoch: int) -> None:
        """Plan the given epoch; takes effect at the next iteration."""
        if epoch != self.epoch:
            self.epoch, self.plan = epoch, self.scheduler.plan(self._sizes, epoch=epoch)

    def __len__(self) -> int:
        return len(self.plan)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._loader)


class _CurrentPlan:
    """The batch sampler that torch sees: whatever plan it holds when an epoch starts.

    It does not know the loader. With a cycle of references, a loader that is let go of would keep its workers until the
    garbage collector comes by, perhaps inside another loader's worker, which torch answers with a traceback.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self.plan = plan

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.plan)

    def __len__(self) -> int:
        return len(self.plan)
