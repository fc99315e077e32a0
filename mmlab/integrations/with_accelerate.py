"""mmlab's batches in a loop with Hugging Face accelerate."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from mmlab.errors import OptionError
from mmlab.integrations.writer import planned_sampler


def prepare_loader(accelerator: Accelerator, loader: DataLoader) -> Any:
    """Like `accelerator.prepare(loader)`, but without dividing the batches among processes a second time.

    `loader.set_epoch(epoch)` chooses the epoch, `accelerate.skip_first_batches` resumes within it, and
    `accelerator.prepare` returns the loader unchanged from here on.

    Raises:
        OptionError: the loader has no `PlannedSampler`; pass it to `accelerator.prepare` instead.
    """
    if planned_sampler(loader) is None:
        raise OptionError("give DataLoader(batch_sampler=PlannedSampler(...)); others: accelerator.prepare")
    prepared = prepare_data_loader(
        loader, accelerator.device, num_processes=1, process_index=0, put_on_device=accelerator.device_placement,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )  # fmt: skip
    prepared._is_accelerate_prepared = True
    return accelerator.prepare_data_loader(prepared)
