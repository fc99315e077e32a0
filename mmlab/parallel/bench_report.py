"""`ParallelBench`: what the strategies achieved, beside predictions for them and for more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mmlab.loading.stages import as_table
from mmlab.parallel.bench_options import ALONE, BenchOptions
from mmlab.parallel.predict import STRATEGIES, Network, StepCosts, predict

DEVICES = (1, 2, 4, 8, 16, 32, 64)
MIB = 2**20
_COLUMNS = (
    "strategy", "processes", "threads", "samples_per_s", "step_ms", "idle", "sent_mib", "memory_mib", "efficiency",
    "predicted_ms", "error",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParallelBench:
    """Every measurement, and what follows from it; printing it gives a table and the conclusion."""

    options: BenchOptions
    device: str
    num_cores: int
    costs: StepCosts  # of one device while all ranks compute
    network: Network  # between the ranks
    image_layers: int | None  # of the image rank of `branch`; None if the branch was left whole
    turns: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]  # by strategy, rank and round

    @property
    def sizes(self) -> dict[str, Any]:
        """What `predict` needs to know about the benchmark."""
        options = self.options
        return {
            "batch_size": options.batch_size / options.ranks,
            "num_micro_batches": options.micro_batches,
            "hides": options.device == "cuda",
        }

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per strategy: medians over rounds, what was measured, and what was predicted."""
        rows = [self._row(name) for name in self.turns]
        base = next((row for row in rows if row["devices"] == 1), None)
        for row in rows:
            ratio = base and row["samples_per_s"] / base["samples_per_s"]
            row["efficiency"] = ratio and ratio / row["devices"]
        return rows

    def _row(self, name: str) -> dict[str, Any]:
        options, ranks, is_cpu = self.options, self.turns[name], self.options.device == "cpu"
        threads, joins = options.num_threads(name), name not in ALONE
        # a step takes as long as on its slowest rank
        steps_s = np.array([[turn["steps_s"] for turn in rank] for rank in ranks]).max(0)  # (rounds, steps)
        step_s = float(np.median(steps_s.mean(1)))
        predicted = None
        if name in STRATEGIES and joins:
            predicted = predict(name, self.costs, self.network, num_devices=options.ranks, **self.sizes)
        return {
            "strategy": name,
            "processes": options.ranks if joins else 1,
            "threads": threads,
            # on a CPU, the cores of one rank count as a device
            "devices": options.ranks if joins or (name == "single" and is_cpu) else 1,
            "samples_per_s": options.batch_size / step_s,
            "step_s": step_s,
            "steps_s": steps_s.tolist(),
            # CPU time says nothing about a GPU
            "idle_ratio": [_idle(rank, threads) for rank in ranks if is_cpu],
            "sent_bytes": predicted.sent_bytes if predicted else None if joins else 0,
            "memory_bytes": [rank[0]["peak_bytes"] for rank in ranks],
            "values": [[turn["values"] for turn in rank] for rank in ranks],
            "predicted_s": predicted and predicted.step_s,
            "error": predicted and predicted.step_s / step_s - 1,
        }

    @cached_property
    def scaling(self) -> list[dict[str, Any]]:
        """Predictions for 1 to 64 devices, with as many samples per device as here."""
        modelled = [name for name in self.turns if name in STRATEGIES and name != "single"]
        plans = [("single", 1), *((name, count) for name in modelled for count in DEVICES)]
        found = [
            predict(name, self.costs, self.network, num_devices=count, **self.sizes) for name, count in plans
        ]
        return [{**asdict(each), "samples_per_s": each.samples_per_s} for each in found]

    @property
    def branch_bound(self) -> float:
        """The gain in throughput from a second device for a whole branch, if messages take no time."""
        size = self.options.batch_size
        whole_s = self.costs.step_s(size)
        return whole_s / (whole_s - min(self.costs.part_s(part, size) for part in ("image", "text"))) - 1

    @property
    def sentence(self) -> str:
        """Which strategy is fastest, and why."""
        best, *others = sorted(self.rows, key=lambda row: -row["samples_per_s"])
        text = f"{best['strategy']} is fastest: {best['samples_per_s']:.3g} samples/s"
        if others:
            slower = [f"{row['strategy']} {row['samples_per_s']:.3g}" for row in others]
            text += f", against {', '.join(slower)}"
        reasons = []
        if best["devices"] > 1 and best["efficiency"] is not None:
            reasons.append(f"it reaches {best['efficiency']:.0%} of linear scaling")
        if best["sent_bytes"]:
            reasons.append(f"it sends {best['sent_bytes'] / MIB:,.1f} MiB a step from a rank")
        if "branch" in self.turns:
            seconds = {part: self.costs.part_s(part, self.options.batch_size) for part in self.costs.forward}
            whole = self.image_layers is None
            cut = "" if whole else f"; cut after image layer {self.image_layers}, as here, they may give more"
            reasons.append(
                f"a step takes {', '.join(f'{each:.3g} s for the {part}' for part, each in seconds.items())}, so two "
                f"devices for whole branches could by these times give {self.branch_bound:+.0%} at most{cut}"
            )
        return f"{text}{': ' if reasons else ''}{'; '.join(reasons)}."

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        options = self.options
        split = "" if options.micro_batches == 1 else f" in {options.micro_batches} micro-batches"
        return (
            f"{options.model}, {options.batch_size} samples a step{split} of {options.image_side} x "
            f"{options.image_side} pixels and {options.num_tokens} tokens, {options.precision}; {options.ranks} ranks "
            f"of {options.num_threads('ddp')} threads on {self.num_cores} cores of {self.device}"
        )

    @property
    def note(self) -> str:
        """What a reader must know about the cores; empty on GPUs."""
        first, ranks = self.rows[0], self.options.ranks
        if first["strategy"] != "one core":
            return ""
        is_tight = ranks * first["threads"] > self.num_cores
        text = f"{ranks} ranks take turns on the {self.num_cores} cores here. " if is_tight else ""
        ratio = self.costs.step_s(self.options.batch_size) / first["step_s"]
        noise = ", which is noise of the machine: measure again" if ratio < 0.95 else ""
        return f"{text}While all ranks work, a step of one takes {ratio:.2f} times as long as alone{noise}."

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab bench parallel --json` prints."""
        names = ("device", "num_cores", "rows", "branch_bound", "scaling", "title", "note", "sentence")
        network = {name: asdict(line) for name, line in self.network.items()}
        more = {"options": asdict(self.options), "costs": asdict(self.costs), "network": network}
        return {**more, **{name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        rows = [
            {
                **row,
                "step_ms": 1e3 * row["step_s"],
                "idle": " ".join(f"{ratio:.0%}" for ratio in row["idle_ratio"]),
                "sent_mib": row["sent_bytes"] and row["sent_bytes"] / MIB,
                "memory_mib": " ".join(f"{size / MIB:.0f}" for size in row["memory_bytes"]),
                "efficiency": row["efficiency"] and f"{row['efficiency']:.0%}",
                "predicted_ms": row["predicted_s"] and 1e3 * row["predicted_s"],
                "error": row["error"] and f"{row['error']:+.0%}",
            }
            for row in self.rows
        ]
        table = as_table(_COLUMNS, rows).to_string(index=False)
        return "\n".join(filter(None, (self.title, table, self.note, self.sentence)))


def _idle(turns: Sequence[Mapping[str, Any]], threads: int) -> float:
    """Share of the time in which a process's threads had no work; the median of its rounds."""
    idle = [max(0.0, 1 - turn["cpu_s"] / (threads * sum(turn["steps_s"]))) for turn in turns]
    return float(np.median(idle))
