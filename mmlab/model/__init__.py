"""What is trained: image and text encoders, cross-attention fusion, presets, and any Hugging Face model.

Padding never changes an output; shapes are documented as (B, T) and (B, C, H, W).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "checkpointing": ["enable_checkpointing"],
        "conversation_model": ["ConversationModel"],
        "fusion": ["MultimodalFusion"],
        "fusion_model": ["FusionModel"],
        "fusions": ["FUSIONS"],
        "huggingface": ["LossModel"],
        "packing": ["enable_packing"],
        "presets": ["PRESETS", "MultimodalModel", "build_model"],
    },
)
