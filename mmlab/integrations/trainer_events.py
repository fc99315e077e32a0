"""mmlab's events of a run of transformers' Trainer: `Trainer(..., callbacks=[TrainerEvents()])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mmlab.integrations.writer import RunWriter, planned_sampler
from mmlab.types import CostModel

_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}


class TrainerEvents(TrainerCallback):
    """Every rank writes its steps; the loss of a step is there where the Trainer logs it: `logging_steps=1` for each.

    The live panel and `mmlab watch` show the run, pause it and stop it. Without `PlannedBatches` nothing is known of
    a batch but the size that was asked for.

    Args:
        folder: of the run; the Trainer's `output_dir` unless given.
        memory, live: as of `RunWriter`.
    """

    def __init__(
        self, folder: str | Path | None = None, *, memory: CostModel | None = None, live: bool = False
    ) -> None:
        self.folder, self.memory, self.live = folder, memory, live
        self.run: RunWriter | None = None
        self._pending: dict[str, Any] | None = None  # a step that waits for its loss

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, train_dataloader: Any = None, **_: Any
    ) -> None:
        if self.run is not None:
            self.run.close()
        config, sampler = getattr(model, "config", None), planned_sampler(train_dataloader)
        self._each = args.gradient_accumulation_steps
        self._batches = len(train_dataloader) if sampler is not None else 0
        self._asked = {} if sampler is not None else {"num_samples": args.train_batch_size * self._each}
        self.run = RunWriter(
            self.folder or args.output_dir,
            sampler=sampler,
            memory=self.memory,
            live=self.live,
            device=args.device,
            step=state.global_step,
            num_steps=state.max_steps,
            num_epochs=state.num_train_epochs,
            accumulation_steps=self._each,
            seed=args.seed,
            model=getattr(config, "model_type", type(model).__name__),
            num_parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
            config=args.to_sanitized_dict(),
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._flush({})
        self._open.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = max(1, -(-self._batches // self._each))
        start = (state.global_step - 1) % steps * self._each
        num = min(self._each, self._batches - start) if self._batches else self._each
        self._pending = {**self._open.measure(num, start=start), **self._asked}
        if self._open.stopped:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self._flush({key: float(logs[name]) for name, key in _LOGGED.items() if name in (logs or {})})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        if self.run is None or not self.run.is_open:
            return  # `evaluate` outside of training
        found = {"loss": "eval_loss", "eval_s": "eval_runtime", "samples_per_s": "eval_samples_per_second"}
        values = {key: metrics[name] for key, name in found.items() if name in (metrics or {})}
        self.run.write("eval", epoch=int(state.epoch or 0), **values)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._flush({})
        self._open.write("checkpoint", path=f"checkpoint-{state.global_step}", epoch=int(state.epoch))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._flush({})
        self._open.write("epoch", epoch=round(state.epoch) - 1, num_steps=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._flush({})
        self._open.close()

    @property
    def _open(self) -> RunWriter:
        assert self.run is not None
        return self.run

    def _flush(self, values: dict[str, Any]) -> None:
        if self._pending is not None:
            self._open.write_step({**self._pending, **values})
            self._pending = None
