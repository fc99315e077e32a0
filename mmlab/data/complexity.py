"""How much there is to see in an image: the entropy of its gradients at low resolution.

An image is decoded in grey at about 64 x 64 pixels (JPEGs by their own reduced-scale decoding), in parallel,
and the result is saved beside the images, as their sizes are (`mmlab.data.readers.sidecar`). A flat area has
0 bits, the photographs of COCO have 1.6 to 3.5. Detail finer than a 64th of the picture does not count, nor
do noise and grain.
"""

from __future__ import annotations

import io
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mmlab.data.decode import opened, to_rgb
from mmlab.data.readers.sidecar import Numbers, measure_once, stamp_of
from mmlab.data.records import FileStore, Records
from mmlab.errors import DataError

_SIDE = 64  # pixels
_STEP = 8  # grey levels that count as one


def image_complexity(records: Records, *, progress: bool = True) -> NDArray[np.float64]:
    """Gradient entropy of each record's image.

    Args:
        records: N records; an image that several share is decoded once. Images that are not plain files are
            measured every time.
        progress: show a bar on stderr if something must be decoded.

    Returns:
        (N,) bits, NaN without an image.

    Raises:
        DataError: an image cannot be decoded.
    """
    paths = [path for path in dict.fromkeys(records.image_paths) if path is not None]
    stamps = {path: stamp_of(path) if isinstance(records.store, FileStore) else None for path in paths}
    measured = measure_once("complexity", (float,), stamps, partial(_measure, records), progress=progress)
    for path, outcome in measured.items():
        if isinstance(outcome, str):
            raise DataError(f"{path}: {outcome}; repair or remove the file, then read the records again")
    return np.array([np.nan if path is None else measured[path][0] for path in records.image_paths])


def gradient_entropy(grey: NDArray[np.uint8]) -> float:
    """Entropy of a grey image's gradient vectors.

    >>> gradient_entropy(np.zeros((64, 64), np.uint8))
    0.0

    Args:
        grey: (H, W)

    Returns:
        Bits: half the entropy of the joint distribution of the horizontal and vertical differences.

    Source: delentropy, Larkin 2016 (arXiv:1609.01117), with differences quantised to 8 grey levels.
    """
    level = grey.astype(np.float64)
    down = np.rint((level[2:, 1:-1] - level[:-2, 1:-1]) / (2 * _STEP))  # a difference spans two pixels
    across = np.rint((level[1:-1, 2:] - level[1:-1, :-2]) / (2 * _STEP))
    _, counts = np.unique(down * 256 + across, return_counts=True)
    share = counts / counts.sum()
    return float(-0.5 * (share * np.log2(share)).sum() + 0.0)


def _measure(records: Records, path: str) -> Numbers | str:
    from PIL import Image

    try:
        with opened(io.BytesIO(records.store.read(path))) as image:
            image.draft("L", (_SIDE, _SIDE))
            small = to_rgb(image).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX)
    except Exception as error:  # decoders raise nearly anything on damaged files
        return f"cannot be decoded: {error}"
    return (gradient_entropy(np.asarray(small)),)
