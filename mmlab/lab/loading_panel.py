"""A panel for notebooks: how do workers, prefetching and a cache change loading? It measures each setting.

A measurement loads two epochs and counts the second. The button measures in a thread, with progress;
`measure` does it in the caller's thread and works without a front end.
"""

from __future__ import annotations

import threading
import time
from copy import copy
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import pandas as pd
from matplotlib.figure import Figure

from mmlab.data.dataset import MultimodalDataset
from mmlab.errors import check_is
from mmlab.lab.panels import WIDE, Panel, picture, show_picture, slider
from mmlab.lab.plan_figure import page_png
from mmlab.loading.cache import SampleCache, build_cache, cache_key
from mmlab.loading.loader import PlannedLoader
from mmlab.loading.stages import StageReport
from mmlab.runs.figures import GREY, PALETTE
from mmlab.schedule.schedulers import make_scheduler

_STAGES = ("read", "decode", "collate")
_SHOWN = 8  # settings in the picture, the last ones


class LoadingPanel(Panel):
    """Options of a loader, and a row for each setting measured: samples/s, and how busy each stage was.

    Args:
        dataset: each measurement loads it twice, so it should be small.
        cache: folder for decoded images, filled by the first measurement with a cache.
        batch_size: samples a batch.
    """

    def __init__(self, dataset: MultimodalDataset, cache: str | Path, *, batch_size: int = 32) -> None:
        check_is("dataset", dataset, "records", "a MultimodalDataset")
        self._dataset, self._batch_size = copy(dataset), batch_size
        self._dataset.cache, self._cache_folder = None, Path(cache)
        self.reports: dict[str, StageReport] = {}
        self.workers = slider("workers", 0, 0, 8)
        kinds = {"threads": "threads", "processes": "torch"}
        self.backend = widgets.Dropdown(options=kinds, description="kind", style=WIDE)
        self.prefetch = slider("batches ahead", 4, 1, 16)
        self.cached = widgets.Checkbox(value=False, description="cache", style=WIDE)
        self.step_ms = slider("a step takes, ms", 0, 0, 1000)
        self.button = widgets.Button(description="Measure", button_style="primary")
        self.progress = widgets.IntProgress(description="", max=2, layout={"width": "20rem"})
        self.table = widgets.HTML()
        self.picture = picture()
        knobs = (self.workers, self.backend, self.prefetch, self.cached, self.step_ms)
        controls = widgets.VBox([*knobs, widgets.HBox([self.button, self.progress])])
        super().__init__([controls], [self.table, self.picture])
        self.button.on_click(self._begin)

    @property
    def text(self) -> str:
        """One line per setting."""
        return "\n".join(f"{name}: {report.sentence}" for name, report in self.reports.items())

    def measure(self) -> StageReport:
        """Load with the current setting, and keep the figures of each stage as a row. Blocks until done."""
        step_s, dataset = self.step_ms.value / 1000, self._dataset
        workers, ahead = self.workers.value, self.prefetch.value
        name = f"{self.backend.label}: {workers}, {ahead} ahead" if workers else "no workers"
        name += ", cached" * self.cached.value + f", {self.step_ms.value} ms a step" * (step_s > 0)
        if self.cached.value:
            dataset = copy(dataset)
            dataset.cache = SampleCache(self._cache_folder, key=cache_key(dataset))
            build_cache(dataset, progress=False)
        scheduler, backend = make_scheduler("random", batch_size=self._batch_size), self.backend.value
        loader = PlannedLoader(dataset, scheduler, backend=backend, num_workers=workers, prefetch=ahead)
        self.progress.max, self.progress.value, told_s = 2 * len(loader), 0, time.monotonic()
        for epoch in range(2):  # the first also starts workers
            loader.set_epoch(epoch)
            for number, _ in enumerate(loader, 1 + epoch * len(loader)):
                time.sleep(step_s)
                if time.monotonic() > told_s + 0.2:  # updates take time
                    told_s, self.progress.value = time.monotonic(), number
        report = loader.stage_report()
        self.progress.value = self.progress.max
        loader.close()
        self.reports.pop(name, None)
        self.reports[name] = report
        self._show()
        return report

    def _begin(self, _button: widgets.Button) -> None:
        self.button.disabled = True
        threading.Thread(target=self._run, name="mmlab-loading", daemon=True).start()

    def _run(self) -> None:
        self.showing(self.measure)(None)  # which shows any error
        self.button.disabled = False

    def _show(self) -> None:
        figures = figures_of(self.reports)
        style = figures.style.format("{:.0%}").format("{:,.0f}", ["samples/s"])
        sentence = list(self.reports.values())[-1].sentence
        self.table.value = f"{style.to_html(table_uuid=str(id(self)))}<p>{sentence}</p>"
        show_picture(self.picture, page_png(loading_figure, figures.tail(_SHOWN)))


def figures_of(reports: dict[str, StageReport]) -> pd.DataFrame:
    """One row per setting: samples/s, the busy share of each stage, and the share of time training waited."""
    rows = []
    for report in reports.values():
        busy = {row["stage"]: row["busy_ratio"] for row in report.rows}
        shares = {f"{stage} busy": busy.get(stage, 0.0) for stage in _STAGES}
        speed, waits = report.rows[-1]["items_per_s"], report.wait_ratio
        rows.append({"samples/s": speed, **shares, "training waits": waits})
    return pd.DataFrame(rows, index=list(reports))


def loading_figure(figures: pd.DataFrame) -> Figure:
    """Bars of each setting: samples/s, and how busy each stage was, with the time that training waited in grey."""
    figure = Figure(figsize=(11, 1.1 + 0.55 * len(figures)), layout="constrained")
    speed, busy = figure.subplots(1, 2, sharey=True)
    figures["samples/s"].plot.barh(ax=speed, color=PALETTE[0], width=0.6, xlabel="samples/s")
    shares = 100 * figures.drop(columns="samples/s")
    colours: Any = ["#56B4E9", "#0072B2", "#E69F00", GREY]
    shares.plot.barh(ax=busy, color=colours, width=0.75, xlabel="% of the time", xlim=(0, 100))
    speed.invert_yaxis()
    busy.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return figure
