"""`TrainOptions`: every option of a training step, the same for Python, TOML, the command line and the panel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from mmlab.errors import OptionError, check_name, check_numbers, listed
from mmlab.model.parameters import PARTS


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How a model is trained. Values are plain, so that a TOML file can hold them.

    >>> TrainOptions(lr=1e-3, precision="bf16").lr
    0.001

    Args:
        objectives: names in `mmlab.training.losses.names.OBJECTIVES`; their means are added. A model that computes its own
            loss does not use them. "contrastive_all_ranks" is "contrastive" with the negatives of all ranks.
        weighting: how the factors of several objectives are chosen, a name in `mmlab.training.weighting.WEIGHTINGS`.
        eval_every: optimizer steps between evaluations within an epoch; None evaluates after each epoch only.
        eval_batches: number of batches, the loader's first, for an evaluation within an epoch; None takes
            all.
        precision: "fp32", "tf32", "bf16" or "fp16".
        device: "cpu" or "cuda:0"; None takes a GPU if there is one.
        lr: highest learning rate, reached after `warmup_ratio` of the steps; a cosine then takes it to zero.
        weight_decay: of weights with two or more dimensions; biases, norms and the temperature have none.
        warmup_ratio: share of the steps in which the learning rate rises.
        total_steps: length of the schedule; None lets `fit` work it out. `train_step` alone then keeps `lr` constant.
        accumulation_steps: micro-batches in one optimizer step.
        max_grad_norm: L2 limit of the whole gradient, or a limit for each part (image, text, fusion, heads).
        freeze: names of parameters that are not trained, with wildcards (`image_encoder.*`); a text is one name, here and
            in `objectives`.
        checkpointing: recompute activations in the backward pass instead of keeping them.
        compile: True calls the model through `torch.compile`, see `mmlab.model.compiling`; a name chooses the backend.
            Evaluation is not compiled.
        channels_last: keep images and convolutions in the memory order that tensor cores prefer.
        on_out_of_memory: "split" runs the step again in parts, with the same gradient; "raise" raises the error;
            "auto" splits if strategy and objectives allow it.
        on_nonfinite: "raise" an error or "skip" the step if the loss, or the gradient without a loss scale,
            is not finite.
        seed: of dropout and drawn negatives.

    Raises:
        OptionError: an unknown policy or part of the model, or a number out of range. The trainer checks the other names.
    """

    objectives: tuple[str, ...] = ("contrastive",)
    weighting: str = "fixed"
    eval_every: int | None = None
    eval_batches: int | None = None
    precision: str = "fp32"
    device: str | None = None
    lr: float = 1e-4
    weight_decay: float = 0.01
    warmup_ratio: float = 0.05
    total_steps: int | None = None
    accumulation_steps: int = 1
    max_grad_norm: float | Mapping[str, float] = 1.0
    freeze: tuple[str, ...] = ()
    checkpointing: bool = False
    compile: bool | str = False
    channels_last: bool = False
    on_out_of_memory: str = "auto"
    on_nonfinite: str = "raise"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("objectives", "freeze"):  # a text is one name, not its letters
            found = getattr(self, name)
            object.__setattr__(self, name, listed(found or (), f"{name} must be a list of names"))
        object.__setattr__(self, "device", None if self.device is None else str(self.device))
        check_name("policy for out-of-memory", self.on_out_of_memory, ("auto", "split", "raise"))
        check_name("policy for losses that are not finite", self.on_nonfinite, ("raise", "skip"))
        check_numbers(self)
        limits = self.max_grad_norm
        by_part = limits if isinstance(limits, Mapping) else dict.fromkeys(PARTS, limits)
        for part, limit in by_part.items():
            check_name("part of the model", part, PARTS)
            if not isinstance(limit, Real) or not limit > 0:
                raise OptionError(f"max_grad_norm must be above 0 (infinity does not clip), found {limits}")
