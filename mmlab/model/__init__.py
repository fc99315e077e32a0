"""The models that mmlab trains: encoders, cross-attention fusion, presets, and any Hugging Face model.

encoders       images and texts to features with masks, padding without effect
fusion         `MultimodalFusion`: image queries over text
fusion_model   `FusionModel` joins both; `PRESETS`, `build_model`
huggingface    `LossModel`: any module whose forward returns `.loss`
"""

from mmlab.model.encoders import ConvStem, HuggingFaceImages, HuggingFaceTexts, ResNet, ViT
from mmlab.model.fusion import MultimodalFusion
from mmlab.model.fusion_model import PRESETS, FusionModel, FusionOutput, ModelConfig, build_model
from mmlab.model.huggingface import LossModel

__all__ = [
    "PRESETS",
    "ConvStem",
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
]
