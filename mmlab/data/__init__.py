"""From what users have to decoded samples: readers of every input format, `Records` (metadata in columns),
decoding, tokenizers, augmentation, generated scenes, `MultimodalDataset`, and conversations prepared by a
model's processor.

Reading and planning touch image headers only; pixels are decoded when a sample is asked for.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "augment": ["Augment"],
        "collate": ["collate"],
        "dataset": ["MultiModalDataset", "MultimodalDataset"],
        "decode": ["decode_image"],
        "conversation_batches": ["ConversationCollator"],
        "conversation_dataset": ["ConversationDataset"],
        "conversation_sizes": ["ConversationSizes", "conversation_sizes"],
        "conversations": ["Conversations", "read_conversations"],
        "readers": ["read_records"],
        "records": ["Records"],
        "synthetic": ["make_dataset"],
        "text": ["load_tokenizer", "measure_tokens"],
    },
)
