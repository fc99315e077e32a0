"""The models that mmlab trains: encoders, cross-attention fusion, presets, and any Hugging Face model.

encoders              images to features with masks, padding without effect: ViT, ResNet
huggingface_encoders  the same and texts by any `transformers` model; BERT
fusion                `MultimodalFusion`: image queries over text
fusions               the same over several depths, and simpler baselines: `FUSIONS`
token_head            tells hidden tokens from text and image
fusion_model          `FusionModel` joins encoders and fusion
presets               its sizes: `PRESETS`, `build_model`
huggingface           `LossModel`: any module whose forward returns `.loss`
checkpointing         `enable_checkpointing`: less memory for more computation
packing               `enable_packing`: samples end to end, no computation on padding
parameters            parts of a model, groups of an optimizer
"""

from mmlab.model.checkpointing import enable_checkpointing
from mmlab.model.encoders import ConvStem, ResNet, ViT
from mmlab.model.fusion import MultimodalFusion
from mmlab.model.fusion_model import Encoded, FusionModel, FusionOutput
from mmlab.model.fusions import FUSIONS, Fusion
from mmlab.model.huggingface import LossModel, taking_batches
from mmlab.model.huggingface_encoders import HuggingFaceImages, HuggingFaceTexts
from mmlab.model.packing import enable_packing
from mmlab.model.presets import PRESETS, ModelConfig, build_model

__all__ = [
    "FUSIONS",
    "PRESETS",
    "ConvStem",
    "Encoded",
    "Fusion",
    "FusionModel",
    "FusionOutput",
    "HuggingFaceImages",
    "HuggingFaceTexts",
    "LossModel",
    "ModelConfig",
    "MultimodalFusion",
    "ResNet",
    "ViT",
    "build_model",
    "enable_checkpointing",
    "enable_packing",
    "taking_batches",
]
