"""`FusionTrainer`: the training loop, with exact accumulation, mixed precision and one event a step.

The gradient of an optimizer step is that of the window's samples taken together: each objective's sum is divided by
its count over the *whole* window of micro-batches, also in the last, shorter one. (A contrastive loss still finds
its negatives inside each micro-batch; see `mmlab.losses`.) Dropout and negatives are drawn from torch's generators,
seeded from (seed, step), so no generator state is kept and a resumed run draws the same. Clocks are read after the
device has finished.

Costs beside the model: AdamW's two moments a weight, a window of batches in host memory, one synchronisation a step.
It does not write checkpoints (`state_dict` gives what they hold) nor print: effects leave through `emit(event)`.
"""

from __future__ import annotations

import inspect
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from mmlab.errors import OptionError, RunError, unknown_name
from mmlab.events import RunEvent
from mmlab.losses import OBJECTIVES, LossTerms, Objective, OwnLoss
from mmlab.machine import process_rss_bytes
from mmlab.model import LossModel
from mmlab.padding import measure_padding
from mmlab.precision import Precision
from mmlab.retrieval import candidate_loss, joined, of_pairs, recalls
from mmlab.types import Batch

StepValues = dict[str, Any]  # keys of mmlab.events.EVENT_KEYS


class FusionTrainer:
    """Trains a `FusionModel`, a module of your own that takes a `batch`, or any module whose forward returns `.loss`.

    Args:
        model: a module whose forward takes one argument `batch` gets the `Batch` and its output goes to the
            objectives; any other is wrapped in `LossModel`.
        objectives: names in `mmlab.losses.OBJECTIVES`, or objects by name; their means are added. Unused with a
            `LossModel`.
        precision: "fp32", "bf16" or "fp16".
        device: "cpu", "cuda:0"; None takes a GPU if there is one.
        lr: highest learning rate, reached after `warmup_ratio` of the steps, then a cosine down to zero.
        weight_decay: on weights of two or more dimensions; not on biases, norms or the temperature.
        total_steps: length of the schedule; None lets `fit` work it out (and `train_step` alone keep `lr` constant).
        accumulation_steps: micro-batches in one optimizer step.
        max_grad_norm: L2 limit of the gradient.
        seed: of dropout and drawn negatives.
        emit: takes each `RunEvent`, for example `RunLog(folder).emit`.

    Raises:
        OptionError: an unknown objective, a precision that the device does not support, or a number out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        objectives: Sequence[str] | Mapping[str, Objective] = ("contrastive",),
        precision: str | Precision = "fp32",
        device: torch.device | str | None = None,
        lr: float = 1e-4,
        weight_decay: float = 0.01,
        warmup_ratio: float = 0.05,
        total_steps: int | None = None,
        accumulation_steps: int = 1,
        max_grad_norm: float = 1.0,
        seed: int = 0,
        emit: Callable[[RunEvent], object] | None = None,
    ) -> None:
        if accumulation_steps < 1:
            raise OptionError(f"accumulation_steps must be at least 1, found {accumulation_steps}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        takes_batch = "batch" in inspect.signature(model.forward).parameters
        self.model = (model if takes_batch else LossModel(model)).to(self.device)
        self.objectives = _objectives(self.model, objectives)
        self.precision = Precision.parse(precision, self.device)
        self.parameters = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.precision.check(self.parameters)
        decayed = [weight for weight in self.parameters if weight.dim() > 1]
        others = [weight for weight in self.parameters if weight.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=lr,
            fused=self.device.type in ("cpu", "cuda"),
        )
        self.lr, self.warmup_ratio, self.total_steps = lr, warmup_ratio, total_steps
        self.accumulation_steps, self.max_grad_norm, self.seed = accumulation_steps, max_grad_norm, seed
        self.step = self.epoch = self.num_samples = 0
        self.epoch_batches = 0  # done in the current epoch
        self._fixed_schedule = total_steps is not None
        self._emit = emit or (lambda event: None)
        self._stopping = threading.Event()

    def train_step(self, batches: Sequence[Batch], *, data_wait_s: float = 0.0) -> StepValues:
        """One optimizer step over a window of micro-batches, which may be on the CPU.

        Reseeds torch's generators. A micro-batch without anything to learn from (every count zero) is left out, and a
        window of such batches is a skipped step.

        Args:
            data_wait_s: time spent waiting for the batches, to be reported and counted into `step_s`.

        Returns:
            The values of a `step` event.

        Raises:
            RunError: the loss, or under fp32 and bf16 the gradient, is not finite; the weights are as before the
            step.
        """
        started = self._start_step()
        counts = [{name: goal.count(batch) for name, goal in self.objectives.items()} for batch in batches]
        terms = LossTerms({name: sum(count[name] for count in counts) for name in self.objectives})
        for micro_batch, count in zip(batches, counts, strict=True):
            if any(count.values()):
                batch = micro_batch.to(self.device)
                with self.precision.autocast():
                    output = self.model(batch)
                    loss = terms.add({name: goal(output, batch) for name, goal in self.objectives.items()})
                self.precision.backward(loss)
        result = self.precision.step(self.optimizer, self.parameters, self.max_grad_norm)
        means = terms.means()
        if not math.isfinite(sum(means.values())) or (result.skipped and means and not self.precision.scales):
            ids = ", ".join(record_id for batch in batches for record_id in batch.record_ids)
            raise RunError(
                f"step {self.step}: loss {means}, gradient norm {result.grad_norm}, for the samples {ids}"
            )
        self.step += 1
        self.epoch_batches += len(batches)
        num_samples = sum(map(len, batches))
        self.num_samples += num_samples
        waste = measure_padding(batches)
        step_s = self._clock() - started + data_wait_s
        shapes = [batch.shape for batch in batches]
        return {
            "epoch": self.epoch,
            "num_samples": num_samples,
            "num_batches": len(batches),
            "num_tokens": max(shape.num_tokens for shape in shapes),
            "height": max(shape.height for shape in shapes),
            "width": max(shape.width for shape in shapes),
            "loss": sum(means.values()) if means else math.nan,
            **{f"{name}_loss": mean for name, mean in means.items() if name in OBJECTIVES},
            "lr": self.optimizer.param_groups[0]["lr"],
            **result._asdict(),
            "step_s": step_s,
            "data_wait_s": data_wait_s,
            "samples_per_s": num_samples / step_s,
            **waste,
            **self._peak(),
        }

    def fit(
        self, loader: Iterable[Batch], *, num_epochs: int = 1, eval_loader: Iterable[Batch] | None = None
    ) -> list[StepValues]:
        """Train for `num_epochs` epochs; after a resume in mid-epoch the first of them is the rest of that epoch.

        At each epoch's start `loader.set_epoch(epoch)` is called where it exists. `stop()`, or an interrupt from the
        keyboard, ends the loop after the step in hand, with the trainer's state intact; the interrupt is then raised
        again. torch's generators are left as they were found.

        Args:
            loader: gives the batches of one epoch each time it is iterated; it needs a length where `total_steps` is
                not given.
            eval_loader: evaluated after every epoch.

        Returns:
            The values of every step, in order.
        """
        self._stopping.clear()
        history: list[StepValues] = []
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            if not self._fixed_schedule:
                num_batches = len(loader)  # type: ignore[arg-type]
                rest = math.ceil((num_batches - self.epoch_batches) / self.accumulation_steps)
                further = (num_epochs - 1) * math.ceil(num_batches / self.accumulation_steps)
                self.total_steps = self.step + rest + further
            last_epoch = self.epoch + num_epochs
            while self.epoch < last_epoch and not self._stopping.is_set():
                for batches, data_wait_s in self._windows(loader):
                    with _interrupt_after():
                        history.append(self.train_step(batches, data_wait_s=data_wait_s))
                        self._emit_event("step", history[-1])
                    if self._stopping.is_set():
                        return history
                self._emit_event("epoch", {"epoch": self.epoch, "num_steps": self.step})
                self.epoch, self.epoch_batches = self.epoch + 1, 0
                if eval_loader is not None:
                    self._emit_event("eval", self.evaluate(eval_loader))
        return history

    def stop(self) -> None:
        """End `fit` after the step in hand; safe to call from any thread."""
        self._stopping.set()

    @torch.no_grad()
    def evaluate(self, loader: Iterable[Batch], *, num_candidates: int = 32) -> StepValues:
        """Measure on held-out samples; how they are batched matters only to a `LossModel` with a loss of that kind.

        Args:
            num_candidates: size of the candidate sets behind `loss`.

        Returns:
            The values of an `eval` event: `loss`, the contrastive loss of each pair among a fixed number of
            candidates, or a `LossModel`'s own loss; and recall at k both ways over all pairs, where the model gives
            embeddings (CLIP does).

        Raises:
            DataError: retrieval without a single pair.
        """
        started = self._clock()
        self.model.eval()
        total, count, num_samples = 0.0, 0, 0
        parts, logit_scale = [], torch.ones(())
        for held_out in loader:
            batch = held_out.to(self.device)
            with self.precision.autocast():
                output = self.model(batch)
            num_samples += len(batch)
            if isinstance(self.model, LossModel):
                num_terms = int(self.model.num_terms(batch))
                total, count = total + float(output.loss) * num_terms, count + num_terms
                if getattr(output, "image_embeds", None) is not None:
                    parts.append(of_pairs(batch, output.image_embeds, output.text_embeds))
            else:
                parts.append(of_pairs(batch, output.image_embedding, output.text_embedding))
                logit_scale = output.logit_scale
        measured = {}
        if parts:
            embeddings = joined(parts)
            measured = {
                **recalls(embeddings),
                "loss": candidate_loss(embeddings, logit_scale, num_candidates=num_candidates),
            }
        if isinstance(self.model, LossModel):
            measured["loss"] = total / count if count else math.nan
        return {
            "epoch": self.epoch,
            "num_samples": num_samples,
            "eval_s": self._clock() - started,
            **measured,
        }

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero at `total_steps`; `lr` throughout where there is no schedule."""
        if self.total_steps is None:
            return self.lr
        num_warmup = math.ceil(self.warmup_ratio * self.total_steps)
        if step < num_warmup:
            return self.lr * (step + 1) / num_warmup
        progress = min(1.0, (step - num_warmup) / max(1, self.total_steps - num_warmup))
        return self.lr * 0.5 * (1 + math.cos(math.pi * progress))

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on bitwise; `torch.load(..., weights_only=True)` can read it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "precision": self.precision.state_dict(),
            "progress": {name: getattr(self, name) for name in _PROGRESS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.precision.load_state_dict(state["precision"])
        for name in _PROGRESS:
            setattr(self, name, state["progress"][name])

    def description(self) -> StepValues:
        """What a `start` event says of the trainer."""
        return {
            "objective": " + ".join(self.objectives),
            "precision": self.precision.name,
            "device": str(self.device),
            "seed": self.seed,
            "accumulation_steps": self.accumulation_steps,
            "num_steps": self.total_steps,
            "num_parameters": sum(weight.numel() for weight in self.parameters),
        }

    def _emit_event(self, kind: str, values: StepValues) -> None:
        self._emit(RunEvent(kind, self.step, 0, time.time(), values))

    def _windows(self, loader: Iterable[Batch]) -> Iterator[tuple[list[Batch], float]]:
        """Windows of micro-batches, the last one shorter where need be, each with the time spent waiting for it."""
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
        started = time.perf_counter()
        self._seed(-1 - self.epoch)  # a loader may draw its order from torch's generator
        batches = islice(iter(loader), self.epoch_batches, None)
        while window := list(islice(batches, self.accumulation_steps)):
            yield window, time.perf_counter() - started
            started = time.perf_counter()

    def _start_step(self) -> float:
        """Seed, set the learning rate and start the clock."""
        started = self._clock()
        self._seed(self.step)
        if not self.model.training:
            self.model.train()
        lr = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        return started

    def _seed(self, moment: int) -> None:
        """Seed torch's generators for one step (from 0) or one epoch's order (below 0)."""
        key = np.random.SeedSequence([self.seed, abs(moment), moment < 0]).generate_state(1, np.uint64)
        torch.default_generator.manual_seed(int(key[0]))
        if self.device.type == "cuda":
            torch.cuda.manual_seed_all(int(key[0]))

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _peak(self) -> StepValues:
        if self.device.type == "cuda":
            peak_bytes = torch.cuda.max_memory_allocated(self.device)
            return {"peak_bytes": peak_bytes, "memory_source": "torch allocator"}
        return {"peak_bytes": process_rss_bytes(), "memory_source": "process RSS"}


_PROGRESS = ("step", "epoch", "epoch_batches", "num_samples", "total_steps")


def _objectives(model: nn.Module, asked: Sequence[str] | Mapping[str, Objective]) -> dict[str, Objective]:
    if isinstance(model, LossModel):
        return {"own": OwnLoss(model)}
    if isinstance(asked, Mapping):
        return dict(asked)
    unknown = next((name for name in asked if name not in OBJECTIVES), None)
    if unknown is not None:
        raise unknown_name("objective", unknown, OBJECTIVES)
    return {name: OBJECTIVES[name]() for name in asked}


@contextmanager
def _interrupt_after() -> Iterator[None]:
    """Hold back an interrupt from the keyboard until the block is done (signals reach the main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[tuple[int, Any]] = []
    previous = signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received and callable(previous):
        previous(*received[0])
