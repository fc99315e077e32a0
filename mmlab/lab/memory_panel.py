"""A panel for notebooks: how large do batches become on a device with a given amount of memory?

Sliders around `plan_memory`; it works without a front end. Each update plans at most 16,384 samples, drawn by
image, in a fraction of a second.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ipywidgets as widgets
import numpy as np

from mmlab.errors import check_is
from mmlab.lab.panels import LONG, SLIDES, WIDE, Panel, picture, show_picture
from mmlab.lab.plan_figure import page_png
from mmlab.lab.plan_panel import MAX_EXPLORED, some_images
from mmlab.machine import GIB
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.memory_report import PlannedMemory, plan_memory
from mmlab.types import SampleSizes


class MemoryPanel(Panel):
    """Widgets for memory and a way of training, beside the batches that these allow and the bytes needed.

    Args:
        sizes: the samples, with image sizes as the model will see them (`records.sizes(policy)`).
        models: fitted memory models by names for them, such as "bf16, checkpointing".
        memory_gb: GiB for a step's tensors: least (above 0), most, and initial value.

    Raises:
        OptionError: there is no model.
    """

    def __init__(
        self,
        sizes: SampleSizes,
        models: Mapping[str, MemoryModel],
        *,
        memory_gb: tuple[float, float, float] = (2, 80, 16),
    ) -> None:
        check_is("models", models or None, Mapping, "fitted memory models by names for them, at least one")
        self._sizes, self._models = sizes.take(some_images(sizes, MAX_EXPLORED)), dict(models)
        part = f"<br>planned for {len(self._sizes):,} of {len(sizes):,} samples: more have fuller batches"
        self._part = part if len(self._sizes) < len(sizes) else ""
        low, high = np.log10(memory_gb[:2]).tolist()
        shown: dict[str, Any] = {"description": "memory, GiB", "readout_format": ".3g", **SLIDES}
        self.memory = widgets.FloatLogSlider(value=memory_gb[2], min=low, max=high, step=0.02, **shown)
        self.model = widgets.Dropdown(options=list(models), description="training", style=WIDE, layout=LONG)
        self.summary, self.picture = widgets.HTML(), picture()
        controls = (self.memory, self.model)
        beside = widgets.HBox([widgets.VBox(controls), self.summary], layout={"flex_flow": "row wrap"})
        super().__init__([beside], [self.picture])
        for control in controls:
            control.observe(self.showing(self._update), "value")
        self._update()

    def planned(self) -> PlannedMemory:
        """The epoch with the chosen memory and way of training."""
        return plan_memory(self._models[self.model.value], self._sizes, round(self.memory.value * GIB))

    def _update(self) -> None:
        planned = self.planned()
        figures = planned.figures()
        if planned.plan is None:
            needed, usable = planned.sample_bytes.max() / GIB, planned.target_bytes / GIB
            self.summary.value = f"<b>Does not fit:</b> one sample needs {needed:.4g} GiB, has {usable:.4g}."
        else:
            fixed = f"a fixed batch size that always fits is {figures['fixed_batch_size']}"
            if planned.limited_by_images:
                fixed = "the memory is not filled: larger batches would hold two captions of one image"
            self.summary.value = (
                f"<b>{figures['mean_batch_size']:.0f} samples a batch</b> on average<br>{figures['num_batches']} batches"
                f"<br>{figures['mean_use_ratio']:.0%} of the memory used, at most {figures['max_use_ratio']:.0%}"
                f"<br>{fixed}{self._part}"
            )
        show_picture(self.picture, page_png(planned.figure) if planned.plan else b"")

    @property
    def text(self) -> str:
        """The result in words."""
        return re.sub("<.*?>", "", self.summary.value.replace("<br>", "; "))
