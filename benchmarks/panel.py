"""The live panel in a real JupyterLab and Chromium: how fast, how complete, what it costs, beside other libraries.

    python benchmarks/panel.py [--quick] [--json FILE | --out DIR]

Needs Chromium and playwright, as tests/browser do. Two runs are written by a process of its own, ten or more steps a
second; a sampler in the page notes at every animation frame how many steps are drawn. CPU time is the whole kernel's,
seen from outside. Other libraries are measured where they are installed. `--quick` measures for shorter.
Exit code: 0 done, whether or not every goal is met.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from _common import add_common_options, goal, print_goals, write_if_asked
from _panel_kernel import NAMES
from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Page, sync_playwright

import mmlab.lab.pump  # noqa: F401  # which the kernel runs: the code that is measured
from mmlab.lab.notebook import draw_sizes
from mmlab.lab.plan_panel import PlanExplorer
from mmlab.runs.events import read_events
from mmlab.types import Aspect

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.browser.jupyter import Notebook, Server, launch  # noqa: E402

SAMPLER = """() => {
  window.frames_ = [];
  const now = () => performance.timeOrigin + performance.now();
  const pixel = image => { const c = document.createElement('canvas'); c.width = c.height = 1;
    const g = c.getContext('2d', {willReadFrequently: true}); g.drawImage(image, 5, 5, 1, 1, 0, 0, 1, 1);
    const d = g.getImageData(0, 0, 1, 1).data; return d[0] << 16 | d[1] << 8 | d[2]; };
  const count = {
    panel: () => +window.watched.dataset.points,
    agg: () => pixel(window.watched.querySelector('img')),
    bqplot: () => +window.watched.querySelector('.mainheading').textContent };
  const tick = () => {
    if (window.watched) { try { const n = count[window.kind_](), last = window.frames_.at(-1);
      if (!last || last[0] !== n) window.frames_.push([n, now()]); } catch (error) { window.failed_ = String(error); } }
    requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
}"""
KEYS = """async ([root, presses]) => {
  const now = () => performance.now(), found = [];
  for (let i = 0; i < presses; i++) {
    const before = root.dataset.state, began = now();
    root.dispatchEvent(new KeyboardEvent('keydown', {key: 'p', bubbles: true}));
    await new Promise(done => {
      const look = () => root.dataset.state !== before ? done() : requestAnimationFrame(look); look(); });
    found.push(now() - began);
    await new Promise(done => setTimeout(done, 130));
  }
  return found;
}"""
CLICK = """async ([root, action, wanted]) => {
  const began = performance.now();
  root.querySelector(`button[data-action='${action}']`).click();
  await new Promise(done => {
    const look = () => wanted.includes(root.dataset.state) ? done() : requestAnimationFrame(look); look(); });
  return performance.now() - began;
}"""


def main() -> None:
    """Measure, print rows and goals, write the results if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_common_options(parser, "panel", quick="about a minute and a half")
    options = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = launch(playwright)
        server = Server(Path(folder), ["-m", "jupyterlab"], status="api/status")
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            rows = [*Bench(server, page, began, options.quick).run(), sliders()]
        finally:
            browser.close()
            server.close()
    goals = judge(rows)
    print_goals(goals)
    write_if_asked(options, "panel", rows, goals)


def sliders() -> dict[str, Any]:
    """CPU milliseconds from a slider of the plan explorer to its table, on 100,000 samples; the picture follows."""
    explorer = PlanExplorer(draw_sizes(20_000).resized(Aspect(224**2)))
    answered_s: list[float] = []
    explorer.table.observe(lambda _: answered_s.append(time.thread_time()), "value")
    taken_ms = []
    for samples in (48, 64, 40, 24, 56):
        started = time.thread_time()
        explorer.samples.value = samples
        taken_ms.append(1e3 * (answered_s[-1] - started))
    print(f"plan explorer: {statistics.median(taken_ms):.0f} CPU ms from a slider to its table")
    return {"name": "plan explorer", "cpu_ms": statistics.median(taken_ms), "all_cpu_ms": taken_ms}


class Bench:
    """Everything that is measured in one notebook."""

    def __init__(self, server: Server, page: Page, began: float, quick: bool) -> None:
        self.server, self.page, self.began, self.quick = server, page, began, quick
        self.files = server.files
        self.rows: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        self.first_plot()
        self.page.evaluate(SAMPLER)
        self.idle()
        short, long = (6.0, 15.0) if self.quick else (15.0, 60.0)
        self.stream("panel at 10 Hz", "LivePanel({folder!r})", "panel", hz=10, seconds=short)
        at_20_hz = "from mmlab.lab import pump\npump.INTERVAL_S = 1 / 20\nLivePanel({folder!r})"
        self.stream("panel at 20 Hz", at_20_hz, "panel", hz=20, seconds=long)
        at_10_hz = "pump.INTERVAL_S = 1 / 10\nLivePanel({folder!r})"
        self.stream("panel at 10 Hz, 60 steps/s", at_10_hz, "panel", hz=60, seconds=5.0)
        self.keys()
        self.training(rounds=3 if self.quick else 12)
        self.steering()
        self.peer("matplotlib Agg into Image", "AggPeer({folder!r})", "agg", seconds=short)
        if find_spec("bqplot"):
            self.peer("bqplot", "BqplotPeer({folder!r})", "bqplot", seconds=short)
        else:
            print("bqplot is not installed, left out")
        return self.rows

    def add(self, name: str, **figures: Any) -> None:
        self.rows.append({"name": name, **figures})
        words = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in figures.items()
        )
        print(f"{name}: {', '.join(words)}", flush=True)

    def first_plot(self) -> None:
        """From the command and from an idle kernel to a drawn plot, everything cold."""
        write(self.files / "small", 10, 1.0).wait()
        self.notebook = Notebook(self.server, self.page, "panel.ipynb").create()
        idle = time.perf_counter()
        self.notebook.show("LivePanel('small')").wait_points(20)
        drawn = time.perf_counter()
        self.add("first plot", from_idle_kernel_s=drawn - idle, from_command_s=drawn - self.began - 1.0)
        self.notebook.run(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom pathlib import Path\n"
            "from _panel_kernel import *\nfrom mmlab.lab.live_panel import LivePanel"
        )
        pid = self.notebook.run("import os\nprint(os.getpid())").locator(".jp-OutputArea-output").inner_text()
        self.kernel = psutil.Process(int(pid))
        self.close_all()

    def close_all(self) -> None:
        self.notebook.run("from ipywidgets import Widget\nWidget.close_all()")

    def idle(self) -> None:
        """What a kernel costs that shows nothing."""
        share = self.cpu_share(lambda: time.sleep(5.0 if self.quick else 10.0))
        self.idle_share = share
        self.add("idle kernel", core_ratio=share)

    def cpu_share(self, act: Callable[[], object]) -> float:
        before, began = sum(self.kernel.cpu_times()[:2]), time.perf_counter()
        act()
        return (sum(self.kernel.cpu_times()[:2]) - before) / (time.perf_counter() - began)

    def peer(self, name: str, code: str, kind: str, *, seconds: float) -> None:
        """Another library, for comparison; where it does not draw, our own figures are kept all the same."""
        try:
            self.stream(name, code, kind, hz=10, seconds=seconds)
        except PlaywrightError as error:
            print(f"{name} does not draw here, left out: {str(error).splitlines()[0]}")

    def stream(self, name: str, code: str, kind: str, *, hz: float, seconds: float) -> None:
        """Steps that come at `hz`: when each is on the screen, how many at a time, and what the kernel pays."""
        folder = self.files / name.replace(" ", "_").replace(",", "").replace("/", "_")
        process = write(folder, hz, seconds)
        wait_for(folder / "runs" / NAMES[1] / "events-rank0.jsonl")
        made = code.format(folder=str(folder))
        if kind == "panel":
            root = self.notebook.show(made).root
        else:
            cell = self.notebook.run(f"peer = {made}\npeer.start()\npeer.widget")
            root = cell.locator(".jp-OutputArea-output")
            root.locator({"agg": "img", "bqplot": ".mainheading"}[kind]).first.wait_for()
            root.first.scroll_into_view_if_needed()
        session = self.page.context.new_cdp_session(self.page)
        element = root.first.element_handle()
        self.page.evaluate("([el, kind]) => { window.kind_ = kind; window.watched = el; }", [element, kind])
        heap = heap_bytes(session)
        self.page.evaluate("() => { window.frames_ = [] }")
        began_ms = 1000 * time.time()
        share = self.cpu_share(process.wait)
        ended_ms = 1000 * time.time()
        time.sleep(0.5)
        frames = self.page.evaluate("() => window.frames_")
        grown = heap_bytes(session) - heap
        written = [
            1000 * event.time_s
            for event in read_events(folder / "runs" / NAMES[1] / "events-rank0.jsonl")[0]
            if event.kind == "step"
        ]
        latencies = delays(written, frames, after_ms=began_ms)
        shown = [at for _, at in frames if began_ms < at < ended_ms]
        figures = {"heap_growth_bytes": grown} if kind == "panel" else {}
        self.add(
            name,
            steps_per_s=hz,
            seconds=seconds,
            event_to_pixels_p50_ms=quantile(latencies, 0.5),
            event_to_pixels_p95_ms=quantile(latencies, 0.95),
            shown_per_s=len(shown) / ((ended_ms - began_ms) / 1000),
            steps_lost=2 * len(written) - max((count for count, _ in frames), default=0),
            core_ratio=share,
            core_ratio_over_idle=share - self.idle_share,
            ms_per_shown=1000 * share / max(1e-9, len(shown) / ((ended_ms - began_ms) / 1000)),
            **figures,
        )
        self.page.evaluate("() => { window.watched = null }")
        if kind != "panel":
            self.notebook.run("peer.stopped = True")
        self.close_all()

    def keys(self) -> None:
        """A key on the panel, through the kernel, to the changed state."""
        panel = self.notebook.show("LivePanel('small', Switch(Path('small')))")
        panel.wait_state("running")
        root = panel.root.element_handle()
        took = self.page.evaluate(KEYS, [root, 10 if self.quick else 40])
        self.add("key to pixels", p50_ms=quantile(took, 0.5), p95_ms=quantile(took, 0.95), presses=len(took))
        self.close_all()

    def training(self, rounds: int) -> None:
        """How much slower Python work in the kernel is with the panel shown; the control compares off with off."""
        out = self.files / "training.json"
        self.notebook.show(
            "trained = LivePanel('trained')\n"
            f"Training(trained, Path('trained'), {rounds}, 2.0, Path({str(out)!r})).start()\ntrained"
        )
        wait_for(out, 30 + 7 * rounds)
        found = json.loads(out.read_text())
        for name, kind in (("cost to training", "on"), ("cost to training, control", "control")):
            costs = [1 - each[kind] / each["off"] for each in found]
            low, high = np.quantile(costs, [0.25, 0.75])
            self.add(
                name, cost_ratio=statistics.median(costs), low_ratio=low, high_ratio=high, rounds=len(costs),
                repetitions=[round(cost, 4) for cost in costs],
            )  # fmt: skip
        self.close_all()

    def steering(self) -> None:
        """Pause and stop a real run by its buttons."""
        from mmlab.data.synthetic import make_dataset

        data = make_dataset(
            self.files / "scenes",
            num_images=24,
            captions_per_image=3,
            max_side=96,
            progress=False,
        )
        panel = self.notebook.show(
            f"from mmlab.lab.lab import Lab\nlab = Lab({str(data)!r}, out='lab', image='aspect:48', batch_size=4, "
            "epochs=500, num_workers=0, schedulers=('budget',))\nLivePanel(lab.folder, lab)"
        )
        panel.wait_state("idle")
        panel.button("start").click()
        panel.wait_points(10)
        root = panel.root.element_handle()
        pauses = []
        for _ in range(3):
            pauses.append(self.page.evaluate(CLICK, [root, "pause", ["paused"]]))
            self.page.evaluate(CLICK, [root, "resume", ["running"]])
            panel.wait_points(int(panel.data("points")) + 3)
        stop_ms = self.page.evaluate(CLICK, [root, "stop", ["stopping", "stopped"]])
        panel.wait_state("stopped")
        [path] = (self.files / "lab" / "runs").glob("*/events-rank0.jsonl")
        steps = [event.values["step_s"] for event in read_events(path)[0] if event.kind == "step"]
        self.add(
            "steering a run",
            pause_ms=max(pauses),
            stop_ms=stop_ms,
            step_ms=1000 * statistics.median(steps[2:]),
        )
        self.close_all()


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every bound, beside what was measured."""
    by_name = {row["name"]: row for row in rows}
    ten, twenty, sixty = (
        by_name[name] for name in ("panel at 10 Hz", "panel at 20 Hz", "panel at 10 Hz, 60 steps/s")
    )
    keys, first, steering = by_name["key to pixels"], by_name["first plot"], by_name["steering a run"]
    growth = twenty["heap_growth_bytes"] * 60 / twenty["seconds"]
    late = max(steering["pause_ms"], steering["stop_ms"]) - steering["step_ms"]
    cost, control = by_name["cost to training"], by_name["cost to training, control"]
    over = cost["cost_ratio"] - max(0.0, control["cost_ratio"])

    def most(name: str, bound: float, measured: float, unit: str = "") -> dict[str, Any]:
        return goal(name, f"<= {bound:g}{unit}", measured, measured <= bound)

    def least(name: str, bound: float, measured: float, unit: str = "") -> dict[str, Any]:
        return goal(name, f">= {bound:g}{unit}", measured, measured >= bound)

    return [
        most("event to pixels at 10 Hz, p50", 50, ten["event_to_pixels_p50_ms"], " ms"),
        most("event to pixels at 10 Hz, p95", 100, ten["event_to_pixels_p95_ms"], " ms"),
        most("key to kernel to pixels, p50", 100, keys["p50_ms"], " ms"),
        most("key to kernel to pixels, p95", 200, keys["p95_ms"], " ms"),
        least("shown of 10 a second", 9.5, ten["shown_per_s"]),
        least("shown of 20 a second", 18, twenty["shown_per_s"]),
        most("steps lost of 60 a second", 0, sixty["steps_lost"]),
        most("kernel at 10 Hz, over idle, share of a core", 0.02, ten["core_ratio_over_idle"]),
        most("pause or stop to state text, less one step", 500, late, " ms"),
        most("idle kernel to first plot", 3, first["from_idle_kernel_s"], " s"),
        most("jupyter lab to first plot", 15, first["from_command_s"], " s"),
        most("JS heap growth in 60 s at 20 Hz", 2 * 2**20, growth, " bytes"),
        most("cost to training that holds the lock, over the control", 0.03, over),
        most("slider to table of the plan explorer, CPU", 200, by_name["plan explorer"]["cpu_ms"], " ms"),
    ]


def write(folder: Path, hz: float, seconds: float) -> subprocess.Popen[bytes]:
    """A process that writes two runs."""
    script = Path(__file__).with_name("_panel_kernel.py")
    return subprocess.Popen([sys.executable, str(script), str(folder), str(hz), str(seconds)])


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.1)


def delays(written_ms: list[float], frames: list[list[float]], *, after_ms: float) -> list[float]:
    """Milliseconds from the writing of each step (of both runs) to the first frame that shows it."""
    found, place = [], 0
    for count, at_ms in enumerate(written_ms, start=1):
        while place < len(frames) and frames[place][0] < 2 * count:
            place += 1
        if place == len(frames):
            break
        if at_ms > after_ms + 300:
            found.append(frames[place][1] - at_ms)
    return found


def heap_bytes(session: Any) -> int:
    """JavaScript heap in use, after garbage is collected."""
    session.send("HeapProfiler.collectGarbage")
    return int(session.send("Runtime.getHeapUsage")["usedSize"])


def quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else float("nan")


if __name__ == "__main__":
    main()
