"""A folder to make a data set in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.sample_files import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)
