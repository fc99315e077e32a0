"""Run as a script: one run that goes on with another number of ranks, and perhaps another strategy, each time.

Takes the configuration, the folder of runs, and stages as JSON: [ranks, strategy, step to stop after or null]. ProcessGroup
write a line for every step: stage, epoch, step, learning rate and the samples' ids. Prints all lines, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from mmlab.comparison.config import load_config
from mmlab.comparison.train import train
from mmlab.training.loop import FusionTrainer
from tests.comparison.killed_while_training import ended, free_port


def begin(
    config: Path, runs: Path, stage: int, rank: int, port: int, options: tuple[int, str, int | None]
) -> int:
    """Start one rank; returns its process id."""
    num_ranks, strategy, stop_after = options
    process = os.fork()
    if process:
        return process
    torch.set_num_threads(1)
    if num_ranks > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    plain = FusionTrainer.train_step

    def noted(trainer, batches, **options):
        values = plain(trainer, batches, **options)
        ids = [record_id for batch in batches for record_id in batch.record_ids]
        if strategy == "branch" and rank:  # both see all samples; they count once
            ids = []
        line = [stage, values["epoch"], trainer.step, values["lr"], ids]
        with (runs / f"seen-{stage}-{rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        if trainer.step == stop_after:
            trainer.stop()
        return values

    FusionTrainer.train_step = noted
    changes = [f"parallel.strategy={strategy}"]
    train(load_config(config, changes), runs=runs, resume="auto", progress=False)
    os._exit(0)


def main(config: Path, runs: Path, stages: list[tuple[int, str, int | None]]) -> list[list]:
    runs.mkdir(exist_ok=True)
    for stage, options in enumerate(stages):
        port = free_port()
        codes = ended([begin(config, runs, stage, rank, port, options) for rank in range(options[0])])
        assert not any(codes), (stage, codes)
    files = sorted(runs.glob("seen-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))))
