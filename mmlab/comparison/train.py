"""One training run from a configuration: read, plan, train, evaluate, save; or resume an earlier run.

A run is a folder: `config.toml`, `tokenizer/`, `checkpoints/` and an events file for each rank. Under
`torchrun`, every rank trains on its share of each plan, or trains its branch of the model.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed, nn

from mmlab.comparison import preparation
from mmlab.comparison.config import RunConfig, changed_options, load_config
from mmlab.comparison.options import LoaderOptions, names_of
from mmlab.comparison.plan import LIMIT, MEMORY, RunPlanner, planned_steps
from mmlab.comparison.run import Run
from mmlab.data.text import load_tokenizer
from mmlab.errors import DataError, OptionError, check_is
from mmlab.loading.loader import PlannedLoader
from mmlab.machine import progress_bar, replace_file
from mmlab.model.conversation_model import ConversationModel
from mmlab.model.presets import build_model
from mmlab.parallel.faults import RankWatch, broke_off
from mmlab.parallel.launch import run_on_ranks
from mmlab.parallel.launches import LAUNCH, begun_by_this_launch, joined, note_launch, was_restarted
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.strategies import make_strategy
from mmlab.runs.events import EVENT_FILES, RunEvent
from mmlab.runs.folders import TIME_MODEL, exclusive_folder, move_earlier_aside, put_back_if_refused
from mmlab.runs.follow import RunState
from mmlab.runs.summaries import summarize
from mmlab.training.checkpoint.files import MANIFEST, check, read_checkpoint
from mmlab.training.checkpoint.keeping import Checkpoints, restore
from mmlab.training.loop import FusionTrainer
from mmlab.training.losses.names import parse_objectives
from mmlab.training.strategy import CollectiveFailed

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerBase

_BAR = "{l_bar}{bar}| {elapsed}<{remaining}{postfix}"
_CONFIG, _CHECKPOINTS, _TOKENIZER = "config.toml", "checkpoints", "tokenizer"
_MODEL = "model"  # a vision-language model and its processor
_GIVE = "give a checkpoint's folder, or a folder of checkpoints"
_WRITTEN = (_CONFIG, _CHECKPOINTS, _TOKENIZER, _MODEL, MEMORY, TIME_MODEL, LIMIT, LAUNCH, EVENT_FILES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of a finished or stopped run."""

    folder: str
    status: str  # done, or stopped before the last epoch
    resumed_from: str | None  # checkpoint
    num_steps: int  # of the whole run, those before a resume included
    num_epochs: int
    loss: float | None  # of this process's last step
    evaluation: Mapping[str, Any]  # values of the last `eval` event
    best_checkpoint: str | None

    def __str__(self) -> str:
        shown = {"loss": "loss {:.4g}", "image_to_text_r1": "R@1 image > text {:.1%}"}
        shown |= {"text_to_image_r1": "text > image {:.1%}", "chance_r1": "chance {:.1%}"}
        values = self.evaluation
        found = ", ".join(text.format(values[key]) for key, text in shown.items() if key in values)
        stopped = "stopped after " if self.status == "stopped" else ""
        more = {"resumed from": self.resumed_from, "held out:": found}
        more["best checkpoint:"] = self.best_checkpoint
        epochs = f"{self.num_epochs} epoch{'s' * (self.num_epochs != 1)}"
        head = f"{self.folder}: {stopped}{epochs}, {self.num_steps} steps"
        return "\n  ".join([head, *(f"{name} {value}" for name, value in more.items() if value)])


def train(
    config: RunConfig | str | Path, *, runs: str | Path = "runs", resume: str = "never", progress: bool = True
) -> TrainingResult:
    """Train as configured, in the folder `runs`/NAME.

    An interrupt, or SIGTERM or SIGHUP if its handler raises, ends the run after the current step with a checkpoint. So
    does `mmlab.runs.control.send(folder, "stop")`, on which `train` returns; `"pause"` and `"resume"` pause
    it and let it continue. A run that `torchrun` restarts resumes from its newest checkpoint, whatever
    `resume` says.

    Args:
        config: a configuration, or the path of its file.
        resume: `auto` resumes from the newest complete checkpoint in the folder, if there is one; `never`
            starts anew and moves an earlier run's files to `previous-N`; else a checkpoint, or a folder of
            them, to resume from.

    Raises:
        DataError: data or checkpoint cannot be used.
        OptionError: an option cannot work, or another run is using the folder.
        RunError: training failed, here or on a rank that is named.
    """
    config = config if isinstance(config, RunConfig) else load_config(config)
    check_is("resume", resume, str | Path, "a path, 'auto' or 'never'")
    with ExitStack() as stack:
        ranks = joined(config.trainer.device, config.parallel.timeout_s)
        rank, world_size, device = stack.enter_context(ranks)
        folder, restarted = Path(runs) / config.name, was_restarted()
        if rank == 0:
            stack.enter_context(exclusive_folder(folder))
            stack.enter_context(put_back_if_refused(folder, _WRITTEN, begun=_CONFIG))
            _prepare_folder(folder, resume, restarted=restarted, say=progress)
        if world_size > 1:
            distributed.barrier()
        run = stack.enter_context(Run(folder, rank=rank))
        if world_size > 1:
            stack.enter_context(RankWatch(run.write, timeout_s=config.parallel.timeout_s))
        num_epochs, shown = config.trainer.num_epochs, progress and rank == 0
        bar = stack.enter_context(progress_bar(total=num_epochs, bar_format=_BAR, show=shown))
        training = _Training(config, folder, run, bar, device, world_size=world_size)
        return training.train(training.checkpoint_of(resume, restarted=restarted))


def train_on(
    config: RunConfig | str | Path,
    *,
    num_processes: int = 2,
    runs: str | Path = "runs",
    resume: str = "never",
) -> TrainingResult:
    """`mmlab.train` on several ranks of this machine; returns rank 0's result when all have finished.

    Args:
        num_processes: ranks; each has a GPU of its own where there are GPUs, else they share the cores.
        config, runs, resume: as for `train`.

    Raises:
        DataError, OptionError: the configuration cannot work; the message names the rank.
        RunError: a rank failed, or was killed.
    """
    config = config if isinstance(config, RunConfig) else load_config(config)
    return run_on_ranks(partial(train, config, runs=str(runs), resume=resume), num_processes=num_processes)[0]


def load_trained(folder: str | Path) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """The model of a run of `train` on pairs, in evaluation mode on the CPU, and its tokenizer.

    Loads the best checkpoint, or the newest if none was evaluated. (A vision-language model lies in the run's
    folder `model`, for `from_pretrained`.)

    Raises:
        DataError: there is no such run, or its checkpoint is damaged.
    """
    folder = Path(folder)
    if not (folder / _CONFIG).is_file():
        raise DataError(f"{folder}: no run of mmlab train there; a comparison keeps no models")
    config = load_config(folder / _CONFIG)
    checkpoints = Checkpoints(folder / _CHECKPOINTS, **dataclasses.asdict(config.checkpoint))
    path = checkpoints.best or checkpoints.newest()
    if path is None or config.processor is not None:
        raise DataError(f"{folder}: no checkpoint of a model of pairs (one of conversations is in `model`)")
    tokenizer = load_tokenizer(str(folder / _TOKENIZER))
    model = build_model(**config.model, vocab_size=len(tokenizer))
    try:
        model.load_state_dict(read_checkpoint(path)["model"])
    except RuntimeError as error:
        raise DataError(f"{path} is of another model than {folder / _CONFIG}; restore that") from error
    return model.eval(), tokenizer


def _prepare_folder(folder: Path, resume: str, *, restarted: bool, say: bool) -> None:
    """If the run starts anew, move aside an earlier run's files, and say so.

    Raises:
        DataError: there is nothing to resume from; the folder is as it was.
    """
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise DataError(f"{resume or 'an empty path'}: no checkpoint there; {_GIVE}")
    # the run's folder itself counts as well: it is a parent of what lies in it
    own = resume == "auto" or (resume != "never" and folder.resolve() in Path(resume, "_").resolve().parents)
    if not own and not begun_by_this_launch(folder / LAUNCH, restarted=restarted):
        move_earlier_aside(folder, _WRITTEN, say=say)
    note_launch(folder / LAUNCH)


class _Training:
    """The parts of a run: data, loaders, model, scheduler, trainer and checkpoints.

    Args:
        bar: counts epochs.
    """

    def __init__(
        self, config: RunConfig, folder: Path, run: Run, bar: tqdm, device: str, *, world_size: int
    ) -> None:
        self.config, self.folder, self._run, self._bar = config, folder, run, bar
        self._world_size = world_size
        options, data, progress = config.trainer, config.data, not bar.disable
        # a resumed run keeps its own tokenizer, whatever the texts are now
        self._kept = ProcessGroup(device).run_on_main(
            lambda: (folder / _TOKENIZER).is_dir() and any((folder / _CHECKPOINTS).glob("*")),
            doing="look for a tokenizer",
        )
        tokenizer = str(folder / _TOKENIZER) if self._kept else data.tokenizer
        data = dataclasses.replace(data, processor=config.processor, tokenizer=tokenizer)
        train_set, held_out_set = preparation.make_datasets(
            data.path, data, ratios=config.sampling.ratios, seed=options.seed, progress=progress
        )
        if config.parallel.strategy == "fsdp" and config.processor is not None and world_size > 1:
            from mmlab.parallel.fsdp import check_images  # 1.4 s to import

            check_images(train_set.sizes, held_out_set.sizes)
        model = preparation.make_model(config.model, train_set, seed=options.seed)
        objectives = parse_objectives(model, options.objectives, tokenizer=train_set.tokenizer)
        planning = RunPlanner(
            config, run, train_set, model, objectives, device=device, folder=folder, progress=progress
        )
        planner, weights, memory = planning.plan()
        bar.unpause()  # the time left is that of training
        loading: Any = {name: getattr(data, name) for name in names_of(LoaderOptions)} | {"emit": self._take}
        place = None if device == "cpu" else device
        self._loader = PlannedLoader(train_set, planner, device=place, augment=config.augment, **loading)
        self._loader.weights = weights
        # evaluation in mid-epoch takes the first batches only: random ones are a fair sample, sorted ones not
        order = "random" if options.eval_batches else "sorted"
        if run.rank != 0:  # all ranks read all held-out samples, and one of them tells which are bad
            loading["emit"] = lambda event: None
        self._held_out = preparation.held_out_loader(held_out_set, order, **loading)
        self.trainer = FusionTrainer(
            preparation.packed_if_planned(model, self._loader.plan, train_set),
            options,
            objectives=objectives,
            strategy=make_strategy(config.parallel),
            emit=self._take,
            memory=memory,
            device=device,
        )
        self._checkpoints = Checkpoints(
            folder / _CHECKPOINTS, emit=self._take, **dataclasses.asdict(config.checkpoint)
        )
        self._evaluation: Mapping[str, Any] = {}
        self._loss: float | None = None

    def checkpoint_of(self, resume: str, *, restarted: bool) -> Path | None:
        """The checkpoint to resume from; None where the run starts anew.

        Args:
            restarted: prefer the run's own newest checkpoint, if there is one, to that of `resume`.
        """
        ranks = self.trainer.strategy
        own = self._checkpoints.newest(ranks) if restarted or resume == "auto" else None
        if own is None and resume == "auto":
            self._say(f"no checkpoint in {self.folder}: the run starts anew")
        if own is not None or resume in ("auto", "never"):
            return own
        path = Path(resume)
        if (path / MANIFEST).exists():
            check(path, ranks)
            return path
        inside = path / _CHECKPOINTS
        if found := Checkpoints(inside if inside.is_dir() else path).newest(ranks):
            return found
        raise DataError(f"{path}: no checkpoint there; {_GIVE}")

    def train(self, start: Path | None) -> TrainingResult:
        """Train the epochs that remain, after the checkpoint `start` if one is given."""
        trainer, num_epochs, changed = self.trainer, self.config.trainer.num_epochs, ""
        if start is not None:
            changed = changed_options(start.resolve().parent.parent / _CONFIG, self.config)
            try:
                restore(trainer, self._loader, start)
            except (DataError, OptionError) as error:
                told = f"; options of that run (-) and of this one (+): {changed}" if changed else ""
                raise type(error)(f"{error}{told}") from error
        left = max(0, num_epochs - trainer.epoch)
        self._begin(left, changed)
        # close the loader: a rank that exits with live workers waits for them until its launcher kills it
        try:
            with closing(self._loader):
                self._run.fit(
                    trainer,
                    self._loader,
                    num_epochs=left,
                    eval_loader=self._held_out,
                    checkpoints=self._checkpoints,
                )
        except (KeyboardInterrupt, SystemExit):
            if saved := self._checkpoints.paths:
                self._say(f"stopped; to go on from {saved[-1]}, resume with auto")
            raise
        except Exception as error:
            # of a rank that failed inside an exchange: its own problem, unless another broke off the exchange
            cause = error.__cause__ if isinstance(error, CollectiveFailed) else error
            if (watch := RankWatch.current) is None or cause is None or not broke_off(cause):
                raise
            raise watch.explained(error) from error  # says which rank failed and broke off the exchange
        if not left:
            self._say(f"{self.folder}: all {trainer.epoch} epochs were done; nothing is left to train")
        if self._loss is None:  # no step was left
            state = RunState(self.folder)
            state.poll()
            self._loss, self._evaluation = summarize(state)["loss"], _finite(state.latest("eval"))
        self._save_model()
        best = self._checkpoints.best
        return TrainingResult(
            folder=str(self.folder),
            status="done" if trainer.epoch >= num_epochs else "stopped",
            resumed_from=None if start is None else str(start),
            num_steps=trainer.step,
            num_epochs=trainer.epoch,
            loss=self._loss,
            evaluation=self._evaluation,
            best_checkpoint=None if best is None else str(best),
        )

    def _begin(self, left: int, changed: str) -> None:
        """Write the start event, changed options, a tokenizer if there is none, and the configuration if epochs are left."""
        trainer, config, path = self.trainer, self.config, self.folder / _CONFIG
        self._run.step = trainer.step
        if self._run.rank == 0:
            if trainer.step and path.exists():
                with suppress(tomllib.TOMLDecodeError):  # a damaged file
                    kept = tomllib.loads(path.read_text("utf-8", errors="replace"))
                    seed = kept.get("trainer", {}).get("seed", 0)
                    if seed != config.trainer.seed:
                        raise OptionError(f"trainer.seed was {seed}, which held samples out: resume with it")
            if left and changed:
                told = f"resumed with other options than before: {changed}"
                self._take(RunEvent.now("warning", trainer.step, {"message": told, "source": "training"}))
            if config.processor is None and not self._kept:
                self._loader.dataset.tokenizer.save_pretrained(self.folder / _TOKENIZER)
            if left or not path.exists():
                replace_file(path, config.toml())
        machine = preparation.describe_machine(str(trainer.device))
        values = {
            "run_name": config.name,
            "scheduler": config.scheduler.get("name", "budget"),
            "model": config.model.get("name") or config.model.get("preset", "small"),
            **trainer.description(),
            **planned_steps(trainer, self._loader, config),
            "num_epochs": config.trainer.num_epochs,
            "device_name": machine["device_name"],
            "world_size": self._world_size,
            "config": {**dataclasses.asdict(config), "machine": machine},
        }
        self._run.start(trainer.step, **values)
        self._bar.initial = self._bar.n = self._epochs_done()

    def _save_model(self) -> None:
        """Save a vision-language model for `from_pretrained`; under fsdp only checkpoints hold it."""
        model, strategy = self.trainer.model, self.trainer.strategy
        if isinstance(model, ConversationModel) and strategy.rank == 0 and not strategy.saves_on_every_rank:
            for part in (model.module, self._loader.dataset.collator.processor):
                part.save_pretrained(self.folder / _MODEL)

    def _epochs_done(self) -> float:
        """Epochs done; the current one counts by the cost of its batches, since steps differ in time."""
        loader, plan = self._loader, self._loader.plan
        num_before, costs = len(loader) - len(plan), preparation.costs_of(plan)
        left = costs[max(0, self.trainer.epoch_batches - num_before) :].sum() / max(1.0, costs.sum())
        if num_before:  # on another number of ranks: the plan is that of the rest
            left *= self._world_size * len(plan.columns.order) / len(loader.dataset)
        return self.trainer.epoch + 1 - float(left)

    def _take(self, event: RunEvent) -> None:
        """Write an event and show it."""
        self._run.emit(event)
        values = event.values
        if event.kind == "step":
            if math.isfinite(values["loss"]):
                self._loss = values["loss"]
            if not self._bar.disable:
                told = "step {}, epoch {epoch}, loss {loss:.3f}, {samples_per_s:.0f} samples/s"
                self._bar.set_postfix_str(told.format(event.step, **values), refresh=False)
                self._bar.update(self._epochs_done() - self._bar.n)
        elif event.kind == "eval":
            self._evaluation = _finite(values)
            self._say(f"epoch {values['epoch']}: held-out loss {values['loss']:.4f}")
        elif event.kind == "warning":
            self._say(f"warning: {values['message']}")

    def _say(self, message: str) -> None:
        """Print a line that stays on the terminal."""
        if not self._bar.disable:
            self._bar.write(message, file=sys.stderr)


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if isinstance(value, int) or math.isfinite(value)}
