"""The training step and its parts: objectives as sums and counts, mixed precision, gradient accumulation over
micro-batches of any size, evaluation, checkpoints. Start with `loop`.

Devices share a step through a strategy passed to the trainer (`mmlab.parallel`); nothing here imports that
package.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpoint.keeping": ["Checkpoints"],
        "loop": ["FusionTrainer"],
        "losses.masked_language": ["MaskedLanguage"],
        "precision": ["Precision"],
        "weighting": ["WEIGHTINGS", "make_weighting"],
    },
)
