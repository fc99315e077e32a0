"""The Hugging Face hub's cache: a snapshot's files are links into the repository's blobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmlab.data.readers import read_records
from mmlab.errors import DataError
from tests.data.sample_files import encoded


@pytest.fixture
def snapshot(folder) -> Path:
    """A snapshot of two images in the cache's layout."""
    repo = folder.path / "datasets--owner--name"
    contents = {"metadata.csv": b"file_name,text\na.jpg,one\ntrain/b.jpg,two\n"}
    contents |= {"a.jpg": encoded(40, 30), "train/b.jpg": encoded(50, 30)}
    place = repo / "snapshots/0123abcd"
    for number, (name, content) in enumerate(contents.items()):
        blob = folder.raw(f"{repo.name}/blobs/{number:064x}", content)
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).symlink_to(os.path.relpath(blob, (place / name).parent))
    return place


@pytest.mark.parametrize("what", ["", "metadata.csv"])
def test_a_snapshot_can_be_read(snapshot: Path, what: str) -> None:
    records = read_records(snapshot / what)
    assert records.ids == ["a.jpg#0", "train/b.jpg#0"]
    assert [records.read_image(row) for row in range(2)] == [encoded(40, 30), encoded(50, 30)]
    link = snapshot.parent.parent.parent / "link"
    link.symlink_to(snapshot)
    assert read_records(link / what).ids == records.ids
    assert read_records(snapshot / what, images=snapshot).image_paths == records.image_paths


def test_other_ways_out_of_a_snapshot_stay_shut(snapshot: Path) -> None:
    repo, top = snapshot.parents[1], snapshot.parents[2]
    (top / "blobs").mkdir()
    for place in (top / "secret.jpg", repo / "secret.jpg", top / "blobs/secret.jpg"):
        place.write_bytes(encoded())
        (snapshot / "a.jpg").unlink()
        (snapshot / "a.jpg").symlink_to(place)
        with pytest.raises(DataError, match=r"a.jpg: leads outside .*0123abcd"):
            read_records(snapshot)
