"""Strategies by name: the class that shares a step among the ranks that `torchrun` started."""

from __future__ import annotations

from mmlab.errors import OptionError
from mmlab.machine import place_of_process
from mmlab.parallel.branch import BranchStrategy
from mmlab.parallel.ddp import DDPStrategy
from mmlab.parallel.process_group import ProcessGroup
from mmlab.parallel.reduce import ParallelOptions, ReduceStrategy
from mmlab.training.strategy import Strategy


def make_strategy(options: str | ParallelOptions = "ddp") -> Strategy:
    """A strategy by name or by options, for the ranks that `torchrun` started; pass it to `FusionTrainer`.

    >>> make_strategy("ddp").world_size
    1

    Raises:
        OptionError: an unknown name, or ranks that `torchrun` started and that have not joined.
    """
    if isinstance(options, str):
        options = ParallelOptions(strategy=options)
    if ProcessGroup().world_size == 1:
        if (started := place_of_process()[1]) > 1:
            raise OptionError(
                f"the {started} ranks have not joined, so each would train a model of its own: call "
                "torch.distributed.init_process_group() first"
            )
        return Strategy()
    if options.strategy == "fsdp":
        from mmlab.parallel.fsdp import FSDPStrategy  # 1.4 s to import

        return FSDPStrategy(options)
    return {"reduce": ReduceStrategy, "ddp": DDPStrategy, "branch": BranchStrategy}[options.strategy](options)
