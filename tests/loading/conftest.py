"""A data set that every test of the pipeline uses."""

from __future__ import annotations

import pytest

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.types import Aspect


@pytest.fixture(scope="session")
def dataset(records: Records) -> MultimodalDataset:
    return MultimodalDataset(records, image_policy=Aspect(64 * 64, 16))
