"""Imported by the server of ranks: pandas, numba and its machine code are there then, and no rank loads them for itself."""

from __future__ import annotations

import numpy as np
import pandas  # noqa: F401
import scipy.sparse.csgraph  # noqa: F401
from PIL import Image

from mmlab.schedule.schedulers import make_scheduler
from mmlab.types import SampleSizes

Image.init()
_side = np.full(8, 32, np.int32)
_sizes = SampleSizes(height=_side, width=_side, num_tokens=_side, group=np.arange(8) // 2)
for _name in ("budget", "packed"):
    list(make_scheduler(_name, budget=500).plan(_sizes, epoch=0))
