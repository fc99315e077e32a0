"""A data set that every test of the pipeline uses."""

from __future__ import annotations

import pytest

from mmlab.dataset import MultimodalDataset
from mmlab.images import Aspect
from mmlab.records import Records


@pytest.fixture(scope="session")
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))
