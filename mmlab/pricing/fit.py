"""Fit a closed form of the memory that any batch needs to traces of a few small steps.

Which operations a step has depends on the shape in a few places: attention pads its bias unless a length is a
multiple of 8; an image of the size that a vision transformer was made for needs no resized position
embedding; a batch of one leaves out an operation. Probes avoid all of these by lengths of 8k + 1, where
padding is largest. So all probes have the same, most general sequence of operations, and a shape that leaves
some out is predicted at or above what it needs. Operations that occur more often in some probes than in
others are merged with their predecessors (`_aligned`).

A fit costs a trace for each probe and each held-out shape: 10 to 20 CPU seconds for the base preset.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import OptionError, check_numbers
from mmlab.machine import progress_bar
from mmlab.pricing.closed_form import fit_rows, held_out_errors, step_terms
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.probe_batches import ProbeBatches
from mmlab.pricing.trace import StepTrace, StepTracer
from mmlab.schedule.cost import batch_costs, for_images_of
from mmlab.types import PATCH, BatchShape

_SIZES = (2, 3, 4, 6, 8, 12, 16)  # samples in a probe
_TEXTS = (9, 17, 33, 65, 97, 129)  # tokens
_GRIDS = ((3, 3), (3, 11), (5, 5), (5, 13), (9, 9), (7, 15), (11, 11), (13, 13))  # patches; product 8k + 1
_UNSEEN = (128, 256, 24, 24)  # largest held-out shape: samples, tokens, patches high and wide
_LARGEST_SIZE, _LONGEST_TEXT, _LARGEST_IMAGE = 4096, 512, 48**2  # up to which the fit's rows are kept


def fit_memory(
    model: nn.Module,
    *,
    dataset: ConversationDataset | None = None,
    num_held_out: int = 6,
    patch: int | None = None,
    progress: bool = True,
    **setting: Any,
) -> MemoryModel:
    """Fit the memory that a training step of a model needs, for batches of any shape.

    Args:
        dataset: for a `ConversationModel`; its processor makes the batches. None makes them of pixels and
            tokens.
        num_held_out: traced steps, of larger batches than the fitted ones, on which the fit's errors are
            reported.
        patch: side in pixels of the cells in which image sides are counted, rounded up. None takes the vision
            model's patch, else 16. For a ResNet, 32 is exact if all sides are multiples of 32; with 16, its
            last stage is priced as at the next odd number of cells, a per cent or two too high for other
            sides.
        setting: the fields of `mmlab.pricing.trace.StepSetting`: `precision`, `device`, `checkpointing`, ...

    Raises:
        OptionError: fewer than 0 held-out shapes, a patch below 1 pixel, an unknown name, a step that cannot be
            priced, or one whose operations depend on the shape in other ways.
    """
    check_numbers({"num_held_out": num_held_out, "patch": patch})
    if dataset is None:
        tracer = StepTracer(model, **setting)
        patch, most_tokens = patch or patch_of(model), _most_tokens(model)
        side = _only_side(tracer, _vision_config(model), patch)
        ratios = [getattr(goal, "mask_ratio", 0.0) for goal in tracer.objectives.values()]
        candidates = _candidates(patch, most_tokens, side, max(ratios))
        unseen = _unseen(num_held_out, patch, most_tokens, side)
        largest = (_LARGEST_SIZE, most_tokens, _LARGEST_IMAGE)
    else:
        batches = ProbeBatches(dataset)
        tracer, patch, side = StepTracer(model, batches=batches, **setting), PATCH, None
        candidates, unseen, largest = batches.candidates(), batches.spread(num_held_out), batches.largest
    probes = _probes(candidates, patch)
    bar = progress_bar([*probes, *unseen], "pricing", unit="step", show=progress)
    traces = [tracer(shape) for shape in bar]
    live = _aligned(traces[: len(probes)])
    rows = fit_rows(probes, live, step_peak_bytes=tracer.step_peak_bytes, patch=patch, largest=largest)
    if dataset is not None:
        rows = for_images_of(dataset.sizes, rows)
    peaks = np.array([trace.peak_bytes for trace in traces[len(probes) :]])
    return MemoryModel(
        rows=rows,
        fingerprint=fingerprint(model),
        conditions=tracer.setting.conditions | ({} if side is None else {"image_size": side}),
        held_out=held_out_errors(batch_costs(rows, unseen), peaks),
    )


def _candidates(patch: int, most_tokens: int, side: int | None, ratio: float = 0.0) -> NDArray[np.int64]:
    """(n, 4) shapes to choose probes from.

    Args:
        ratio: of tokens that masked language modelling hides. Their number is rounded; from the texts where it is rounded up
            most, no other text is priced too low.
    """
    lengths = dict.fromkeys((*_TEXTS, *range(25, 226, 8))) if ratio else _TEXTS
    texts = [tokens for tokens in lengths if tokens <= most_tokens]
    texts = sorted(texts, key=lambda tokens: ratio * tokens - round(ratio * tokens))[: len(_TEXTS)]
    images = [(high * patch, wide * patch) for high, wide in _GRIDS] if side is None else [(side, side)]
    return np.array([(size, tokens, *image) for size, tokens, image in product(_SIZES, texts, images)])


def _probes(shapes: NDArray[np.int64], patch: int) -> NDArray[np.int64]:
    """The shapes that tell the terms apart best, two more than there are terms.

    A D-optimal design, chosen greedily: `covariance` is, up to a factor, that of the coefficients after the
    probes so far, and the next probe is the shape whose prediction varies most under it.
    """
    terms = step_terms(shapes, patch)[0]
    # a fit divides errors by the bytes, which grow roughly like the sum of the terms
    terms /= (terms / terms.max(axis=0)).sum(axis=1, keepdims=True)
    terms /= terms.max(axis=0)
    covariance, chosen = np.eye(terms.shape[1]) * 1e6, []
    for _ in range(terms.shape[1] + 2):
        unknown = np.einsum("nm,mk,nk->n", terms, covariance, terms)
        chosen.append(int(unknown.argmax()))
        step = covariance @ terms[chosen[-1]]
        covariance -= np.outer(step, step) / (1 + unknown.max())  # Sherman and Morrison
    return shapes[chosen]


def _unseen(num: int, patch: int, most_tokens: int, side: int | None) -> NDArray[np.int64]:
    """(num, 4) shapes anywhere, up to far larger than the probes."""
    rng = np.random.default_rng(0)
    size, tokens, high, wide = rng.integers((16, 4, 4, 4), _UNSEEN, (num, 4), endpoint=True).T
    sides = (high * patch, wide * patch) if side is None else np.full((2, num), side)
    return np.stack([size, np.minimum(tokens, most_tokens), *sides], axis=1)


def _aligned(traces: Sequence[StepTrace]) -> NDArray[np.int64]:
    """(n, E) peak bytes from each operation that occurs equally often in all traces until the next such one.

    A few operations occur more often in one step than in another: a vision tower may loop over images, and a
    mask that hides nothing is left out. Those count with the operation before them.
    """
    counts = [Counter(trace.operations) for trace in traces]
    alike = {name for name, count in counts[0].items() if all(other[name] == count for other in counts)}
    orders = {tuple(name for name in trace.operations if name in alike) for trace in traces}
    if len(orders) > 1:
        raise OptionError(
            "the order of a step's operations depends on the shape, so there is no closed form: price each shape"
        )

    def begins(trace: StepTrace) -> list[int]:
        return [0, *(place for place, name in enumerate(trace.operations) if name in alike)]

    return np.stack([np.maximum.reduceat(trace.live_bytes, begins(trace)) for trace in traces])


def _most_tokens(model: nn.Module) -> int:
    """The longest text that every position table in the model can hold."""
    limits = [
        limit
        for config in _configs(model)
        for name in ("max_position_embeddings", "n_positions")
        if isinstance(limit := getattr(config, name, None), int) and limit > 0
    ]
    return min([_LONGEST_TEXT, *limits])


def patch_of(model: nn.Module) -> int:
    """Side in pixels of the image encoder's patches, 16 if the model does not state it."""
    return getattr(_vision_config(model), "patch_size", None) or PATCH


def _vision_config(model: nn.Module) -> Any:
    """The configuration with a patch or an image size; None where there is none."""
    found = (config for config in _configs(model) if {"patch_size", "image_size"} & vars(config).keys())
    return next(found, None)


def _only_side(tracer: StepTracer, vision: Any, patch: int) -> int | None:
    """The side of the one square image size that a model takes; None if a trace of another size works."""
    side = getattr(vision, "image_size", None)
    if not isinstance(side, int):
        return None
    try:
        tracer(BatchShape(2, 9, 3 * patch, 5 * patch))
    except (ValueError, RuntimeError):
        return side  # transformers refuses a size with these; any other cause comes up at the first probe
    return None


def _configs(model: nn.Module) -> Iterator[Any]:
    """The transformers configurations of a model and its parts, each with those inside it."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            yield config
            yield from (part for part in vars(config).values() if hasattr(part, "to_dict"))
