"""mmlab's batches and events in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningDataModule
from torchdata.stateful_dataloader import StatefulDataLoader

from mmlab.errors import DataError, OptionError
from mmlab.integrations.sampler import PlannedSampler
from mmlab.integrations.writer import RunWriter, planned_sampler
from mmlab.schedule.base import Scheduler
from mmlab.types import Samples


class PlannedDataModule(LightningDataModule):
    """Training batches from a scheduler: `trainer.fit(model, datamodule=PlannedDataModule(...))`.

    Checkpoints hold the position in the epoch, so that a resumed run sees every sample once. On several
    devices use `Trainer(use_distributed_sampler=False)`: each rank draws its own share already.

    Args:
        dataset: with `len` and items.
        scheduler: `mmlab.make_scheduler(...)`.
        sizes: of the samples, in the order of the data set; None takes the data set's own, which only a
            `MultimodalDataset` has.
        loader: options of `StatefulDataLoader`, such as `collate_fn` and `num_workers`.
    """

    def __init__(
        self, dataset: Any, scheduler: Scheduler, *, sizes: Samples | None = None, **loader: Any
    ) -> None:
        super().__init__()
        self.dataset, self.batch_scheduler, self.options = dataset, scheduler, loader
        self.sizes = dataset if sizes is None else sizes
        self._resumed: dict[str, Any] = {}  # the position of a checkpoint, where the next loader starts

    def train_dataloader(self) -> StatefulDataLoader:
        """A loader that Lightning saves and resumes.

        Raises:
            DataError: there are not as many sizes as samples.
            OptionError: Lightning would divide the batches among devices again; or the number of epochs is
                unknown.
        """
        trainer: Any = self.trainer
        if trainer.max_epochs is None or trainer.max_epochs < 0:
            raise OptionError("planned batches need Trainer(max_epochs=...), so that epochs are equally long")
        place = {"rank": trainer.global_rank, "world_size": trainer.world_size}
        sampler = PlannedSampler(self.sizes, self.batch_scheduler, num_epochs=trainer.max_epochs, **place)
        if len(sampler.sizes) != len(self.dataset):
            raise DataError(f"{len(sampler.sizes)} sizes for a data set of {len(self.dataset)} samples")
        sampler.follow_until = trainer.max_epochs
        sampler.set_epoch(trainer.current_epoch)
        loader = StatefulDataLoader(self.dataset, batch_sampler=sampler, **self.options)
        loader.load_state_dict(self._resumed)
        self._resumed = {}
        return loader

    def state_dict(self) -> dict[str, Any]:
        """The position in the epoch. Lightning saves it too, but too late restores it to a loader that was made early, as for
        the number of steps (`estimated_stepping_batches`) that a learning rate scheduler asks for."""
        loader: Any = self.trainer.train_dataloader
        return {} if loader is None else loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Where the next `fit` goes on."""
        if self.trainer.training:
            self._resumed = state


class LightningEvents(Callback):
    """Writes mmlab's events: `Trainer(callbacks=[LightningEvents("runs/mine")])`; the live panel pauses and stops the run.

    The loss is what `training_step` returns, a mean over a step's batches without those for which it returns
    None.

    Args:
        folder: of the run; Lightning's `default_root_dir` unless given.
        options: of `RunWriter`, such as `memory` and `live`, and keys of a `start` event.
    """

    def __init__(self, folder: str | Path | None = None, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.run: Any = None  # a RunWriter, once training has begun
        self._saved = False  # a checkpoint came after the last batch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step = trainer.global_step
        self._losses: list[float | None] = []  # of the batches since the last step
        folder, sampler = self.folder or trainer.default_root_dir, planned_sampler(trainer.train_dataloader)
        about = {"num_steps": int(trainer.estimated_stepping_batches), "num_epochs": trainer.max_epochs}
        options = {"device": pl_module.device, "step": trainer.global_step, **about, **self.options}
        self.run = RunWriter(folder, sampler=sampler, **options)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.run is not None:
            self.run.exclude_time()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._saved = True  # soon: nothing tells the end

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._saved:
            self.run.exclude_time()
        self._saved = False
        self.run.begin_step()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, _: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        # Lightning has divided it by the batches of a whole step
        self._losses.append(None if loss is None else float(loss) * trainer.accumulate_grad_batches)
        if trainer.global_step == self._step:  # more batches of this step follow
            self.run.end_batch()
            return
        num, self._step = len(self._losses), trainer.global_step
        lr = trainer.optimizers[0].param_groups[0]["lr"]
        told = [own for own in self._losses if own is not None]
        values = {"loss": sum(told) / len(told)} if told else {}
        self.run.step(num, start=batch_idx + 1 - num, lr=lr, **values)
        self._losses.clear()
        trainer.should_stop = trainer.should_stop or self.run.stopped

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.run.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.run is not None:
            self.run.close(exception)
