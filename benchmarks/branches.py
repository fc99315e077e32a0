"""Ways to place the branches of a model whose images take longer than its texts: simulated, and measured on two ranks.

    python benchmarks/branches.py [--quick] [--json FILE | --out DIR]

Two processes of one thread measure what each part of a step costs, and predict a step of each way. Then they take such
steps in turn: everything on one, a branch on each, the image branch cut where the prediction is best, and torch's own
pipeline. Same weights, samples and optimizer; the loss of the first step says whether they compute the same. Goals: the
ways come in the predicted order, and what moving layers gives over whole branches is what was predicted, within a
fifth. Every repetition is kept. Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from _branch_ways import CUT, ONE, PEER, TWO, Sizes, take_turns
from _common import add_common_options, goal, print_goals, write_if_asked
from _parallel_balance import VOCAB_SIZE
from _trainer_tables import table

from mmlab.parallel.launch import run_on_ranks

SIZES = Sizes("small", batch_size=4, num_micro_batches=6, image_side=224, num_tokens=16)
QUICK = Sizes("tiny", batch_size=4, num_micro_batches=4, image_side=64, num_tokens=8)


def main() -> None:
    """Plan, measure, print, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "branches")
    options = parser.parse_args()
    sizes, num_rounds = (QUICK, 2) if options.quick else (SIZES, 5)
    rows = measure(sizes, num_rounds)
    print(table_of(rows))
    goals = judge(rows)
    print()
    print_goals(goals)
    write_if_asked(options, "branches", rows, goals)


def measure(sizes: Sizes, num_rounds: int) -> list[dict[str, Any]]:
    """A row a way."""
    (plan, found), (_, other) = run_on_ranks(take_turns, sizes, num_rounds)
    one_s = median(found[ONE]["step_s"])
    planned = plan.step_s
    return [
        {
            "way": name,
            "image_layers": plan.image_layers if name == CUT else None,
            "step_s": median(taken["step_s"]),
            "speed_up": one_s / median(taken["step_s"]),
            "planned_s": planned.get(name),
            "planned_speed_up": planned[ONE] / planned[name] if name in planned else None,
            "first_loss": (other if name == PEER else found)[name]["losses"][0],
            "steps_s": taken["step_s"],
            **sizes._asdict(),
            "vocab_size": VOCAB_SIZE,
        }
        for name, taken in found.items()
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """As docs/internals/parallel_measured.md has it."""
    return table(
        ("way", "step, ms", "times one device", "planned, ms", "times one device, planned"),
        (
            (
                row["way"]
                if row["image_layers"] is None
                else f"{row['way']}, `image_layers = {row['image_layers']}`",
                f"{1e3 * row['step_s']:.0f}",
                f"{row['speed_up']:.2f}",
                "" if row["planned_s"] is None else f"{1e3 * row['planned_s']:.0f}",
                "" if row["planned_s"] is None else f"{row['planned_speed_up']:.2f}",
            )
            for row in rows
        ),
    )


def judge(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the plan promised, beside what was measured."""
    by_way = {row["way"]: row for row in rows}
    names = (ONE, TWO, CUT)
    planned = sorted(names, key=lambda name: by_way[name]["planned_s"])
    measured = sorted(names, key=lambda name: by_way[name]["step_s"])
    promised, gained = (by_way[TWO][key] / by_way[CUT][key] for key in ("planned_s", "step_s"))
    losses = [by_way[name]["first_loss"] for name in names]
    kept = 0.8 <= gained / promised <= 1.25
    return [
        goal("ways, the fastest first", ", ".join(planned), ", ".join(measured), planned == measured),
        goal("layers moved: gain over whole branches, to the plan's", "0.8 to 1.25", gained / promised, kept),
        goal("losses of the first step apart", "0", max(losses) - min(losses), len(set(losses)) == 1),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
