"""Helpers of the notebooks: small sizes for tests, scenes to train on, a large set of sizes to plan.

Nothing here is used by the rest of mmlab.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from mmlab.data.synthetic import make_dataset
from mmlab.data.synthetic.scenes import draw_size
from mmlab.errors import check_name
from mmlab.model.fusion import MultimodalFusion
from mmlab.types import SampleSizes

Value = TypeVar("Value")


def smoke(small: Value, full: Value) -> Value:
    """`small` if MMLAB_SMOKE=1 is set, as it is when notebooks are tested, else `full`."""
    return small if os.environ.get("MMLAB_SMOKE") == "1" else full


def device_of_ranks(num_ranks: int) -> str:
    """`auto` if each rank can have a GPU of its own, else `cpu`: two ranks cannot share one."""
    return "auto" if torch.cuda.device_count() >= num_ranks else "cpu"


def scenes() -> Path:
    """The folder of the 800 generated scenes that the notebooks and `make demo` share; made if missing.

    Each has five captions, and 80 of them are the split `val`. Making it takes some seconds. Only 60 scenes
    when notebooks are tested.
    """
    num_images = smoke(60, 800)
    folder = Path("../runs") / ("scenes" if num_images == 800 else f"scenes-{num_images}")
    if not folder.exists():
        with suppress(OSError):  # another notebook made it in the meantime
            make_dataset(folder, num_images=num_images, max_side=256, progress=False)
    return folder


def draw_sizes(num_images: int, *, captions_per_image: int = 5, seed: int = 0) -> SampleSizes:
    """Sizes and lengths as COCO has them, for planning at a scale that needs no files.

    Image sizes are those of `mmlab data make`. Text lengths follow 8 + a gamma distribution with COCO's mean (13.4
    tokens), deviation (2.6) and 99th percentile (22); the tail above it is thinner than COCO's.

    >>> len(draw_sizes(20))
    100

    Args:
        captions_per_image: samples that share an image.
    """
    rng = random.Random(seed)
    width, height = np.array([draw_size(rng) for _ in range(num_images)], dtype=np.int32).reshape(-1, 2).T
    image = np.repeat(np.arange(num_images), captions_per_image)
    text = 8 + np.random.default_rng(seed).gamma(4.3, 1.25, size=len(image))
    return SampleSizes(num_tokens=np.rint(text), height=height[image], width=width[image], group=image)


def change_by_one_text(fusion: str) -> list[float]:
    """How much the image features of eight samples change when only the first sample's text does.

    >>> [round(change, 1) for change in change_by_one_text("mmlab")]
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]

    Args:
        fusion: "mmlab" for `MultimodalFusion`; "article" for its attention as article C calls it, with features (B, T, D)
            and without `batch_first=True`, so that torch takes the batch dimension for the sequence.

    Returns:
        Mean distance of each sample's features, as a share of the largest.
    """
    check_name("fusion", fusion, ("mmlab", "article"))
    generator = torch.Generator().manual_seed(0)
    image, text, other = (torch.randn(8, 12, 512, generator=generator) for _ in range(3))
    other[1:] = text[1:]
    article, ours = nn.MultiheadAttention(512, 8).eval(), MultimodalFusion(512, 512).eval()
    fuse: Any = ours if fusion == "mmlab" else lambda image, words: article(image, words, words)[0]
    with torch.no_grad():
        change = (fuse(image, text) - fuse(image, other)).norm(dim=2).mean(1)
    return (change / change.max()).tolist()
