"""`ParallelBench`: what the strategies reached, beside what the simulation predicts of them and of more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.loading.stages import as_html, as_text
from mmlab.parallel.bench_figure import draw
from mmlab.parallel.bench_turns import Setting
from mmlab.parallel.links import Network
from mmlab.parallel.predict import DEVICES, STRATEGIES, Prediction, StepCosts, predict, scaling_rows, winners
from mmlab.parallel.probe import costs_from, network_from
from mmlab.parallel.timeline import Span, overlap
from mmlab.runs.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
_COLUMNS = (
    "strategy", "processes", "threads", "samples_per_s", "step_p50_ms", "step_p95_ms", "idle", "sent_mib",
    "memory_mib", "efficiency", "predicted_ms", "error",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParallelBench:
    """Every repetition, and what follows from it; printing it gives a table and the conclusion."""

    setting: Setting
    device: str
    num_cores: int
    ranks: Sequence[Mapping[str, Any]]  # what each rank measured

    @cached_property
    def costs(self) -> StepCosts:
        """Seconds of the parts on one device while all ranks compute."""
        return costs_from([rank["parts"] for rank in self.ranks])

    @cached_property
    def _links(self) -> tuple[Network | None, float]:
        return network_from([rank["links"] for rank in self.ranks]) if len(self.ranks) > 1 else (None, 1.0)

    @property
    def network(self) -> Network | None:
        """Links between the ranks; None of a single one."""
        return self._links[0]

    @property
    def image_layers(self) -> int | None:
        """Layers of the images on the image rank of `branch`; None if the branch was left whole."""
        found: int | None = self.ranks[0]["image_layers"]
        return found

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row per strategy: medians over rounds, what was measured, and what was predicted."""
        rows = [self._row(name) for name in self.setting.strategies]
        base = next((row for row in rows if row["devices"] == 1), None)
        for row in rows:
            alike = base and row["samples_per_s"] / base["samples_per_s"]
            row["efficiency"] = alike and alike / row["devices"]
        return rows

    def _row(self, name: str) -> dict[str, Any]:
        setting, strategy = self.setting, self.setting.strategy(name)
        turns = [rank["strategies"][name] for rank in self.ranks if rank["strategies"][name]]
        per_step = np.array([[turn["step_s"] for turn in rank] for rank in turns]).max(0)  # (rounds, steps)
        rounds_s = np.array([[turn["wall_s"] for turn in rank] for rank in turns]).max(0) / setting.num_steps
        measured = [rank[0] for rank in turns]
        threads, step_s = setting.num_threads(name), float(np.median(rounds_s))
        predicted = self._predicted(name)
        # on a GPU nothing is written to sockets: there the prediction says what is sent
        written = [found["written_bytes"] for found in measured]
        unknown = predicted is not None and (setting.device_type == "cuda" or None in written)
        return {
            "strategy": name,
            "processes": setting.num_ranks if strategy.joins else 1,
            "threads": threads,
            "devices": setting.num_devices(name),
            "image_layers": self.image_layers if name == "branch" else None,
            "samples_per_s": setting.batch_size / step_s,
            "step_s": step_s,
            "step_p50_s": float(np.percentile(per_step, 50)),
            "step_p95_s": float(np.percentile(per_step, 95)),
            "rounds_s": rounds_s.tolist(),
            "steps_s": per_step.tolist(),
            "idle_ratio": [_idle(rank, threads) for rank in turns],
            "sent_bytes": [predicted.sent_bytes]
            if predicted and unknown
            else [size or 0 for size in written],
            "memory_bytes": [found["peak_bytes"] for found in measured],
            "memory_source": measured[0]["memory_source"],
            "overlap_ratios": _overlaps(turns),
            "losses": [turn["losses"] for turn in turns[0]],
            "predicted_s": None if predicted is None else predicted.step_s,
            "predicted_sent_bytes": None if predicted is None else predicted.sent_bytes,
            "error": None if predicted is None else predicted.step_s / step_s - 1,
        }

    def _predicted(self, name: str) -> Prediction | None:
        """For strategies that the simulation knows and that run on what was probed."""
        if name not in STRATEGIES or name == "single" or self.network is None:
            return None
        return predict(
            name, self.costs, self.network, num_devices=self.setting.num_ranks, **self._sizes, **self._how
        )

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"batch_size": self.setting.batch_size / self.setting.num_ranks}

    @property
    def _how(self) -> dict[str, Any]:
        return {"overlap": self._links[1], "num_micro_batches": self.setting.num_micro_batches}

    @property
    def contention(self) -> float | None:
        """How many times longer a device computes while the others do; None of a single rank."""
        base = next((row for row in self.rows if row["devices"] == 1), None)
        if base is None or self.setting.num_ranks == 1:
            return None
        return self.costs.step_s(self.setting.batch_size) / base["step_s"]

    @cached_property
    def _modelled(self) -> list[str]:
        names = ("single", *self.setting.strategies)
        return [name for name in dict.fromkeys(names) if name in STRATEGIES]

    @cached_property
    def scaling(self) -> list[dict[str, Any]]:
        """Predictions for 1 to 64 devices, with as many samples per device as here; empty with one rank."""
        if self.network is None:
            return []
        return scaling_rows(self.costs, self.network, self._modelled, **self._sizes, **self._how)

    @cached_property
    def winners(self) -> dict[str, list[dict[str, Any]]]:
        """By number of devices, which strategy is predicted to be fastest between which bandwidths."""
        if self.network is None:
            return {}
        return {
            str(count): winners(
                self.costs, self.network, self._modelled, num_devices=count, **self._sizes, **self._how
            )
            for count in DEVICES[1:]
        }

    @property
    def branch_bound(self) -> float:
        """What two devices for whole branches add to the throughput of one, if messages take no time."""
        seconds, size = self.costs.branches_s(self.setting.batch_size), self.setting.batch_size
        return (
            self.costs.step_s(size) / (self.costs.step_s(size) - min(seconds["image"], seconds["text"])) - 1
        )

    @property
    def sentence(self) -> str:
        """Who wins, and why."""
        best, *others = sorted(self.rows, key=lambda row: -row["samples_per_s"])
        text = f"{best['strategy']} is fastest: {best['samples_per_s']:.3g} samples/s"
        if others:
            text += ", against " + ", ".join(
                f"{row['strategy']} {row['samples_per_s']:.3g}" for row in others
            )
        reasons = []
        if best["efficiency"] is not None and best["devices"] > 1:
            reasons.append(f"it has {best['efficiency']:.0%} of linear scaling")
        if best["processes"] > 1:
            reasons.append(f"sends {max(best['sent_bytes']) / MIB:,.1f} MiB a step from a rank")
        if "branch" in self.setting.strategies:
            seconds = self.costs.branches_s(self.setting.batch_size)
            short, long = sorted(("image", "text"), key=seconds.__getitem__)
            cut = "whole" if self.image_layers is None else f"cut after {self.image_layers} layers"
            reasons.append(
                f"branches differ: {long} {seconds[long]:.3g} s, {short} {seconds[short]:.3g} s, fusion "
                f"{seconds['fusion']:.3g} s a step, so that two devices for whole branches could give "
                f"{self.branch_bound:+.0%} at most; the image branch was {cut}"
            )
        return f"{text}{': ' if reasons else ''}{'; '.join(reasons)}."

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab bench parallel --json` prints."""
        return {
            "setting": asdict(replace(self.setting, more={})),
            "device": self.device,
            "num_cores": self.num_cores,
            "rows": self.rows,
            "branches_s": self.costs.branches_s(self.setting.batch_size),
            "branch_bound": self.branch_bound,
            "costs": asdict(self.costs),
            "network": None if self.network is None else asdict(self.network),
            "overlap": self._links[1],
            "contention": self.contention,
            "scaling": self.scaling,
            "winners": self.winners,
            "probes": [{"parts": rank["parts"], "links": rank["links"]} for rank in self.ranks],
            "title": self.title,
            "sentence": self.sentence,
        }

    @property
    def _shown(self) -> list[dict[str, Any]]:
        return [
            {
                **{name: row[name] for name in ("strategy", "processes", "threads", "samples_per_s")},
                "step_p50_ms": 1e3 * row["step_p50_s"],
                "step_p95_ms": 1e3 * row["step_p95_s"],
                "idle": " ".join(f"{ratio:.0%}" for ratio in row["idle_ratio"]),
                "sent_mib": max(row["sent_bytes"]) / MIB,
                "memory_mib": " ".join(f"{size / MIB:.0f}" for size in row["memory_bytes"]),
                "efficiency": None if row["efficiency"] is None else f"{row['efficiency']:.0%}",
                "predicted_ms": None if row["predicted_s"] is None else 1e3 * row["predicted_s"],
                "error": None if row["error"] is None else f"{row['error']:+.0%}",
            }
            for row in self.rows
        ]

    @property
    def title(self) -> str:
        """What was measured, in one line."""
        setting = self.setting
        split = "" if setting.num_micro_batches == 1 else f" in {setting.num_micro_batches} micro-batches"
        return (
            f"{setting.model}, {setting.batch_size} samples a step{split} of {setting.image_side} x "
            f"{setting.image_side} pixels and {setting.num_tokens} tokens, {setting.precision}; {setting.num_ranks} "
            f"ranks of {setting.threads_per_rank} threads on {self.num_cores} cores of {self.device}"
        )

    @property
    def note(self) -> str:
        """What a reader must know of the cores."""
        wanted = self.setting.num_ranks * self.setting.threads_per_rank
        if self.setting.device_type != "cpu":
            return ""
        text = f"Every strategy has {wanted} threads in all; 'one core' has {self.setting.threads_per_rank}."
        if wanted > self.num_cores:
            text += f" That is more than the {self.num_cores} cores here: ranks take turns on them."
        if self.contention is not None:
            text += (
                f" While all ranks compute, a step of one takes {self.contention:.2f} times as long as alone."
            )
        return text

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.title, as_text(_COLUMNS, self._shown), self.note, self.sentence)))

    def _repr_html_(self) -> str:
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return (
            f"<p>{escape(self.title)}</p>{as_html(_COLUMNS, self._shown)}{note}<p>{escape(self.sentence)}</p>"
        )

    def figure(self) -> Figure:
        """Measured throughput, predicted curves, and who wins at which bandwidth."""
        return draw(self.as_dict())

    def save_figure(self, path: str) -> None:
        """Write the figure; the suffix chooses the format."""
        save_figure(self.figure(), path)


def _idle(turns: Sequence[Mapping[str, Any]], threads: int) -> float:
    """Share of the time in which a process's threads, or its GPU, had no work."""
    if "kernel_ratio" in turns[0]:
        found: float = 1 - turns[0]["kernel_ratio"]
        return found
    return median(max(0.0, 1 - turn["cpu_s"] / (threads * turn["wall_s"])) for turn in turns)


def _overlaps(turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
    """For each round of `branch`, the share of the less busy rank's time in which the other computed too."""
    rounds = [[Span(*span) for turn in ranks for span in turn["spans"]] for ranks in zip(*turns, strict=True)]
    return [overlap(spans) for spans in rounds if spans]
