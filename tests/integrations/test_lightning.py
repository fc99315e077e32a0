"""`PlannedDataModule` and `LightningEvents` with the real Lightning: resume, two processes, events."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from mmlab.errors import DataError, OptionError
from mmlab.integrations import LightningEvents, PlannedDataModule
from mmlab.runs import RunState
from mmlab.runs.control import send
from mmlab.runs.events import read_events
from tests.integrations.tiny import LENGTHS, Pairs, budget, clip, collate, flat, sizes
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and torch, about themselves

EVERYTHING = list(range(len(LENGTHS)))


class Clip(LightningModule):
    def __init__(
        self, fails_at: int = -1, leaves_out: tuple[int, ...] = (), counts_steps: bool = False
    ) -> None:
        super().__init__()
        self.model, self.fails_at, self.leaves_out = clip(), fails_at, leaves_out
        self.counts_steps = counts_steps
        self.losses: list[float] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
        if self.global_step == self.fails_at:
            raise ZeroDivisionError("broken on purpose")
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return None if number in self.leaves_out else loss

    def validation_step(self, batch: Any, number: int) -> None:
        time.sleep(0.5)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        if not self.counts_steps:
            return optimizer
        num_steps = (
            self.trainer.estimated_stepping_batches
        )  # makes the loader, before a checkpoint is restored
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (num_steps + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    @property
    def seen(self) -> list[list[int]]:
        return self.model.seen


def fit(folder: Path | str, *, resume: str | None = None, num_workers: int = 0, **options: Any) -> Clip:
    own = ("fails_at", "leaves_out", "counts_steps")
    model = Clip(**{name: options.pop(name) for name in own if name in options})
    fixed = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "default_root_dir": str(folder),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    data = PlannedDataModule(Pairs(), budget(), sizes=sizes(), collate_fn=collate, num_workers=num_workers)
    if options.pop("evaluates", False):
        data.val_dataloader = lambda: [0]
    Trainer(**{**fixed, **options}).fit(model, datamodule=data, ckpt_path=resume, weights_only=False)
    return model


@pytest.mark.parametrize(("num_workers", "after"), [(0, 3), (1, 3), (0, 0), (1, 0)])
def test_a_resume_sees_every_sample_once(tmp_path: Path, num_workers: int, after: int) -> None:
    whole = fit(tmp_path / "whole", num_workers=num_workers).seen
    num = len(whole) // 2
    assert [flat(whole[:num]), flat(whole[num:])] == [EVERYTHING] * 2
    stop = num + after
    checkpoints = ModelCheckpoint(dirpath=tmp_path, filename="here", every_n_train_steps=stop)
    fit(tmp_path, num_workers=num_workers, callbacks=[checkpoints], enable_checkpointing=True, max_steps=stop)
    assert fit(tmp_path, num_workers=num_workers, resume=str(tmp_path / "here.ckpt")).seen == whole[stop:]


@pytest.mark.parametrize(("num_workers", "after"), [(0, 3), (1, 3), (0, 0)])
def test_a_resume_goes_on_where_a_schedule_asks_for_the_number_of_steps(
    tmp_path: Path, num_workers: int, after: int
) -> None:
    whole = fit(tmp_path / "whole", counts_steps=True)
    checkpoints = ModelCheckpoint(
        tmp_path, filename="{step}", every_n_train_steps=len(whole.seen) // 2 + after, save_top_k=-1
    )
    fit(
        tmp_path,
        num_workers=num_workers,
        callbacks=[checkpoints],
        enable_checkpointing=True,
        counts_steps=True,
    )
    stop = len(whole.seen) // 2 + after
    resumed = fit(
        tmp_path, num_workers=num_workers, resume=str(tmp_path / f"step={stop}.ckpt"), counts_steps=True
    )
    assert resumed.seen == whole.seen[stop:]
    for ours, theirs in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_a_position_is_kept_for_training_only(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, filename="here", every_n_train_steps=3)
    whole = fit(tmp_path, callbacks=[checkpoints], enable_checkpointing=True, max_steps=3).seen
    data = PlannedDataModule(Pairs(), budget(), sizes=sizes(), collate_fn=collate)
    data.val_dataloader = lambda: [0]
    options = {"accelerator": "cpu", "max_epochs": 2, "logger": False, "enable_progress_bar": False}
    model = Clip()
    trainer = Trainer(**options, max_steps=3, enable_checkpointing=False, default_root_dir=str(tmp_path))
    trainer.validate(model, data, ckpt_path=str(tmp_path / "here.ckpt"), weights_only=False, verbose=False)
    trainer.fit(model, data)
    assert model.seen == whole


def test_the_events_tell_each_steps_loss_and_batches(tmp_path: Path) -> None:
    class SlowDisk(ModelCheckpoint):
        def _save_checkpoint(self, *what: Any) -> None:
            time.sleep(0.5)
            super()._save_checkpoint(*what)

    callbacks = [LightningEvents(), SlowDisk(every_n_train_steps=2)]
    model = fit(
        tmp_path, callbacks=callbacks, accumulate_grad_batches=3, enable_checkpointing=True, evaluates=True
    )
    state = RunState(tmp_path)
    state.poll()
    assert state.status == "done"
    num = len(model.seen) // 2
    steps = -(-num // 3)
    spans = [
        slice(epoch * num + start, epoch * num + min(num, start + 3))
        for epoch in range(2)
        for start in range(0, num, 3)
    ]
    windows = [flat(model.seen[span]) for span in spans]
    assert state.count("step") == 2 * steps == state.latest("start")["num_steps"]
    assert state.column("num_samples").tolist() == [len(window) for window in windows]
    assert state.column("num_tokens").tolist() == [max(LENGTHS[window]) for window in windows]
    assert state.column("loss") == pytest.approx([np.mean(model.losses[span]) for span in spans])
    assert state.column("data_wait_s").max() < 0.5, "evaluating and saving is no waiting for data"


def test_a_batch_without_a_loss_is_counted_without_one(tmp_path: Path) -> None:
    model = fit(
        tmp_path, callbacks=[LightningEvents()], accumulate_grad_batches=2, max_epochs=1, leaves_out=(1, 2, 3)
    )
    steps = [
        event.values for event in read_events(tmp_path / "events-rank0.jsonl")[0] if event.kind == "step"
    ]
    assert ["loss" in step for step in steps[:3]] == [True, False, True]
    assert len(steps) == -(-len(model.seen) // 2)


def test_a_run_is_stopped_and_a_failure_is_told(tmp_path: Path) -> None:
    class Stopping(LightningEvents):
        def on_train_batch_start(self, trainer: Any, *more: Any) -> None:
            super().on_train_batch_start(trainer, *more)
            if trainer.global_step == 2:
                send(tmp_path, "stop")

    assert len(fit(tmp_path, callbacks=[Stopping()]).seen) == 3
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "failed", callbacks=[LightningEvents()], fails_at=2)
    for folder, status in ((tmp_path, "stopped"), (tmp_path / "failed", "failed")):
        state = RunState(folder)
        state.poll()
        assert state.status == status


def test_the_number_of_epochs_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="max_epochs"):
        fit(tmp_path, max_epochs=-1, max_steps=3)


def _on_rank(folder: str) -> tuple[list[list[int]], str]:
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    os.environ["NODE_RANK"] = "0"
    seen = fit(folder, devices=2, strategy="ddp", use_distributed_sampler=False).seen
    try:
        fit(folder, devices=2, strategy="ddp")
    except OptionError as error:
        return seen, str(error)
    return seen, ""


def test_two_processes_share_every_sample_once_and_never_twice(tmp_path: Path) -> None:
    (first, said), (second, _) = run_ranks(_on_rank, 2, str(tmp_path), joins=False)
    num = len(first) // 2
    for span in (slice(num), slice(num, None)):
        assert flat(first[span] + second[span]) == EVERYTHING
    assert "use_distributed_sampler=False" in said


def test_sizes_of_other_samples_are_refused(tmp_path: Path) -> None:
    fewer = PlannedDataModule(Pairs(), budget(), sizes=sizes().take([0, 1, 2]), collate_fn=collate)
    trainer = Trainer(accelerator="cpu", max_epochs=1, default_root_dir=str(tmp_path), logger=False)
    with pytest.raises(DataError, match=f"3 sizes for a data set of {len(LENGTHS)} samples"):
        trainer.fit(Clip(), datamodule=fewer)
