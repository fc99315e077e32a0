"""What runs in the notebook's kernel, and beside it, while benchmarks/panel.py watches the page.

As a program, `python _panel_kernel.py FOLDER HZ SECONDS`, it writes two runs of steps and device readings.
"""

from __future__ import annotations

import io
import json
import random
import sys
import threading
import time
from math import nan
from pathlib import Path
from typing import Any

from mmlab.runs.events import RunLog
from mmlab.runs.follow import Runs

NAMES = ("random", "budget")
KEYS = ("loss", "combined_waste")  # drawn by the other libraries


def write_runs(folder: Path, hz: float, seconds: float) -> None:
    """Two runs, `hz` steps a second each."""
    writer, began = Writer(folder), time.monotonic()
    for count in range(1, int(hz * seconds) + 1):
        time.sleep(max(0.0, began + count / hz - time.monotonic()))
        writer.step()
    writer.end()


class Writer:
    """Writes steps of two runs."""

    def __init__(self, folder: Path) -> None:
        self._logs = [RunLog(folder / "runs" / name) for name in NAMES]
        self._step, self._rng = 0, random.Random(0)
        for log in self._logs:
            log.write("start", 0, num_steps=100_000, device="cpu")

    def step(self) -> None:
        """One step of each run, with all that the trainer writes."""
        self._step += 1
        for log in self._logs:
            num_samples = self._rng.randrange(20, 40)
            log.write(
                "step", self._step, epoch=0, num_samples=num_samples, num_tokens=self._rng.randrange(16, 64),
                height=112, width=128, loss=self._rng.random(), combined_waste=self._rng.random() / 5, step_s=0.1,
                data_wait_s=self._rng.random() / 50, samples_per_s=10.0 * num_samples, peak_bytes=num_samples << 20,
                predicted_bytes=num_samples << 20, lr=1e-3, grad_norm=self._rng.random(), memory_source="live tensors",
            )  # fmt: skip
            if self._step % 5 == 0:
                log.write(
                    "device", -1, memory_bytes=10**9, memory_total_bytes=10**10, memory_source="process RSS",
                    utilization_ratio=self._rng.random(), utilization_source="process CPU",
                )  # fmt: skip

    def end(self) -> None:
        for log in self._logs:
            log.write("end", self._step, status="done")


class Switch:
    """A controller without a run, to time the way from a key to the kernel and back."""

    error, progress = None, (nan, nan)

    def __init__(self, folder: Path) -> None:
        self.folder, self.state = folder, "running"

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def pause(self) -> None:
        self.state = "paused"

    def resume(self) -> None:
        self.state = "running"


class Training(threading.Thread):
    """Work that holds the interpreter's lock, in segments of `segment_s`, with the panel on or off.

    Each round has three segments in an order that rotates: the panel shown, the panel off, and off once more, which
    says how far two equal segments differ by chance. Ten steps a second are written all the time.
    """

    def __init__(self, panel: Any, folder: Path, rounds: int, segment_s: float, out: Path) -> None:
        super().__init__(daemon=True)
        self._panel, self._writer, self._out = panel, Writer(folder), out
        self._rounds, self._segment_s = rounds, segment_s

    def run(self) -> None:
        found: list[dict[str, float]] = []
        kinds = ["on", "off", "control"]
        self._segment("on")  # warm
        for number in range(self._rounds):
            order = kinds[number % 3 :] + kinds[: number % 3]
            found.append({kind: self._segment(kind) for kind in order})
        self._writer.end()
        self._out.with_suffix(".part").write_text(json.dumps(found))
        self._out.with_suffix(".part").rename(self._out)

    def _segment(self, kind: str) -> float:
        """Pieces of work a second."""
        pump = self._panel._pump
        pump.receive(
            {"kind": "ready", "have": dict(pump._sent)} if kind == "on" else {"kind": "hidden"}
        )  # as the page says it
        time.sleep(0.1)
        began, pieces, next_s = time.perf_counter(), 0, 0.0
        while (now_s := time.perf_counter() - began) < self._segment_s:
            if now_s >= next_s:
                self._writer.step()
                next_s += 0.1
            sum(k * k for k in range(1500))
            pieces += 1
        return pieces / now_s


class Peer(threading.Thread):
    """Another library's plot of two runs, two axes, redrawn by a thread at `hz` as news comes."""

    def __init__(self, folder: Path, hz: float = 10.0) -> None:
        super().__init__(daemon=True)
        self._runs, self._hz = Runs(folder, scan_s=0.5), hz
        self._lines: dict[str, list[list[float]]] = {}
        self.stopped = False

    def run(self) -> None:
        while not self.stopped:
            began = time.monotonic()
            if self._runs.poll():
                for run in self._runs.states.values():
                    for key, column in zip(KEYS, self._lines.setdefault(run.id, [[], []]), strict=True):
                        column += run.column_or_nan(key, start=len(column)).tolist()
                self.draw(sum(len(line[0]) for line in self._lines.values()), self._lines)
            time.sleep(max(0.0, began + 1 / self._hz - time.monotonic()))

    def draw(self, count: int, lines: dict[str, list[list[float]]]) -> None:
        raise NotImplementedError


class AggPeer(Peer):
    """matplotlib, drawn in full into an image; the number of rows stands in the first pixel's colour."""

    def __init__(self, folder: Path) -> None:
        import ipywidgets
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle

        super().__init__(folder)
        self._figure = Figure(figsize=(8, 3), dpi=100)
        FigureCanvasAgg(self._figure)
        self._axes = self._figure.subplots(1, 2)
        self._tag = self._figure.add_artist(
            Rectangle((0, 0.9), 0.05, 0.1, transform=self._figure.transFigure, lw=0, antialiased=False)
        )
        self.widget = ipywidgets.Image(format="png")
        self.draw(0, {})

    def draw(self, count: int, lines: dict[str, list[list[float]]]) -> None:
        for kind, axis in enumerate(self._axes):
            axis.clear()
            for line in lines.values():
                axis.plot(line[kind][-1000:], lw=1)
        self._tag.set_facecolor([(count >> shift & 255) / 255 for shift in (16, 8, 0)])
        buffer = io.BytesIO()
        self._figure.savefig(buffer, format="png", pil_kwargs={"compress_level": 1})
        self.widget.value = buffer.getvalue()


class BqplotPeer(Peer):
    """bqplot, whole lines sent; the number of rows stands in the title."""

    def __init__(self, folder: Path) -> None:
        import bqplot
        import ipywidgets

        super().__init__(folder)
        self._marks, self._figures = [], []
        for _ in range(2):
            scales = {"x": bqplot.LinearScale(), "y": bqplot.LinearScale()}
            self._marks.append(bqplot.Lines(x=[0, 1], y=[0, 0], scales=scales))
            axes = [bqplot.Axis(scale=scales["x"]), bqplot.Axis(scale=scales["y"], orientation="vertical")]
            self._figures.append(
                bqplot.Figure(marks=[self._marks[-1]], axes=axes, title="0", animation_duration=0)
            )
        self.widget = ipywidgets.HBox(self._figures)

    def draw(self, count: int, lines: dict[str, list[list[float]]]) -> None:
        import numpy as np

        shortest = min(len(line[0]) for line in lines.values())
        for kind, mark in enumerate(self._marks):
            mark.x = np.arange(min(shortest, 1000))
            mark.y = np.array([line[kind][:shortest][-1000:] for line in lines.values()])
        self._figures[0].title = str(count)


if __name__ == "__main__":
    write_runs(Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
