"""What it gives a training on a CPU that malloc keeps freed memory: seconds of an epoch, page faults and memory.

    python benchmarks/freed_memory.py [--quick] [--json FILE | --out DIR]

Two processes, one as mmlab sets malloc up and one with glibc's defaults, train the same model on the same planned
batches of generated scenes, in turns of one epoch. The batches are as large as random ones of 32 samples need, and twice
as large.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from _child import Child, answer_each_line
from _common import add_common_options, goal, print_goals, write_if_asked

KEPT, RETURNED = "kept (mmlab)", "returned (glibc's default)"
# a variable that is set, also an empty one, says that the user sets malloc up
WAYS = {KEPT: {"GLIBC_TUNABLES": None}, RETURNED: {"GLIBC_TUNABLES": ""}}
CASES = {("tiny", 2900): 10, ("tiny", 5800): 10, ("small", 2900): 4}  # model, padded tokens a batch: turns
NUM_IMAGES = {"tiny": 400, "small": 100}
MOST_MEMORY = 1.15  # times the memory of glibc's default


def train(folder: str, model: str, budget: float) -> None:
    """Answer every line with the seconds, the page faults a step and the most memory of one epoch."""
    import torch

    from mmlab.data.dataset import MultimodalDataset
    from mmlab.data.readers import read_records
    from mmlab.loading.loader import PlannedLoader
    from mmlab.model.presets import build_model
    from mmlab.schedule.schedulers import make_scheduler
    from mmlab.training.loop import FusionTrainer

    torch.manual_seed(0)
    dataset = MultimodalDataset(read_records(folder, progress=False), image_policy="aspect:80")
    trainer = FusionTrainer(
        build_model(model, vocab_size=len(dataset.tokenizer)), device="cpu", total_steps=10**6
    )
    loader = PlannedLoader(dataset, make_scheduler("budget", budget=budget))

    def epoch() -> str:
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        num_steps = len(trainer.fit(loader, num_epochs=1))
        elapsed_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        faults = (after.ru_minflt - before.ru_minflt) / num_steps
        return json.dumps(
            {"epoch_s": elapsed_s, "faults_a_step": faults, "rss_bytes": 1024 * after.ru_maxrss}
        )

    epoch()  # everything is new in the first
    answer_each_line(epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", nargs=3, help=argparse.SUPPRESS)
    add_common_options(parser, "freed_memory")
    options = parser.parse_args()
    if options.train:
        from mmlab.machine import share_cores

        share_cores()
        folder, model, budget = options.train
        train(folder, model, float(budget))
        return
    rows: list[dict[str, Any]] = []
    goals = []
    for (model, budget), num_turns in list(CASES.items())[: 1 if options.quick else None]:
        found = measure(
            model, budget, 2 if options.quick else num_turns, 100 if options.quick else NUM_IMAGES[model]
        )
        seconds = {way: [turn["epoch_s"] for turn in turns] for way, turns in found.items()}
        ratio = median(one / other for one, other in zip(seconds[RETURNED], seconds[KEPT], strict=True))
        memory = {way: max(turn["rss_bytes"] for turn in turns) for way, turns in found.items()}
        for way, turns in found.items():
            faults = median(turn["faults_a_step"] for turn in turns)
            row = {"model": model, "budget": budget, "freed_memory": way, "epoch_s": median(seconds[way])}
            rows.append({**row, "faults_a_step": faults, "rss_bytes": memory[way], "all": turns})
            print(
                f"{model:6} {budget:5} tokens, {way:26} {row['epoch_s']:6.2f} s an epoch, "
                f"{faults:6.0f} faults a step, {memory[way] / 2**20:6.0f} MiB"
            )
        print(f"{model:6} {budget:5} tokens, epochs of glibc's default take {ratio:.3f} times as long")
        case, grown = f"{model}, {budget} tokens", memory[KEPT] / memory[RETURNED]
        goals.append(goal(f"{case}: epochs of glibc's default / mmlab's", ">= 1", ratio, ratio >= 1))
        goals.append(
            goal(f"{case}: memory over glibc's default", f"<= {MOST_MEMORY}", grown, grown <= MOST_MEMORY)
        )
    print_goals(goals)
    write_if_asked(options, "freed_memory", rows, goals)


def measure(model: str, budget: int, num_turns: int, num_images: int) -> dict[str, list[dict[str, float]]]:
    """What each way found in each turn."""
    from mmlab.data.synthetic import make_dataset

    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        make_dataset(Path(folder) / "scenes", num_images=num_images, max_side=256, progress=False)
        arguments = [__file__, "--train", f"{folder}/scenes", model, str(budget)]
        children = {way: running.enter_context(Child(arguments, changes)) for way, changes in WAYS.items()}
        assert all(child.answer() == "ready" for child in children.values())
        for turn in range(num_turns):
            for way in list(WAYS)[:: 1 if turn % 2 else -1]:
                children[way].ask()
                found[way].append(json.loads(children[way].answer()))
    return found


if __name__ == "__main__":
    main()
