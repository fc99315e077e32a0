"""mmlab's batches in another trainer: transformers' Trainer and TRL, accelerate, Lightning, a loop of your own.

A `PlannedSampler` is the batch sampler of a torch DataLoader; the other names connect it to each trainer and
write mmlab's events, so that the live panel and `mmlab watch` can follow the run. A trainer's library is
imported only when one of its names is used.
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
