"""mmlab's batches in transformers' Trainer and in its subclasses, such as TRL's SFTTrainer."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from mmlab.data.conversation_sizes import conversation_sizes
from mmlab.data.conversations import Conversations
from mmlab.errors import DataError, OptionError
from mmlab.integrations.sampler import PlannedSampler, sample_sizes
from mmlab.integrations.trainer_events import TrainerEvents
from mmlab.machine import place_of_process
from mmlab.schedule.base import Scheduler
from mmlab.types import Samples

_SET_ANEW = {"batch_size", "batch_sampler", "sampler", "shuffle", "drop_last"}
_OPTIONS = signature(DataLoader).parameters.keys() - _SET_ANEW - {"dataset"}


class _SameBatches(TrainerCallback):
    """Raises an error for a checkpoint of other batches, after which samples would be repeated or left out."""

    def __init__(self, trainer: PlannedBatches) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if (planned := self._trainer.planned) is not None:
            here = planned.state_dict(0) | {"accumulation": args.gradient_accumulation_steps}
            if state.global_step and state.stateful_callbacks.get("mmlab") != here:
                raise DataError(
                    "cannot resume: the checkpoint is of other batches; resume with the same data, scheduler, seed of the "
                    "scheduler, number of ranks, number of epochs or steps, and gradient_accumulation_steps"
                )
            state.stateful_callbacks["mmlab"] = here  # saved with each checkpoint


class PlannedBatches:
    """A mixin that replaces a Trainer's batches by a scheduler's and changes nothing else; name it first.

    ::

        class MyTrainer(mmlab.integrations.PlannedBatches, SFTTrainer): ...

        MyTrainer(model, args, train_dataset=dataset, data_collator=collate, scheduler=scheduler, sizes=sizes).train()

    `PlannedTrainer` is this mixin with transformers' own `Trainer`.

    Every epoch has the same number of steps, so learning rates, `num_items_in_batch` and the Trainer's own skipping on
    resume stay correct. Each process draws its own share, and accelerate does not divide it again, whatever
    `even_batches`, `split_batches` and `dispatch_batches` say. `per_device_train_batch_size` has no effect.

    Args:
        scheduler: `mmlab.make_scheduler(...)`; None leaves the trainer as it is.
        sizes: of the training samples, in their order; None takes those of the data set (`MultimodalDataset`,
            or `Conversations` under the trainer's `processing_class`), or the lengths of its column
            `input_ids`, which SFTTrainer makes.

    Raises:
        DataError: there are no sizes, or not as many as samples.
        OptionError: the data set has no length, or `auto_find_batch_size` is set.
    """

    def __init__(
        self, *args: Any, scheduler: Scheduler | None = None, sizes: Samples | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.batch_scheduler, self.sample_sizes = scheduler, sizes
        self.planned: PlannedSampler | None = None  # once training has begun
        self.add_callback(_SameBatches(self))  # type: ignore[attr-defined]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own; an error or an interrupt that ends it is written to the run's events."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            for events in self.callback_handler.callbacks:  # type: ignore[attr-defined]
                if isinstance(events, TrainerEvents):
                    events.close(error)
            raise

    def get_train_dataloader(self) -> DataLoader:
        """The trainer's own loader, with planned batches."""
        from mmlab.integrations.with_accelerate import prepare_loader

        trainer: Any = self
        loader = super().get_train_dataloader()  # type: ignore[misc]
        if self.batch_scheduler is None:
            return loader
        if not hasattr(loader.dataset, "__len__"):
            raise OptionError("planning needs a train_dataset with a length, found a stream; load it whole")
        if trainer.args.auto_find_batch_size:
            raise OptionError("auto_find_batch_size cannot shrink planned batches; lower their budget")
        self.planned = self._make_sampler(trainer.train_dataset, self.batch_scheduler)
        options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
        planned = DataLoader(loader.dataset, batch_sampler=self.planned, **options)
        return prepare_loader(trainer.accelerator, planned)

    def get_total_train_batch_size(self, args: Any) -> int:
        """Mean samples of an optimizer step over all processes, from which the trainer computes samples/s."""
        if self.planned is None:
            return super().get_total_train_batch_size(args)  # type: ignore[misc]
        steps = math.ceil(len(self.planned) / args.gradient_accumulation_steps)
        return max(1, round(len(self.planned.sizes) / steps))

    def _make_sampler(self, dataset: Any, scheduler: Scheduler) -> PlannedSampler:
        args, sizes = self.args, self._find_sizes(dataset)  # type: ignore[attr-defined]
        if isinstance(dataset, Conversations) and args.remove_unused_columns:
            raise OptionError("give the trainer remove_unused_columns=False: the collator needs all columns")
        if (started := place_of_process()[1]) != args.world_size:
            raise OptionError(
                f"torchrun has started {started} processes, but transformers sees {args.world_size} and would train in "
                "each of them alone; without a GPU, give TrainingArguments use_cpu=True"
            )
        place = {"rank": args.process_index, "world_size": args.world_size}
        num_epochs = math.ceil(args.num_train_epochs)
        if args.max_steps > 0:  # no epoch gets shorter than the first one is now, so these epochs suffice
            first = PlannedSampler(sizes, scheduler, num_epochs=1, **place)
            num_epochs = math.ceil(args.max_steps / math.ceil(len(first) / args.gradient_accumulation_steps))
        sampler = PlannedSampler(sizes, scheduler, num_epochs=num_epochs, **place)
        if len(sampler.sizes) != len(dataset):
            raise DataError(f"sizes are of {len(sampler.sizes)} samples, train_dataset has {len(dataset)}")
        return sampler

    def _find_sizes(self, dataset: Any) -> Samples:
        if self.sample_sizes is not None:
            return self.sample_sizes
        if hasattr(dataset, "sizes"):
            return dataset
        if isinstance(dataset, Conversations):
            return conversation_sizes(dataset, self.processing_class).sizes()  # type: ignore[attr-defined]
        if "input_ids" in (getattr(dataset, "column_names", None) or ()):
            return sample_sizes([len(ids) for ids in dataset["input_ids"]])
        raise DataError(
            f"{type(dataset).__name__} does not tell the sizes of its samples; give sizes=, for example "
            "mmlab.integrations.sample_sizes(num_tokens, height, width), or train on mmlab.read_conversations(dataset)"
        )


class PlannedTrainer(PlannedBatches, Trainer):
    """transformers' `Trainer` with planned batches."""
