"""The options of `mmlab bench parallel`, from which the command line makes its flags: needs no torch to be listed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mmlab.errors import OptionError, check_name, check_numbers
from mmlab.machine import num_usable_cores, resolve_device

ALONE = ("one core", "single")  # strategies of one process


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Sizes of the benchmark, the same for every strategy.

    Raises:
        OptionError: a value that cannot work; the message names it.
    """

    ranks: Annotated[int, "processes; on CUDA one a GPU"] = 2
    model: Annotated[str, "preset: tiny, small, base, resnet18 or resnet50"] = "small"
    batch_size: Annotated[int, "samples a step, over all ranks"] = 16
    micro_batches: Annotated[int, "of a step, in each process"] = 1
    image_side: Annotated[int, "pixels"] = 128
    num_tokens: Annotated[int, "of every text"] = 32
    steps: Annotated[int, "timed in a row, after one that is not timed"] = 4
    rounds: Annotated[int, "turns of every strategy; figures are medians"] = 3
    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto"
    precision: Annotated[str, "of the training: fp32, tf32, bf16 or fp16"] = "fp32"
    seed: Annotated[int, "of all that is drawn"] = 0

    def __post_init__(self) -> None:
        import torch

        from mmlab.model.presets import PRESETS
        from mmlab.training.precision import Precision

        object.__setattr__(self, "device", resolve_device(self.device).partition(":")[0])
        check_numbers(self)
        smallest = 2 * self.ranks * self.micro_batches
        for name, bound in {"ranks": 2, "batch_size": smallest}.items():
            if (found := getattr(self, name)) < bound:
                raise OptionError(f"{name} must be at least {bound}, found {found}")
        check_name("model preset", self.model, PRESETS)
        if self.batch_size % (self.ranks * self.micro_batches):
            raise OptionError(
                f"batch_size must be divisible by the {self.ranks} ranks' micro-batches, found {self.batch_size}"
            )
        if self.device == "cuda" and self.ranks > torch.cuda.device_count():
            raise OptionError(f"{self.ranks} ranks need a GPU each, found {torch.cuda.device_count()}")
        Precision(self.precision, self.device)

    def num_threads(self, name: str) -> int:
        """Threads per process of a strategy: the total is the same for every strategy except `one core`."""
        threads = max(1, num_usable_cores() // self.ranks)
        return threads * self.ranks if name == "single" else threads
