"""mmlab's batches in another trainer: transformers' Trainer and TRL, accelerate, Lightning, a loop of your own.

A `PlannedSampler` is the batch sampler of a torch DataLoader; the other names fit it into each trainer and write mmlab's
events, so that the live panel and `mmlab watch` follow the run. Each trainer is imported only where its name is used.
`conversation_sizes` and `ConversationCollator` plan and collate conversations for any vision-language model.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "conversation_batches": ["ConversationCollator"],
        "processor_sizes": ["ConversationSizes", "conversation_sizes"],
        "sampler": ["PlannedSampler", "sample_sizes"],
        "step_prices": ["StepPrices", "price_conversations", "price_model", "price_steps"],
        "trainer": ["PlannedBatches", "PlannedTrainer"],
        "trainer_events": ["TrainerEvents"],
        "with_accelerate": ["prepare_loader"],
        "with_lightning": ["LightningEvents", "PlannedDataModule"],
        "writer": ["RunWriter"],
    },
)
