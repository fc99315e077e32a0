"""The training loop: `FusionTrainer`, and what it is made of.

fusion_trainer    `FusionTrainer`: one optimizer step after another, epochs, evaluation, checkpoints
gradient          the gradient of a step, and what ranks must tell each other for it
state             weights and moments for a checkpoint, whoever holds them
options           what is refused before anything begins
"""

from mmlab.trainer.fusion_trainer import FusionTrainer

__all__ = ["FusionTrainer"]
