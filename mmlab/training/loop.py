"""The training loop: windows, forward, losses, backward, clip, step, schedule and evaluation.

`FusionTrainer.fit` reads windows of micro-batches and calls `train_step`, which leaves the window's gradient
in the weights, clips it and updates them; `micro_step` is forward, losses and backward of one micro-batch.
The rest is in other modules: `split` runs a window, again in parts if memory ran out, `strategy` shares it
with other devices, `step_meter` measures, and `setup` makes the trainer's parts and saves its state.

The gradient of a step is that of the window's samples taken together: each objective's sum is divided by its count over
the whole window, also in the last, shorter one. (A contrastive loss still finds its negatives inside each micro-batch,
of one rank or of all.) Dropout and negatives are drawn from generators seeded from (seed, step), so a resumed run draws
the same. Clocks are read after the device has finished.

Costs besides the model: AdamW's two moments a weight, a window of batches in host memory, two reads from the
device a step, of losses and gradient norms. It does not print: all output goes through `emit(event)` and
`Checkpoints`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any

from torch import Tensor

from mmlab.errors import DataError, MmlabError, OptionError, check_is, check_numbers
from mmlab.runs.control import Control
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.evaluation import Vocabulary, check_meaning
from mmlab.training.losses.base import LossTerms
from mmlab.training.losses.names import OWN, refuse_bare
from mmlab.training.randomness import RandomStream
from mmlab.training.setup import TrainerSetup
from mmlab.training.split import Window
from mmlab.training.step_meter import StepValues, predicted_cost
from mmlab.training.strategy import STEP
from mmlab.types import Batch

KEPT_STEPS = 10_000  # steps whose values `fit` returns


class FusionTrainer(TrainerSetup):
    """Trains a `FusionModel`, a module of your own that takes a `batch`, or any module whose forward returns `.loss`.

    Example: `FusionTrainer(model, lr=1e-3).fit(loader, num_epochs=3)`.

    Args:
        model: if the first argument of its forward is `batch`, it gets the `Batch`, and its output goes to the
            objectives; any other module is wrapped in `LossModel`.
        options: see `TrainOptions`; options given by name replace those.
        objectives: names, or objects by name, in place of the options'.
        weighting: a name, or a `Weighting`, in place of the options'.
        strategy: how devices share a step, see `mmlab.parallel.make_strategy`; None trains on one device.
        emit: called with each `RunEvent`, for example `RunLog(folder).emit`.
        memory: predicts a step's peak in bytes; the prediction is logged beside the measurement.
        live: counts live tensors during each step, exactly but slowly; needed to measure peaks on a CPU.

    Raises:
        OptionError: an unknown name, a number out of range, a device that is not there, or options that
            exclude each other.
    """

    def fit(
        self,
        loader: Iterable[Batch],
        *,
        num_epochs: int = 1,
        eval_loader: Iterable[Batch] | None = None,
        checkpoints: Checkpoints | None = None,
        control: Control | None = None,
    ) -> list[StepValues]:
        """Train for `num_epochs` epochs; after a resume within an epoch the first of them is the rest of that epoch.

        At each epoch's start `loader.set_epoch(epoch)` is called if it exists. `stop()`, or an interrupt from
        the keyboard, ends the loop after the current step or evaluation, with the trainer's state intact; the
        interrupt is then raised again. A second one ends it at once.

        Args:
            loader: gives the batches of one epoch each time it is iterated; it needs a length unless
                `total_steps` is given.
            eval_loader: evaluated after every epoch, and every `eval_every` steps within an epoch.
            checkpoints: saves when due, after every epoch, and when `stop()`, an interrupt, SIGTERM or SIGHUP ends the loop.
            control: pauses or stops the loop between two steps when a file asks for it; of several ranks,
                only rank 0 reads the file. Time spent in a pause is in no step's values.

        Returns:
            The values of the last 10,000 steps at most, in order. Events have them all.

        Raises:
            DataError: another number of ranks stopped in mid-epoch, and the loader cannot tell which samples are left.
            OptionError: an invalid `num_epochs`; a loader without a length; batches planned for another number of
                ranks; an epoch without a batch, or without anything to learn from; an `eval_loader` whose tokenizer
                has other words, or whose labels stand for other classes; pixels that the model normalises in another
                way than the data set's processor.
            RunError: as `train_step`.
        """
        if num_epochs != 0:  # a resumed run may have none left
            check_numbers({"num_epochs": num_epochs})
        check_is("checkpoints", checkpoints, "due", "Checkpoints(folder)", optional=True)
        self.vocabulary = Vocabulary.of(loader)
        check_meaning(self, loader)
        self._check_eval_loader(eval_loader)
        history: deque[StepValues] = deque(maxlen=KEPT_STEPS)
        eval_every = self.options.eval_every
        with self._stoppable(checkpoints, control) as should_stop:
            self._plan_schedule(loader, self.epoch + num_epochs)
            while self.epoch < self.last_epoch and not should_stop():
                learnt = self.epoch_batches > 0  # the rest of a resumed epoch may be one small batch
                for batches, data_wait_s, predicted in self._windows(loader):
                    values = self.train_step(batches, data_wait_s=data_wait_s) | predicted
                    self.epoch_batches += len(batches)
                    history.append(values)
                    learnt |= math.isfinite(values["loss"]) or self.options.on_nonfinite == "skip"
                    self._emit_event("step", values)
                    if eval_loader is not None and eval_every is not None and self.step % eval_every == 0:
                        self._evaluate_in_fit(eval_loader, self.options.eval_batches)
                    if hasattr(loader, "observe"):
                        loader.observe(values)
                    stopping = should_stop()
                    if stopping or (checkpoints and self.strategy.largest(float(checkpoints.due(self.step)))):
                        self._save(checkpoints, loader)
                    if stopping:
                        return list(history)
                if not self.epoch_batches:
                    raise OptionError(
                        f"the loader gave no batch in epoch {self.epoch}; give one that can be iterated anew for each"
                    )
                if not learnt:
                    raise OptionError(
                        f"all steps of epoch {self.epoch} were skipped, because no batch had anything to learn from; a "
                        "contrastive loss needs two images in a batch: raise batch_size or the budget"
                    )
                self._emit_event("epoch", {"epoch": self.epoch, "num_steps": self.step})
                self.epoch, self.epoch_batches = self.epoch + 1, 0
                found = {} if eval_loader is None else self._evaluate_in_fit(eval_loader)
                self._save(checkpoints, loader, found)
        return list(history)

    def train_step(self, batches: Sequence[Batch], *, data_wait_s: float = 0.0) -> StepValues:
        """One optimizer step over a window of micro-batches, which may be on the CPU.

        A micro-batch without anything to learn from (every count zero) is left out, and a window of such batches is a
        skipped step. The states of torch's generators do not change.

        Args:
            data_wait_s: time spent waiting for the batches, to be reported and counted into `step_s`.

        Returns:
            The values of a `step` event.

        Raises:
            OptionError: no batch, or something else than a `Batch`.
            RunError: under `on_nonfinite="raise"` the loss, or the gradient unless fp16 scales the loss, is
                not finite; the weights are as before the step.
        """
        kinds = [type(batch) for batch in batches] if isinstance(batches, Sequence) else []
        if not kinds or not all(issubclass(kind, Batch) for kind in kinds):
            raise OptionError(f"a step takes a list of Batch, as loaders give, found {kinds or batches}")
        self.meter.begin()
        lr, num_failures = self._begin_step(), self.num_out_of_memory
        weights, norms = self.weighting.weights(), None
        with self.random, self.meter.live or nullcontext(), self.precision.kernels():
            window = Window(self, batches, weights)  # counts what there is to learn, before any forward pass
            if self.meter.live is not None:
                self.meter.live.add(*(tensor for batch in window.learnable for tensor in batch.tensors()))
            if self.weighting.wants_grad_norms(self.step + 1):
                norms = self._norms_by_objective(window)
            means = self._gradient(window)
            loss = sum(weights[name] * mean for name, mean in means.items()) if means else math.nan
            if not math.isfinite(loss):  # its gradient may look sound all the same
                self.model.zero_grad(set_to_none=True)
            result = self.precision.clip_and_step(
                self.optimizer,
                self._parts,
                self.options.max_grad_norm,
                norms_of=self.strategy.part_norms,
                retry=self.retry,
            )
        if means and (not math.isfinite(loss) or (result.skipped and not self.precision.scales)):
            self._not_finite(window, means, result)
        self.step += 1
        self.num_samples += sum(map(len, batches))
        self.weighting.update(self.step, means, norms)
        return {
            "epoch": self.epoch,
            "lr": lr,
            "loss": loss,
            **self.meter.end(window, batches, means, result, data_wait_s=data_wait_s),
            "num_out_of_memory": self.num_out_of_memory - num_failures,
            **self.strategy.step_values(),
        }

    def micro_step(self, batch: Batch, number: int, terms: LossTerms) -> None:
        """Add the gradient of one micro-batch to that of the weights.

        Args:
            number: of the micro-batch in its window, from 1.
            terms: the losses are added to it; its counts are those of the whole window, so that a sum divided
                by them is the micro-batch's share of the window's mean.
        """
        batch = batch.to(self.device)
        loss = self.strategy.forward(lambda: self.loss(self.forward(batch), batch, number, terms))
        self.backward(loss)

    def forward(self, batch: Batch) -> Any:
        """The model's output."""
        self.phase = "forward"
        with self.precision.autocast():
            output = self._call(batch)
        refuse_bare(output, self.model, self.objectives)
        return output

    def loss(self, output: Any, batch: Batch, number: int, terms: LossTerms) -> Tensor:
        """The micro-batch's share of the window's loss."""
        # a model's own loss draws only dropout, which must differ from part to part
        if OWN not in self.objectives:
            self.seed(number)
        with self.precision.autocast():
            return terms.add({name: goal(output, batch) for name, goal in self.goals.items()})

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradient to that of the weights."""
        self.phase = "backward"
        self.precision.backward(loss)

    def _begin_step(self) -> float:
        """Put the model into training mode and set the learning rate, which is returned."""
        self.strategy.note(self.step, STEP)
        self.strategy.begin_step()
        self.optimizer.zero_grad(set_to_none=True)  # a step that failed may have left its gradient
        if not self.model.training:
            for module in self.trained_modules or self.model.modules():
                module.training = True
        lr = self.learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _gradient(self, window: Window) -> dict[str, float]:
        """Leave the window's gradient in the weights; returns the objectives' means."""
        try:
            return self.strategy.gradient(window)
        except BaseException as error:
            if max(window.num_parts, default=1) > 1 and not isinstance(error, MmlabError):
                error.add_note("while a batch that had run out of memory ran again in parts")
            window.reset()
            raise

    def _norms_by_objective(self, window: Window) -> dict[str, float]:
        """L2 norm of the gradient of each objective's mean, without the other objectives."""
        norms = {}
        for name in self.objectives:
            alone = window.weighted({each: float(each == name) for each in self.objectives})
            means = self._gradient(alone)
            if name in means:  # else it has no gradient, which is not the same as a small one
                total = math.hypot(*self.retry(lambda: self.strategy.part_norms(self._parts)).values())
                norms[name] = total / self.precision.scaler.get_scale()
            alone.reset()
        return norms

    def _windows(self, loader: Iterable[Batch]) -> Iterator[tuple[list[Batch], float, dict[str, float]]]:
        """Windows of micro-batches, of which the last may be shorter.

        Yields:
            A window, the seconds waited for it, and its `predicted_cost` in the loader's plan.
        """
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(self.epoch)
            if self.options.total_steps is None and not self.epoch_batches:  # epochs differ in length
                self._set_length(loader, self.last_epoch, stretches=True)
        started = time.perf_counter()
        loader_skips = getattr(loader, "start_batch", 0) > 0  # it skips the batches that are done itself
        if self.epoch_batches and not loader_skips and self._num_ranks_changed:
            raise DataError(
                "the checkpoint was written by another number of ranks in mid-epoch, and this loader cannot tell which "
                "samples are left; use PlannedLoader, or as many ranks as before"
            )
        with self._order:
            self._order.seed(self._stream(-1 - self.epoch))
            batches = islice(iter(loader), 0 if loader_skips else self.epoch_batches, None)
        while True:
            self.strategy.note(self.step, "waiting for data")
            with self._order:
                window = list(islice(batches, self.options.accumulation_steps))
            if not window:
                return
            waited_s = time.perf_counter() - started
            yield window, waited_s, predicted_cost(loader, self.epoch_batches, len(window))
            started = time.perf_counter()

    def _evaluate_in_fit(self, loader: Iterable[Batch], num_batches: int | None = None) -> StepValues:
        """Evaluate on the first batches or all, and emit the event."""
        with RandomStream([self.device]):
            measured = self.evaluate(islice(loader, num_batches))
        self._emit_event("eval", measured)
        return measured
