"""mmlab's events for a run of transformers' Trainer: `Trainer(..., callbacks=[TrainerEvents()])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mmlab.integrations.writer import RunWriter, planned_sampler

_LOGGED = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}


class TrainerEvents(TrainerCallback):
    """Every rank writes its steps, with the loss of those that the Trainer logs (all with `logging_steps=1`).

    The live panel and `mmlab watch` show the run, pause it and stop it. Without `PlannedBatches`, only the
    configured size of a batch is known.

    Args:
        folder: of the run; the Trainer's `output_dir` unless given.
        options: of `RunWriter`, such as `memory` and `live`, and keys of a `start` event.
    """

    def __init__(self, folder: str | Path | None = None, **options: Any) -> None:
        self.folder, self.options = folder, options
        self.run: Any = None  # a RunWriter, once training has begun
        self._pending: dict[str, Any] | None = None  # a step that waits for its loss

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.close()  # a run that an interrupt has left open
        loader: Any = given.get("train_dataloader")
        sampler, self._each = planned_sampler(loader), args.gradient_accumulation_steps
        self._batches = len(loader) if sampler is not None else 0
        self._asked = {} if sampler is not None else {"num_samples": args.train_batch_size * self._each}
        about = {"num_steps": state.max_steps, "num_epochs": state.num_train_epochs, "seed": args.seed}
        about |= {"accumulation_steps": self._each, "config": args.to_sanitized_dict()}
        options = {"device": args.device, "step": state.global_step, **about, **self.options}
        self.run = RunWriter(self.folder or args.output_dir, sampler=sampler, **options)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._flush({})
        self.run.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        steps = max(1, -(-self._batches // self._each))
        start = (state.global_step - 1) % steps * self._each
        num = min(self._each, self._batches - start) if self._batches else self._each
        self._pending = {**self.run.measure(num, start=start), **self._asked}
        if self.run.stopped:
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
        self.run.exclude_time()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Write the last step, and how the run ended: done, stopped, or failed by this error."""
        if self.run is not None and self.run.is_open:
            self._flush({})
            self.run.close(error)
        self._pending = None

    def _flush(self, values: dict[str, Any]) -> None:
        if self._pending is not None:
            self.run.write_step({**self._pending, **values})
            self._pending = None
