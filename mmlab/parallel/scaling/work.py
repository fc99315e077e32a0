"""What one device does in a step, part by part, and what the parts weigh."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from mmlab.parallel.scaling.links import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one device does for a number of samples, part by part; and what the parts weigh."""

    image_forward: Line
    image_backward: Line
    text_forward: Line
    text_backward: Line
    fusion_forward: Line  # fusion, heads and losses
    fusion_backward: Line
    optimizer_s: float  # of all parameters
    other_s: float  # the trainer's own: counting, clipping, the event
    image_bytes: float  # gradients of each part
    text_bytes: float
    fusion_bytes: float
    image_feature_bytes: float  # of one sample, that fusion reads
    text_feature_bytes: float

    @property
    def gradient_bytes(self) -> float:
        return self.image_bytes + self.text_bytes + self.fusion_bytes

    def branches_s(self, num_samples: float) -> dict[str, float]:
        """Forward and backward of each part together."""
        return {
            part: getattr(self, f"{part}_forward")(num_samples)
            + getattr(self, f"{part}_backward")(num_samples)
            for part in ("image", "text", "fusion")
        }

    def step_s(self, num_samples: float) -> float:
        """One device, one step."""
        return sum(self.branches_s(num_samples).values()) + self.optimizer_s + self.other_s

    def scaled(self, factor: float) -> Work:
        """The same on a device that takes `factor` times as long."""
        changed: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Line):
                changed[item.name] = Line(factor * value.fixed_s, factor * value.each_s)
            elif item.name.endswith("_s"):
                changed[item.name] = factor * value
        return replace(self, **changed)
