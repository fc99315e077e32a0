"""A picture of plans: padding in some batches of the first and the last plan, and the cost of every batch.

Costs a tenth of a second, most of it in matplotlib, and as much again if images are decoded for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from mmlab.runs.figures import GREY, colours_of, to_bytes
from mmlab.schedule.cost import PaddedTokens
from mmlab.types import PATCH

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from mmlab.schedule.plan import BatchPlan

_INK = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
_CLEAR: Any = dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none")
_OPEN: Any = dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
_ON_ANY_PAGE: Any = {**_CLEAR, **_OPEN, **dict.fromkeys(_INK, GREY), "image.cmap": "cool"}
_NUM_BATCHES = 5  # shown of a plan, one below the other
_NUM_SAMPLES = 9  # and of each batch, side by side
_PIXELS, _STEP = 8, PATCH // 8  # picture pixels along a patch; distance of the image pixels taken for them
_KINDS = np.array([(0, 0, 0, 0), (128, 128, 128, 70), (0, 114, 178, 255), (217, 140, 0, 255)], np.uint8)
EMPTY, PADDING, IMAGE, TEXT = range(len(_KINDS))


def page_png(draw: Callable[..., Figure], *arguments: Any) -> bytes:
    """A figure as a PNG file that is readable on a light page and on a dark one."""
    with rc_context(_ON_ANY_PAGE):
        return to_bytes(draw(*arguments))


def plan_figure(
    plans: Mapping[str, BatchPlan], budget: float, photo: Callable[[int], Tensor | None] | None = None
) -> Figure:
    """Some batches of the first and the last plan, and histograms of batch costs, with the limit dashed.

    Args:
        photo: (3, h, w) the image of a sample, to be shown in its place.
    """
    shown = list(dict.fromkeys((*list(plans)[:1], *list(plans)[-1:])))
    figure = Figure(figsize=(2.9 * len(shown) + 3.1, 2.9))
    axes = figure.subplots(1, len(shown) + 1)
    # margins by hand: a layout engine takes as long as everything else
    figure.subplots_adjust(left=0.01, right=0.98, bottom=0.19, top=0.82, wspace=0.28)
    pictures = [_picture(plans[name], photo) for name in shown]
    high, wide = np.max([picture.shape[:2] for picture in pictures], axis=0, initial=1)
    for area, name, picture in zip(axes, shown, pictures, strict=False):
        area.imshow(picture)
        area.set(xlim=(0, wide), ylim=(high, 0))  # one scale
        area.set_title(f"{name}: {min(_NUM_BATCHES, n := len(plans[name]))} of {n:,} batches", size="medium")
        area.set_axis_off()
    image = "" if photo else "blue: image, "
    kinds = f"rows: the first samples of batches, the cheapest on top; {image}orange: text, grey: padding; dashed: limit"
    figure.text(0.01, 0.02, fill(kinds, 46 * len(shown)), fontsize="small")
    colours = colours_of(plans)
    area, found = axes[-1], {name: plan.costs(PaddedTokens()) for name, plan in plans.items()}
    highest = max([1.02 * budget, *(values.max() for values in found.values())])
    for name, values in found.items():
        counts, edges = np.histogram(values, bins=40, range=(0, highest))
        area.stairs(counts, edges, label=name, color=colours[name], lw=1.4)
    area.axvline(budget, color=GREY, lw=1, ls="--")
    area.set(xlabel="padded tokens of a batch", ylabel="batches", ylim=(0, None))
    area.locator_params(nbins=4)
    figure.legend(loc="upper right", ncols=len(plans), frameon=False, fontsize="small", handlelength=1)
    return figure


def _picture(plan: BatchPlan, photo: Callable[[int], Tensor | None] | None) -> NDArray[np.uint8]:
    """(H, W, 4) the thumbnails of a plan in colours, with the images in their places."""
    cells, places = thumbnails(plan)
    picture = _KINDS[cells].repeat(_PIXELS, 0).repeat(_PIXELS, 1)
    for (top, left), sample in places.items():
        if photo is not None and (pixels := photo(sample)) is not None:
            small = pixels[:, ::_STEP, ::_STEP].permute(1, 2, 0).numpy()
            at = picture[top * _PIXELS :, left * _PIXELS :]
            at[: small.shape[0], : small.shape[1], :3] = small
    return picture


def thumbnails(plan: BatchPlan) -> tuple[NDArray[np.int64], dict[tuple[int, int], int]]:
    """Some batches of a plan, from cheapest to costliest, as a picture: (H, W) kinds of cells, one per patch.

    A row is a batch and shows its first samples: each is the padded image with the useful part filled, above
    the text. The second result maps the cell (top, left) where an image begins to its sample.
    """
    places: dict[tuple[int, int], int] = {}
    if not len(plan):
        return np.zeros((1, 1), np.int64), places
    batches, sizes = plan.columns, plan.sizes
    padding = PADDING if plan.limits.streams is None else EMPTY  # packs have none
    by_cost = np.argsort(plan.costs(), kind="stable")
    rows: list[NDArray[np.int64]] = []
    for batch in by_cost[np.linspace(0, len(plan) - 1, min(_NUM_BATCHES, len(plan))).astype(int)]:
        end, count = batches.ends[batch], batches.counts[batch]
        members = batches.order[end - count : end][:_NUM_SAMPLES]
        tokens, height, width = (int(most) for most in plan.shape_columns[batch, 1:])
        high, wide = -(-height // PATCH), max(4, -(-width // PATCH))
        row = np.full((high + 4, _NUM_SAMPLES * (wide + 2)), EMPTY)
        for place, sample in enumerate(members):
            places[sum(map(len, rows)), place * (wide + 2)] = int(sample)
            cell = row[:, place * (wide + 2) : place * (wide + 2) + wide]
            cell[: high + 2] = padding
            cell[: -(-sizes.height[sample] // PATCH), : -(-sizes.width[sample] // PATCH)] = IMAGE
            cell[high : high + 2] = padding
            cell[high : high + 2, : round(wide * sizes.num_tokens[sample] / max(1, tokens))] = TEXT
        rows.append(row)
    most = max(row.shape[1] for row in rows)
    return np.concatenate([np.pad(row, ((0, 0), (0, most - row.shape[1]))) for row in rows]), places
