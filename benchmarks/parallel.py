"""Strategies of parallel training side by side: throughput, traffic, memory, overlap of branches, balance of ranks.

    python benchmarks/parallel.py [--quick] [--only PART] [--json FILE | --out DIR]

Four parts. `strategies`: `mmlab bench parallel` with every strategy, and other projects' data parallel loops where they
are installed; beside them what was predicted, and the error. `article`: the same with ResNet-50 and BERT, the setting of
the claim of 40 % more parallelism. `extrapolate`: four ranks, predicted from what two showed. `balance`: what the ranks
of one step wait for each other, with batches of a budget; measured with two ranks, by the plan with eight. Ranks are
processes, and every strategy has as many threads in all; with more ranks than cores they share them, and the rows say so.
Every repetition is kept. `--quick` is too small to tell strategies apart.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from _common import add_common_options, goal, print_goals, write_if_asked
from _parallel_balance import measure_balance
from _parallel_figure import draw
from _parallel_overlap import overlap, timed_branch
from _parallel_peers import peers
from _parallel_winners import winners

from mmlab.parallel.bench import bench_parallel
from mmlab.parallel.bench_report import DEVICES, ParallelBench
from mmlab.parallel.predict import STRATEGIES, Line, StepCosts, predict
from mmlab.runs.figures import save_figure

SMALL: dict[str, Any] = {"model": "small", "batch_size": 8, "image_side": 128, "num_tokens": 32}
ARTICLE: dict[str, Any] = {"model": "resnet50", "batch_size": 4, "image_side": 224, "num_tokens": 32}
QUICK: dict[str, Any] = {
    "model": "tiny",
    "batch_size": 8,
    "image_side": 32,
    "num_tokens": 16,
    "steps": 1,
    "rounds": 1,
}


def main() -> None:
    """Run every part, print tables and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "parallel", out=" and DIR/../../docs/images/parallel.png")
    parser.add_argument("--only", choices=list(PARTS), help="one part")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, measure in PARTS.items():
        if options.only in (None, name):
            rows += measure(options)
    goals = judge(rows)
    print()
    print_goals(goals)
    write_if_asked(options, "parallel", rows, goals)


def strategies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every strategy, and peers."""
    sizes = QUICK if options.quick else {**SMALL, "steps": 2, "rounds": 3}
    names = ["single", "ddp", "fsdp", "branch", "reduce", *peers()]
    bench = bench_parallel(names, device=options.device, more={**peers(), "branch": timed_branch}, **sizes)
    print(bench, flush=True)
    if options.out and not options.quick:
        save_figure(draw(bench), str(options.out.parents[1] / "docs/images/parallel.png"))
    return _rows("strategies", bench)


def article(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The article's encoders, each branch by itself and both at once."""
    sizes = {**QUICK, "model": "resnet18"} if options.quick else {**ARTICLE, "steps": 1, "rounds": 5}
    more = {"branch": timed_branch}
    bench = bench_parallel(["single", "ddp", "branch"], device=options.device, more=more, **sizes)
    print("", bench, sep="\n", flush=True)
    return _rows("article", bench)


def extrapolate(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Four ranks, predicted from two, whose compute is scaled by the ranks that share a core."""
    sizes = QUICK if options.quick else {**SMALL, "steps": 2, "rounds": 2}
    names = ["reduce", "ddp", "fsdp"]
    few = bench_parallel(names, ranks=2, device=options.device, **sizes)
    many = bench_parallel(names, ranks=4, device=options.device, **sizes)
    print("", many, sep="\n", flush=True)
    busy = [bench.options.ranks * bench.options.num_threads("ddp") for bench in (few, many)]
    slower = busy[1] / busy[0]  # by the cores that ranks share
    rows = _rows("extrapolate", many)
    for row in rows:
        if row["kind"] == "strategy" and row["predicted_s"]:
            found = predict(
                row["strategy"],
                slowed(few.costs, max(1.0, slower)),
                few.network,
                num_devices=4,
                **many.sizes,
            )
            row |= {"from_two_s": found.step_s, "from_two_error": found.step_s / row["step_s"] - 1}
            print(f"{row['strategy']}: from two ranks {found.step_s:.3f} s, measured {row['step_s']:.3f} s")
    return rows


def slowed(costs: StepCosts, factor: float) -> StepCosts:
    """The same on devices that take `factor` times as long."""

    def scaled(lines: Mapping[str, Line]) -> dict[str, Line]:
        return {part: Line(factor * line.fixed_s, factor * line.each_s) for part, line in lines.items()}

    return replace(
        costs,
        forward=scaled(costs.forward),
        backward=scaled(costs.backward),
        optimizer_s=factor * costs.optimizer_s,
        other_s=factor * costs.other_s,
    )


def balance(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Batches of a budget and fixed ones, shared by ranks."""
    rows = measure_balance(num_steps=4 if options.quick else 24)
    for row in rows:
        print(
            ", ".join(f"{name} {_shown(value)}" for name, value in row.items() if not isinstance(value, list))
        )
    return rows


PARTS = {"strategies": strategies, "article": article, "extrapolate": extrapolate, "balance": balance}


def judge(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every goal beside what was measured."""
    goals = []
    for row in rows:
        if row["kind"] == "strategy" and row["overlap_ratios"] and row["part"] != "extrapolate":
            ratio = float(np.median(row["overlap_ratios"]))
            name = f"{row['strategy']} ({row['model']}): share of the shorter branch that overlaps"
            goals.append(goal(name, ">= 0.85", ratio, ratio >= 0.85))
            alone = next(
                other
                for other in rows
                if (other.get("part"), other.get("strategy")) == (row["part"], "one core")
            )
            apart = max(
                abs(one - other)
                for one, other in zip(np.ravel(row["losses"]), np.ravel(alone["losses"]), strict=True)
            )
            name = f"branch ({row['model']}): losses of every step against one core"
            goals.append(goal(name, "0", float(apart), apart == 0))
        if row["kind"] == "balance" and row["scheduler"] == "budget":
            if row["num_ranks"] == 2:
                found = row["measured_imbalance"]
                goals.append(
                    goal("step-time imbalance of 2 ranks, measured", "<= 0.03", found, found <= 0.03)
                )
            if row["num_ranks"] == 8:
                found = row["planned_imbalance"]
                goals.append(
                    goal("step-time imbalance of 8 ranks, by the plan", "<= 0.05", found, found <= 0.05)
                )
            found = row["padded_over_useful"]
            goals.append(
                goal(f"padded over useful work, {row['num_ranks']} ranks", "<= 1.25", found, found <= 1.25)
            )
    return goals


def _rows(part: str, bench: ParallelBench) -> list[dict[str, Any]]:
    """One row a strategy, then one with the model."""
    document = bench.as_dict()
    same = {"part": part, "model": bench.options.model, "num_ranks": bench.options.ranks}
    rows = []
    for row in document.pop("rows"):
        by_rank = row.pop("values")
        row["losses"] = [[step["loss"] for step in turn] for turn in by_rank[0]]
        row["overlap_ratios"] = []
        if "spans" in by_rank[0][0][0]:
            turns = ([[span for step in turn for span in step["spans"]] for turn in rank] for rank in by_rank)
            row["overlap_ratios"] = [overlap(image, text) for image, text in zip(*turns, strict=True)]
        rows.append({"kind": "strategy", **same, **row})
    names = [name for name in STRATEGIES if name == "single" or name in bench.turns]
    document["winners"] = {
        str(count): winners(bench.costs, bench.network, names, num_devices=count, **bench.sizes)
        for count in DEVICES[1:]
    }
    return [*rows, {"kind": "model", **same, **document}]


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
