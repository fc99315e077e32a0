"""`train_on`: `mmlab.train` on several ranks, from a notebook or a program."""

from __future__ import annotations

from pathlib import Path

from mmlab.comparison.config import RunConfig, load_config
from mmlab.comparison.train import TrainingResult, train
from mmlab.parallel.launch import run_on_ranks


def train_on(
    config: RunConfig | str | Path,
    *,
    num_processes: int = 2,
    runs: str | Path = "runs",
    resume: str = "never",
) -> TrainingResult:
    """`mmlab.train` on several ranks of this machine; returns when they have finished.

    Every rank writes its events beside those of rank 0, so `mmlab watch` and `LivePanel` follow them all.

    Args:
        config: a configuration, or the path of its file.
        num_processes: ranks; with GPUs one for each, else they share the cores.
        runs, resume: as for `train`.

    Returns:
        What rank 0 found.

    Raises:
        DataError, OptionError: what the configuration asks for cannot be done; the message names the rank.
        RunError: a rank failed, or was killed.
    """
    config = config if isinstance(config, RunConfig) else load_config(config)
    return run_on_ranks(_train, config, str(runs), resume, num_processes=num_processes)[0]


def _train(config: RunConfig, runs: str, resume: str) -> TrainingResult:
    return train(config, runs=runs, resume=resume)
