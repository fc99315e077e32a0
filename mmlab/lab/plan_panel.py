"""A panel for notebooks: what would each scheduler's batches waste? Sliders around `preview`, without training.

It works without a front end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets
import numpy as np

from mmlab.comparison.overview import SHOWN_SCHEDULERS
from mmlab.errors import OptionError, check_name, listed
from mmlab.lab.panels import SLIDES, WIDE, Panel, picture, show_picture, slider
from mmlab.lab.plan_figure import page_png, plan_figure
from mmlab.schedule.base import sizes_of
from mmlab.schedule.columns import images_apart
from mmlab.schedule.preview import preview
from mmlab.schedule.schedulers import SCHEDULERS, make_scheduler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mmlab.data.dataset import MultimodalDataset
    from mmlab.schedule.plan import BatchPlan
    from mmlab.types import SampleSizes

MAX_EXPLORED = 16_384  # samples planned at each update; more would take too long
_NUM_EPOCHS = 2  # planned with each scheduler, of which the first is drawn
_SHARES: list[Any] = ["text_waste", "image_waste", "combined_waste", "straggler"]


class PlanExplorer(Panel):
    """Sliders beside a table: what would each scheduler's batches waste on these samples?

    It responds at once even for a large data set, because it plans only 16,384 samples, drawn by image; the
    table says so. `preview` plans them all.

    Args:
        data: a `MultimodalDataset`, whose images are shown in their batches, or sizes alone, with image sizes as the
            model will see them (`records.sizes(policy)`).
        schedulers: names to begin with, of any schedulers but `memory` and `fastest`, which need a priced model.

    Raises:
        OptionError: a name that is none of those, or no samples.
    """

    def __init__(
        self, data: SampleSizes | MultimodalDataset, schedulers: Sequence[str] = SHOWN_SCHEDULERS
    ) -> None:
        dataset: Any = data
        sizes, has_photos = sizes_of(dataset), hasattr(data, "image_policy")
        if not len(sizes):
            raise OptionError("no samples to explore")
        rows = some_images(sizes, MAX_EXPLORED)
        self._num_samples, self._sizes = len(sizes), sizes.take(rows)
        self._photo = (lambda sample: dataset[int(rows[sample])]["image"]) if has_photos else None
        self._mean_cost = make_scheduler("random", batch_size=1).plan(self._sizes).report().mean_cost
        offered = [name for name in SCHEDULERS if name not in ("memory", "fastest")]
        for name in (chosen := listed(schedulers)):
            check_name("scheduler to explore", name, offered)
        self.schedulers = widgets.SelectMultiple(
            options=offered, value=chosen, rows=len(offered), description="schedulers", style=WIDE
        )
        self.samples = slider("budget, samples", 32, 4, 256)
        self.window = widgets.SelectionSlider(
            options=[2**power for power in range(8, 15)], value=2**14, description="budget's window", **SLIDES
        )
        self.text_step = slider("bucket, tokens", 8, 1, 64)
        self.classes = slider("bucket, aspects", 4, 1, 16)
        self.ranks = slider("ranks", 1, 1, 16)
        self.table = widgets.HTML()
        self.picture = picture()
        sliders = [self.samples, self.window, self.text_step, self.classes, self.ranks]
        above = widgets.HBox([self.schedulers, widgets.VBox(sliders)], layout={"flex_flow": "row wrap"})
        super().__init__([above], [self.table, self.picture])
        for control in (self.schedulers, *sliders):
            control.observe(self.showing(self._update), "value")
        self._update()

    @property
    def text(self) -> str:
        """The figures of the current plans."""
        return str(self.found)

    def _update(self) -> None:
        planned: list[BatchPlan] = []

        def keep(plan: BatchPlan, _num_ranks: int) -> dict[str, float | None]:
            planned.append(plan)
            return {}

        found = self.found = preview(
            self._sizes,
            self.schedulers.value,
            budget=self.samples.value * self._mean_cost,
            ranks=self.ranks.value,
            window=self.window.value,
            text_step=self.text_step.value,
            classes_per_octave=self.classes.value,
            epochs=_NUM_EPOCHS,
            allow_collisions=False,
            prices=keep,
        )
        plans = dict(zip(found.figures, planned[::_NUM_EPOCHS], strict=True))
        table = found.table[["num_batches", *_SHARES, "peak_over_budget", "randomness"]]
        style = table.style.format("{:.2f}").format("{:.0f}", ["num_batches"]).format("{:.1%}", _SHARES)
        style = style.format_index(lambda name: str(name).replace("_", " "), axis="columns")
        style = style.bar(_SHARES, vmin=0, vmax=1, color="#E69F0080", width=80)
        style = style.bar(["randomness"], vmin=0, vmax=1, color="#56B4E980", width=80)
        head = f"Budget {found.budget:.0f} padded tokens a batch; means of {_NUM_EPOCHS} epochs, pictures of the first."
        if not plans:
            head += " Choose at least one scheduler."
        if any(plan.limits.streams is not None for plan in plans.values()):
            head += (
                " Packs have no padding: their waste is the unfilled end of a stream, which no picture shows."
            )
        if len(self._sizes) < self._num_samples:
            head += f" Estimated from {len(self._sizes):,} of {self._num_samples:,} samples."
        # a name of the panel would give its table the bars of a saved copy on the page
        self.table.value = f"<p>{head}</p>{style.to_html(table_uuid=str(hash(str(table))))}"
        show_picture(self.picture, page_png(plan_figure, plans, found.budget, self._photo) if plans else b"")


def some_images(sizes: SampleSizes, num_samples: int) -> NDArray[np.int64]:
    """The rows of all samples of randomly drawn images, together at most `num_samples`."""
    if len(sizes) <= num_samples:
        return np.arange(len(sizes))
    group = images_apart(sizes.group)
    images, counts = np.unique(group, return_counts=True)
    order = np.random.default_rng(0).permutation(len(images))
    return np.flatnonzero(np.isin(group, images[order[np.cumsum(counts[order]) <= num_samples]]))
