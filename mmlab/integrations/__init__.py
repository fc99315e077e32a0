"""mmlab's batches in another trainer: transformers' Trainer and TRL, accelerate, Lightning, a loop of your own.

A `PlannedSampler` is the batch sampler of a torch DataLoader; the other names fit it into each trainer and write mmlab's
events, so that the live panel and `mmlab watch` follow the run. Each trainer is imported only where its name is used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "sampler": ["PlannedSampler", "sample_sizes"],
        "trainer": ["PlannedBatches", "PlannedTrainer"],
        "trainer_events": ["TrainerEvents"],
        "with_accelerate": ["prepare_loader"],
        "with_lightning": ["LightningEvents", "PlannedDataModule"],
        "writer": ["RunWriter"],
    },
)
