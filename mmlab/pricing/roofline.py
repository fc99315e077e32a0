"""Seconds of a training step on a device that need not be there, from the traces that price its memory.

Every operation of a traced step has its arithmetic and its bytes (`mmlab.pricing.work`), and a device its
rates (`mmlab.pricing.devices`). The seconds of a few shapes are fitted by the same closed form as measured
ones. The model is labelled as a prediction. It leaves out data loading, communication, fragmentation and
thermal throttling.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import check_numbers
from mmlab.machine import progress_bar
from mmlab.pricing.closed_form import held_out_errors
from mmlab.pricing.devices import Device, find_device
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.fit import patch_of
from mmlab.pricing.probe_batches import ProbeBatches
from mmlab.pricing.time_model import TimeModel, fit_polynomial
from mmlab.pricing.timing import probe_shapes
from mmlab.pricing.trace import StepTracer
from mmlab.schedule.cost import PaddedTokens, batch_costs
from mmlab.types import PATCH, CostModel, SampleSizes

_NUM_PROBES, _NUM_SHAPES = 12, 16  # the shapes that are fitted come first, the rest are held out


def predict_time(
    model: nn.Module,
    sizes: SampleSizes,
    device: Device | str,
    *,
    dataset: ConversationDataset | None = None,
    cost: CostModel | None = None,
    budget: float = 131_072,
    progress: bool = True,
    **setting: Any,
) -> TimeModel:
    """Predict the seconds that a training step of a model takes on a named device, for batches of any shape.

    Costs 16 traces, about 12 CPU seconds for the base preset.

    Args:
        model: any model that `FusionTrainer` accepts; it is not changed, and may be on the meta device.
        sizes: of the data, after the image policy: the shapes are those that batches of these samples can
            have.
        device: a name in `mmlab.pricing.devices.DEVICES`, or a `Device`.
        dataset: for a `ConversationModel`; its processor makes the batches, of up to 16 samples whatever the
            budget.
        cost: the cost that limits the batches, for example a `MemoryModel`; None counts padded tokens.
        budget: the most that a batch costs. Larger batches are extrapolated.
        setting: fields of `mmlab.pricing.trace.StepSetting` but `device`: `precision`, `checkpointing`, ...

    Returns:
        A time model whose condition `method` is "predicted, not measured". `held_out` has its errors against the
        roofline on four further shapes, not against measurements.

    Raises:
        OptionError: an unknown device, a precision that it does not support, a step that cannot be priced, or a budget
            that is not finite or below two of the largest samples.
    """
    check_numbers({"budget": budget})
    device = find_device(device) if isinstance(device, str) else device
    precision = setting.get("precision", "fp32")
    device.check_precision(precision)
    if dataset is None:
        batches, patch = None, patch_of(model)
        shapes = probe_shapes(sizes, _NUM_SHAPES, cost or PaddedTokens(patch), budget)
    else:
        batches, patch = ProbeBatches(dataset), PATCH
        shapes = batches.spread(_NUM_SHAPES)
    tracer = StepTracer(model, batches=batches, device=device.kind, **setting)
    bar = progress_bar(shapes.tolist(), f"predicting {device.name}", unit="step", show=progress)
    seconds = np.array([device.seconds(tracer(shape), precision) for shape in bar])
    rows = fit_polynomial(shapes[:_NUM_PROBES], seconds[:_NUM_PROBES], patch=patch)
    # a model with a loss of its own has no other objective
    about = {**tracer.setting.conditions, "objectives": " + ".join(tracer.objectives)}
    return TimeModel(
        rows=rows,
        fingerprint=fingerprint(model),
        conditions={**about, "method": "predicted, not measured", "device": device.name},
        held_out=held_out_errors(batch_costs(rows, shapes[_NUM_PROBES:]), seconds[_NUM_PROBES:]),
    )
