"""What one scheduler cost in a comparison: a row of its table. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """What one scheduler cost. Ratios are fractions; medians are over epochs, warm-up steps left out."""

    scheduler: str
    options: dict[str, Any]  # how the scheduler was configured
    num_samples: int  # training samples an epoch
    num_batches: int  # optimizer steps an epoch (the first)
    samples_per_s: float  # median over epochs
    step_s: float  # median over measured steps, data wait not included
    data_wait_ratio: float  # time waiting for data / (waiting + stepping)
    text_waste: float  # padded text tokens that carry nothing
    image_waste: float  # padded image patches that carry nothing
    combined_waste: float
    planned_combined_waste: float  # the same, predicted from metadata before training
    peak_over_budget: float  # costliest batch / budget
    batches_over_budget: int
    shape_mismatches: (
        int  # measured batch shapes that differ from the planned ones; 0 when the plan was right
    )
    peak_bytes: int
    peak_source: str
    num_unlearnt_samples: int  # in batches without negatives (captions of one image only), over all epochs
    final_loss: float  # on the held-out pairs, a mean over samples in candidate sets of one fixed size
    image_to_text_r1: float
    text_to_image_r1: float
    chance_r1: float
    epochs: list[dict[str, float]] = field(default_factory=list)  # every repetition
