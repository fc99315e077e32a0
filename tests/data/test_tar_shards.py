"""WebDataset shards: indexed by their headers, read at their offsets."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
from pathlib import Path

import pytest

from mmlab.data.readers import read_records
from mmlab.data.readers.tar import members
from mmlab.errors import DataError
from tests.data.sample_files import encoded


def shard(path: Path, files: dict[str, bytes], archive_format: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=archive_format) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1.5  # a fraction makes pax write an extended header
            archive.addfile(member, io.BytesIO(content))
    return path


def pairs(*keys: str) -> dict[str, bytes]:
    files = {}
    for number, key in enumerate(keys):
        files[f"{key}.jpg"] = encoded(40 + number, 30)
        files[f"{key}.txt"] = f"caption of {key}\n".encode()
    return files


def test_one_shard(tmp_path):
    records = read_records(shard(tmp_path / "000.tar", pairs("a", "b")))
    assert records.ids == ["000.tar/a", "000.tar/b"]
    assert records.texts == ["caption of a", "caption of b"]
    assert records.width.tolist() == [40, 41]
    assert records.read_image(1) == encoded(41, 30)
    assert pickle.loads(pickle.dumps(records.store)).read(records.image_paths[0]) == encoded(40, 30)


def test_names_with_two_colons(tmp_path):
    path = shard(tmp_path / "a::b" / "000.tar", pairs("x::y"))
    records = read_records(path)
    assert records.read_image(0) == encoded(40, 30)
    assert records.store.part_of(records.image_paths[0])[0] == str(path)


def test_a_folder_of_images_has_no_effect_on_shards(tmp_path):
    with pytest.warns(UserWarning, match="images= has no effect"):
        read_records(shard(tmp_path / "0.tar", pairs("a")), images=tmp_path)


def test_numbers_in_braces_name_shards_as_webdataset_writes_them(tmp_path):
    for number in (8, 9, 10):
        shard(tmp_path / f"{number:02}.tar", {f"{number}.jpg": encoded(), f"{number}.txt": b"x"})
    found = read_records(f"{tmp_path}/{{08..10}}.tar")
    assert found.ids == ["08.tar/8", "09.tar/9", "10.tar/10"]
    assert read_records(f"file://{tmp_path}/{{1..1}}{{0..0}}.tar").ids == ["10.tar/10"]
    with pytest.raises(DataError, match=r"11\.tar: no such file"):
        read_records(f"{tmp_path}/{{08..11}}.tar")


def test_a_list_a_pattern_and_a_folder_give_the_same(tmp_path):
    paths = [shard(tmp_path / f"{number}.tar", pairs("a", "b")) for number in range(3)]
    by_list = read_records(paths)
    assert by_list.ids == [f"{number}.tar/{key}" for number in range(3) for key in "ab"]
    assert read_records(str(tmp_path / "*.tar")).image_paths == by_list.image_paths
    assert read_records(tmp_path).image_paths == by_list.image_paths
    assert by_list.group.tolist() == list(range(6))


def test_splits_by_name_or_folder(tmp_path):
    shard(tmp_path / "train/0.tar", pairs("a"))
    shard(tmp_path / "val/0.tar", pairs("a"))
    assert read_records(tmp_path).splits == ["train", "val"]
    assert read_records(shard(tmp_path / "cc3m-train-0000.tar", pairs("a"))).splits == ["train"]


def test_json_and_class_files(tmp_path):
    files = {
        "a.png": encoded(kind="PNG"),
        "a.json": json.dumps({"caption": ["one", "two"], "url": "x", "label": 4}).encode(),
        "b.JPEG": encoded(),
        "b.json": json.dumps({"caption": "not this"}).encode(),
        "b.txt": b"this",
        "b.cls": b"7",
        "b.npy": b"ignored",
        "._b.jpg": b"ignored",
    }
    records = read_records(shard(tmp_path / "0.tar", files))
    assert records.texts == ["one", "two", "this"]
    assert records.ids == ["0.tar/a#0", "0.tar/a#1", "0.tar/b"]
    assert records.labels is not None
    assert records.labels.tolist() == [4, 4, 7]
    assert records.group.tolist() == [0, 0, 1]


@pytest.mark.parametrize("archive_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_lie_where_they_are_said_to(tmp_path, archive_format):
    folder = "folder-" * 12 + "end"
    files = {
        f"{folder}/{'n' * 90}.jpg": b"x" * 700,
        "empty.txt": b"",
        "exact.bin": b"y" * 512,
        "plain.txt": b"z",
    }
    if archive_format != tarfile.USTAR_FORMAT:
        files |= {"l" * 300 + ".jpg": b"long", "übung.txt": b"umlaut"}
    path = shard(tmp_path / "0.tar", files, archive_format)
    content = path.read_bytes()
    assert {name: content[offset : offset + size] for name, offset, size in members(path)} == files


def test_links_in_an_archive_are_the_files_that_they_name(tmp_path):
    path = shard(tmp_path / "0.tar", pairs("d/a"))
    links = [("d/b.jpg", tarfile.LNKTYPE, "d/a.jpg"), ("d/b.txt", tarfile.SYMTYPE, "a.txt")]
    links += [("d/c.jpg", tarfile.SYMTYPE, "../d/b.jpg"), ("d/c.txt", tarfile.LNKTYPE, "d/b.txt")]
    with tarfile.open(path, "a") as archive:
        for name, kind, target in [("folder", tarfile.DIRTYPE, ""), *links]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            archive.addfile(member)
    records = read_records(path)
    assert records.texts == ["caption of d/a"] * 3
    assert {records.read_image(row) for row in range(3)} == {encoded(40, 30)}
    with tarfile.open(path, "a") as archive:
        member = tarfile.TarInfo("d/e.jpg")
        member.type, member.linkname = tarfile.SYMTYPE, "/elsewhere.jpg"
        archive.addfile(member)
    with pytest.raises(
        DataError, match=r"a link at byte \d+ to /elsewhere.jpg, which is not an earlier file of the archive"
    ):
        list(members(path))


def test_bad_samples_are_reported_by_shard_and_key(tmp_path):
    files = pairs("a", "b", "c", "d", "e")
    del files["a.jpg"], files["b.txt"]
    files |= {"c.jpg": b"no image", "d.txt": b" \n", "e.txt": b"\xff"}
    with pytest.raises(DataError) as error:
        read_records(shard(tmp_path / "0.tar", files))
    assert [(row.row, row.reason.partition(" (")[0].partition(":")[0]) for row in error.value.bad_rows] == [
        ("0.tar: a", "no image"),
        ("0.tar: b", "no text"),
        ("0.tar: c", "not an image that Pillow can read"),
        ("0.tar: d", "empty text"),
        ("0.tar: e", "metadata cannot be read"),
    ]


def test_a_shard_cut_short_keeps_what_is_whole(tmp_path):
    path = shard(tmp_path / "0.tar", pairs("a", "b", "c"))
    whole = list(members(path))
    os.truncate(path, whole[4].offset + 100)
    with pytest.warns(UserWarning, match=r"1 of 3 rows .*0.tar: the archive is cut off"):
        records = read_records(path, errors="report")
    assert records.ids == ["0.tar/a", "0.tar/b"]


def test_a_damaged_header_is_reported(tmp_path):
    path = shard(tmp_path / "0.tar", pairs("a", "b"), tarfile.USTAR_FORMAT)
    content = bytearray(path.read_bytes())
    content[list(members(path))[2].offset - 500] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"0.tar: the archive is damaged at byte \d+"):
        read_records(path)


def test_a_member_of_less_than_no_bytes_is_reported(tmp_path):
    path = shard(tmp_path / "0.tar", pairs("a", "b"))
    whole, member = list(members(path)), tarfile.TarInfo("c.txt")
    member.size = whole[2].offset - whole[3].offset - 3 * tarfile.BLOCKSIZE  # the next would be one before it
    content = path.read_bytes()[: whole[3].offset + tarfile.BLOCKSIZE]
    path.write_bytes(content + member.tobuf(tarfile.GNU_FORMAT) + bytes(2 * tarfile.BLOCKSIZE))
    with pytest.warns(UserWarning, match=r"1 of 3 rows .*0.tar: the archive is cut off or damaged"):
        assert read_records(path, errors="report").ids == ["0.tar/a", "0.tar/b"]


def test_a_key_that_repeats_is_reported(tmp_path):
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        for name, content in [*pairs("a", "b", "c").items(), *pairs("c", "a").items()]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.warns(UserWarning, match="2 of 3 rows"):
        records = read_records(path, errors="report")
    assert records.ids == ["0.tar/b"]
    assert [(row.row, row.reason) for row in records.bad_rows] == [
        (f"0.tar: {key}", f"two members are named {key}.jpg") for key in "ac"
    ]


def test_a_shard_that_shrinks_later_gives_no_half_image(tmp_path):
    path = shard(tmp_path / "0.tar", pairs("a"))
    records = read_records(path)
    os.truncate(path, 600)
    with pytest.raises(OSError, match="ends before byte"):
        records.read_image(0)


def test_what_is_not_a_shard_is_refused(tmp_path):
    plain = shard(tmp_path / "0.tar", pairs("a"))
    packed = tmp_path / "1.tar.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(DataError, match=r"1.tar.gz: not a tar shard: .*no random access: gunzip it"):
        read_records(packed)
    with pytest.raises(DataError, match=r"2.tar: no such file"):
        read_records([tmp_path / "2.tar"])
    (tmp_path / "a.jpg").write_bytes(encoded())
    with pytest.raises(DataError, match=r"a.jpg: not a tar shard.*image_paths, texts"):
        read_records([tmp_path / "a.jpg"])


def test_shards_that_are_links_keep_their_names(tmp_path):
    real = shard(tmp_path / "blobs/5f3a", pairs("a"))
    links = tmp_path / "snapshots/1/train"
    links.mkdir(parents=True)
    (links / "0.tar").symlink_to(real)
    records = read_records(tmp_path / "snapshots/1")
    assert (records.ids, records.splits) == (["0.tar/a"], ["train"])
    assert records.read_image(0) == encoded(40, 30)
