"""A rank of a training run that a signal makes fail, in one of several ways."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType

from torch import distributed

from mmlab.cli.main import main
from mmlab.model.fusion_model import FusionModel, FusionOutput
from mmlab.parallel.branch import BranchStrategy
from mmlab.parallel.launches import join
from mmlab.pricing.virtual_device import VirtualDevice
from mmlab.types import Batch

WAYS = ("stopped", "stuck", "memory", "disk", "branch", "sharing", "sharded", "evaluating")
HANGING = ("stopped", "stuck", "branch", "sharing")  # rank 1 does not end by itself
TIMEOUT_S = 5
_FORWARD = FusionModel.forward


def train_until_it_fails(config: Path, runs: Path, way: str) -> None:
    """Train as rank 0 or 1, by the command; SIGUSR1 makes it fail. Its stderr goes into a file of the run."""
    rank = int(os.environ["RANK"])
    device = VirtualDevice()

    def fail(number: int, frame: FrameType | None) -> None:
        if way == "memory":
            device.limit_bytes = 1
        elif way == "sharing":  # stopped when the other rank next waits for its weights, before an evaluation
            BranchStrategy.gather_weights = stop_here  # type: ignore[method-assign]
        elif way == "sharded":  # in the forward pass, while the other rank waits for this one's weights
            FusionModel.forward = fail_here  # type: ignore[method-assign]
        elif way == "evaluating":
            FusionModel.forward = fail_in_evaluation  # type: ignore[method-assign]
        else:
            replace_open_file(
                runs / way / f"events-rank{rank}.jsonl",
                hanging_file() if way == "stuck" else os.open("/dev/full", os.O_WRONLY),
            )

    signal.signal(signal.SIGUSR1, fail)
    os.dup2(os.open(runs / f"{way}-{rank}.stderr", os.O_WRONLY | os.O_CREAT), 2)
    arguments = ["train", str(config), "--runs", str(runs), "--set", f"name={way}"]
    for change in ("trainer.num_epochs=100000", "checkpoint.every_steps=1000"):
        arguments += ["--set", change]
    if way in HANGING:
        arguments += ["--set", f"parallel.timeout_s={TIMEOUT_S}"]
    if way in ("branch", "sharing"):
        arguments += ["--set", "parallel.strategy=branch"]
    if way in ("sharded", "evaluating"):
        arguments += ["--set", "parallel.strategy=fsdp"]
    with device if way == "memory" and rank else nullcontext():
        os._exit(main(arguments))


def wait_for_one_that_never_joins(away: Path) -> None:
    """Rank 1 meets rank 0 and then stays away from the group, for which rank 0 waits in torch's code."""

    def stay_away(*_: object, **__: object) -> None:
        away.touch()
        time.sleep(600)

    if os.environ["RANK"] == "1":
        distributed.init_process_group = stay_away  # type: ignore[assignment]
    join("gloo", timeout_s=600)


def stop_here(strategy: BranchStrategy) -> None:
    """In the place of a method: no sign of life from here on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def fail_here(model: FusionModel, batch: object) -> None:
    """In the place of a method: an error of this rank's own."""
    raise ValueError("an odd batch")


def fail_in_evaluation(model: FusionModel, batch: Batch) -> FusionOutput:
    """In the place of a method: memory runs out, in an error without a type of its own."""
    if not model.training:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")
    return _FORWARD(model, batch)


def hanging_file() -> int:
    """A descriptor on which writing never ends, as to a file system that does not answer any more: a full pipe's."""
    _, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    return writer


def replace_open_file(file: Path, by: int) -> None:
    """Let what this process writes into a file that it has open go elsewhere from now on."""
    for descriptor in Path("/proc/self/fd").iterdir():
        if descriptor.exists() and descriptor.resolve() == file.resolve():
            os.dup2(by, int(descriptor.name))
