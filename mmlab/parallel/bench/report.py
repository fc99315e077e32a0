"""What the strategies reached, beside what the model of scaling says of them and of more devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from html import escape
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from mmlab.loading.stages import as_html, as_text
from mmlab.parallel.bench.arms import num_devices, num_threads, strategy_of
from mmlab.parallel.bench.probes import network_from, work_from
from mmlab.parallel.bench.setting import Setting
from mmlab.parallel.branches.timeline import Span, overlap
from mmlab.parallel.scaling.links import Network
from mmlab.parallel.scaling.outlook import DEVICES, scaling_rows, winners
from mmlab.parallel.scaling.predict import STRATEGIES, predict
from mmlab.parallel.scaling.work import Work
from mmlab.runs.figures import save_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MIB = 2**20
_COLUMNS = (
    "strategy", "processes", "threads", "samples_per_s", "step_p50_ms", "step_p95_ms", "idle", "sent_mib",
    "memory_mib", "efficiency", "predicted_ms", "error",
)  # fmt: skip
_MODELS = {"one core": "single"}  # arm -> strategy of the model; others have their own name


@dataclass(frozen=True, kw_only=True)
class ParallelBench:
    """Every repetition, and what follows from it; printing it gives a table and the conclusion."""

    setting: Setting
    device: str
    num_cores: int
    ranks: Sequence[Mapping[str, Any]]  # what each rank found

    @cached_property
    def work(self) -> Work:
        """Seconds of the parts on one device, all ranks computing at once."""
        return work_from([rank["work"] for rank in self.ranks])

    @cached_property
    def _links(self) -> tuple[Network | None, float]:
        if self.setting.num_ranks < 2:
            return None, 1.0
        return network_from([rank["network"] for rank in self.ranks], self.setting.num_ranks)

    @property
    def network(self) -> Network | None:
        """Links between the ranks; None of a single one."""
        return self._links[0]

    @property
    def overlap(self) -> float:
        """Share of hidden communication that costs the computation nothing."""
        return self._links[1]

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One row a strategy: medians over rounds, what was counted, and what the model says."""
        rows = [self._row(name) for name in self.setting.strategies]
        base = next((row for row in rows if row["devices"] == 1), None)
        for row in rows:
            alike = base and row["samples_per_s"] / base["samples_per_s"]
            row["efficiency"] = alike and alike / row["devices"]
        return rows

    def _row(self, name: str) -> dict[str, Any]:
        setting, strategy = self.setting, strategy_of(self.setting, name)
        turns = [rank["arms"][name] for rank in self.ranks if rank["arms"][name]]
        per_step = np.array([[turn["step_s"] for turn in rank] for rank in turns]).max(0)  # (rounds, steps)
        rounds_s = np.array([[turn["wall_s"] for turn in rank] for rank in turns]).max(0) / setting.num_steps
        measured = [rank[0] for rank in turns]
        threads = num_threads(setting, name)
        step_s = float(np.median(rounds_s))
        predicted = self._predicted(name)
        return {
            "strategy": name,
            "processes": setting.num_ranks if strategy.joins else 1,
            "threads": threads,
            "devices": num_devices(setting, name),
            "samples_per_s": setting.batch_size / step_s,
            "step_s": step_s,
            "step_p50_s": float(np.percentile(per_step, 50)),
            "step_p95_s": float(np.percentile(per_step, 95)),
            "rounds_s": rounds_s.tolist(),
            "steps_s": per_step.tolist(),
            "idle_ratio": [self._idle(rank, threads) for rank in turns],
            "payload_bytes": [found["payload_bytes"] for found in measured],
            "calls": [found["calls"] for found in measured],
            "sent_bytes": [found["ring_bytes"] for found in measured],
            "written_bytes": [found["written_bytes"] for found in measured],
            "memory_bytes": [found["peak_bytes"] for found in measured],
            "memory_source": measured[0]["memory_source"],
            "overlap_ratios": self._overlaps(turns),
            "losses": [turn["losses"] for turn in turns[0]],
            "predicted_s": predicted,
            "error": None if predicted is None else predicted / step_s - 1,
        }

    def _idle(self, turns: Sequence[Mapping[str, Any]], threads: int) -> float:
        if "kernel_ratio" in turns[0]:
            return 1 - turns[0]["kernel_ratio"]
        return median(max(0.0, 1 - turn["cpu_s"] / (threads * turn["wall_s"])) for turn in turns)

    def _overlaps(self, turns: Sequence[Sequence[Mapping[str, Any]]]) -> list[float]:
        """Of each round, the share of the shorter branch's time in which the other computed too; of branches only."""
        rounds = [
            [Span(*span) for turn in ranks for span in turn["spans"]] for ranks in zip(*turns, strict=True)
        ]
        return [overlap(spans) for spans in rounds if spans]

    def _predicted(self, name: str) -> float | None:
        """Of the model, where it knows the strategy and what this arm runs on is what was probed."""
        setting, strategy = self.setting, _MODELS.get(name, name)
        if strategy not in STRATEGIES or num_threads(setting, name) != setting.threads_per_rank:
            return None
        if strategy == "single":  # alone, where the model's computation was measured on all ranks at once
            return self.work.step_s(setting.batch_size) if setting.num_ranks == 1 else None
        if self.network is None:
            return None
        count = num_devices(setting, name)
        return predict(
            strategy,
            self.work,
            self.network,
            num_devices=count,
            batch_size=setting.batch_size / count,
            overlap=self.overlap,
        ).step_s

    @property
    def contention(self) -> float | None:
        """How many times longer a device computes while the others do; None of a single rank."""
        base = next((row for row in self.rows if row["devices"] == 1), None)
        if base is None or self.setting.num_ranks == 1:
            return None
        return self.work.step_s(self.setting.batch_size) / base["step_s"]

    @cached_property
    def modelled(self) -> list[str]:
        """The strategies that the model draws curves of."""
        names = [_MODELS.get(name, name) for name in self.setting.strategies]
        return [name for name in dict.fromkeys(["single", *names]) if name in STRATEGIES]

    @cached_property
    def scaling(self) -> list[dict[str, Any]]:
        """The model at 1 to 64 devices, as many samples a device as here; empty with one rank."""
        if self.network is None:
            return []
        return scaling_rows(
            self.work, self.network, self.modelled, batch_size=self._device_batch, **self._alike
        )

    @property
    def _device_batch(self) -> float:
        return self.setting.batch_size / self.setting.num_ranks

    @property
    def _alike(self) -> dict[str, Any]:
        return {"overlap": self.overlap}

    @cached_property
    def winners(self) -> dict[str, list[dict[str, Any]]]:
        """By number of devices, which strategy the model finds fastest between which bandwidths."""
        if self.network is None:
            return {}
        return {
            str(num_devices): winners(
                self.work,
                self.network,
                self.modelled,
                num_devices=num_devices,
                batch_size=self._device_batch,
                **self._alike,
            )
            for num_devices in DEVICES[1:]
        }

    @property
    def sentence(self) -> str:
        """Who wins, and why."""
        rows = {row["strategy"]: row for row in self.rows}
        order = sorted(self.rows, key=lambda row: -row["samples_per_s"])
        best = order[0]
        text = f"{best['strategy']} is fastest: {best['samples_per_s']:.3g} samples/s"
        if len(order) > 1:
            rest = ", ".join(f"{row['strategy']} {row['samples_per_s']:.3g}" for row in order[1:])
            text += f", against {rest}"
        reasons = []
        if best["efficiency"] is not None and best["devices"] > 1:
            reasons.append(f"it has {best['efficiency']:.0%} of linear scaling")
        if (sent := max(best["sent_bytes"])) and best["devices"] > 1:
            reasons.append(f"sends {sent / MIB:,.1f} MiB a step from a rank")
        if "branch" in rows or "branch threads" in rows:
            seconds = self.work.branches_s(self.setting.batch_size)
            short, long = sorted(("image", "text"), key=seconds.__getitem__)
            reasons.append(
                f"branches differ: {long} {seconds[long]:.3g} s, {short} {seconds[short]:.3g} s, fusion "
                f"{seconds['fusion']:.3g} s a step, so that two devices could give {self.branch_bound:+.0%} at most"
            )
        return f"{text}{': ' if reasons else ''}{'; '.join(reasons)}."

    @property
    def branch_bound(self) -> float:
        """What two devices for the branches would add to the throughput of one, if messages took no time."""
        seconds, size = self.work.branches_s(self.setting.batch_size), self.setting.batch_size
        return self.work.step_s(size) / (self.work.step_s(size) - min(seconds["image"], seconds["text"])) - 1

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab bench parallel --json` prints."""
        return {
            "setting": asdict(replace(self.setting, more={})),
            "device": self.device,
            "num_cores": self.num_cores,
            "rows": self.rows,
            "branches_s": self.work.branches_s(self.setting.batch_size),
            "branch_bound": self.branch_bound,
            "work": asdict(self.work),
            "network": None if self.network is None else asdict(self.network),
            "overlap": self.overlap,
            "contention": self.contention,
            "scaling": self.scaling,
            "winners": self.winners,
            "probes": [{"work": rank["work"], "network": rank["network"]} for rank in self.ranks],
            "sentence": self.sentence,
        }

    @property
    def _shown(self) -> list[dict[str, Any]]:
        return [
            {
                "strategy": row["strategy"],
                "processes": row["processes"],
                "threads": row["threads"],
                "samples_per_s": row["samples_per_s"],
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
        return (
            f"{setting.model}, {setting.batch_size} samples a step of {setting.image_side} x {setting.image_side} "
            f"pixels and {setting.num_tokens} tokens, {setting.precision}; {setting.num_ranks} ranks of "
            f"{setting.threads_per_rank} threads on {self.num_cores} cores of {self.device}"
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
        """Measured throughput, the model's curves, and who wins at which bandwidth."""
        from mmlab.parallel.bench.picture import draw

        return draw(self)

    def save_figure(self, path: str) -> None:
        """Write the figure; the suffix chooses the format."""
        save_figure(self.figure(), path)
