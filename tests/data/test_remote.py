"""Shards at URLs: downloaded once, checked, the same records as of local files."""

from __future__ import annotations

import errno
import fcntl
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from mmlab.data.readers import read_records
from mmlab.errors import DataError
from mmlab.runs.folders import exclusive_folder
from tests.data.test_tar_shards import pairs, shard


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/mmlab/shards"


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.rm("/bucket", recursive=True)


def put(system: fsspec.AbstractFileSystem, path: Path, *keys: str) -> None:
    system.pipe(f"/bucket/{path.parent.name}/{path.name}", shard(path, pairs(*keys)).read_bytes())


def downloaded(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*.tar"))


def test_a_pattern_and_a_list_give_what_local_shards_give(tmp_path, store, cache) -> None:
    for split in ("train", "val"):
        put(store, tmp_path / split / "0.tar", "a", "b")
    local = read_records(sorted(tmp_path.glob("*/*.tar")), progress=False)
    for source in (
        "memory://bucket/*/0.tar",
        [f"memory://bucket/{split}/0.tar" for split in ("train", "val")],
    ):
        records = read_records(source, progress=False)
        assert (records.ids, records.texts, records.splits) == (local.ids, local.texts, local.splits)
        assert [records.read_image(row) for row in range(4)] == [local.read_image(row) for row in range(4)]
    assert downloaded(cache) == ["memory/bucket/train/0.tar", "memory/bucket/val/0.tar"]


def test_a_disk_without_locks_is_no_obstacle(tmp_path, store, cache, monkeypatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    put(store, tmp_path / "train/0.tar", "a")
    assert read_records("memory://bucket/train/0.tar", progress=False).ids == ["0.tar/a"]
    with exclusive_folder(tmp_path / "run"):
        pass


def test_files_at_hand_are_not_copied(tmp_path, cache) -> None:
    path = shard(tmp_path / "0.tar", pairs("a"))
    records = read_records([f"file://{path}"], progress=False)
    assert records.image_paths == read_records(path).image_paths
    assert not cache.exists()


def test_what_is_there_is_downloaded_again_only_when_it_changed(tmp_path, store, cache, monkeypatch) -> None:
    url, fetched = "memory://bucket/train/0.tar", []
    get_file = type(store).get_file
    monkeypatch.setattr(
        type(store), "get_file", lambda self, *args: (fetched.append(args[0]), get_file(self, *args))
    )
    put(store, tmp_path / "train/0.tar", "a")
    for _ in range(2):
        assert read_records(url, progress=False).ids == ["0.tar/a"]
    assert len(fetched) == 1
    put(store, tmp_path / "train/0.tar", "b")  # of the same size
    assert read_records(url, progress=False).ids == ["0.tar/b"]
    assert len(fetched) == 2
    store.rm("/bucket/train/0.tar")
    with pytest.warns(UserWarning, match=r"0.tar cannot be reached .* is used"):
        assert read_records(url, progress=False).ids == ["0.tar/b"]
    (cache / "memory/bucket/train/0.tar").unlink()
    with pytest.raises(DataError, match=r"memory://bucket/train/0.tar: cannot be found: FileNotFoundError"):
        read_records(url, progress=False)
    put(store, tmp_path / "train/0.tar", "c")


def test_half_a_file_is_never_used(tmp_path, store, cache, monkeypatch) -> None:
    put(store, tmp_path / "train/0.tar", "a")
    whole = type(store).get_file

    def cut_off(self, path: str, target: str) -> None:
        whole(self, path, target)
        with open(target, "rb+") as file:
            file.truncate(700)

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", cut_off)
        with pytest.raises(DataError, match=r"OSError: expected \d+ bytes, received 700; try again"):
            read_records("memory://bucket/train/0.tar", progress=False)
    assert downloaded(cache) == []
    assert [path.name for path in (cache / "memory/bucket/train").iterdir()] == [".0.tar.origin"]
    assert len(read_records("memory://bucket/train/0.tar", progress=False)) == 1


def test_processes_that_ask_for_the_same_download_it_once(tmp_path, store, monkeypatch) -> None:
    put(store, tmp_path / "train/0.tar", "a")
    fetched, get_file = [], type(store).get_file
    monkeypatch.setattr(
        type(store), "get_file", lambda self, *args: (fetched.append(args[0]), get_file(self, *args))
    )
    ask = partial(read_records, "memory://bucket/train/0.tar", progress=False)
    threads = [
        threading.Thread(target=ask) for _ in range(6)
    ]  # a lock belongs to an open file: as of processes
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("memory://nowhere/*.tar", "no file matches, or the server lists none: name them by {000..099}"),
        ("strange://host/0.tar", "cannot be opened: ValueError: Protocol not known: strange"),
        ("memory://bucket/notes.tar", "not a tar shard"),
    ],
)
def test_urls_that_lead_nowhere(store, source: str, message: str) -> None:
    store.pipe("/bucket/notes.tar", b"no archive")
    with pytest.raises(DataError, match=message):
        read_records(source, progress=False)


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder; breaks off in the middle of what is named so."""

    def log_message(self, *_: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.partition("?name=")[2] or path)

    def copyfile(self, source, outputfile) -> None:
        content = source.read()
        outputfile.write(content[: len(content) // 2] if "broken" in self.path else content)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    pytest.importorskip("aiohttp", reason="fsspec needs it for HTTP")
    (tmp_path / "served").mkdir()
    handler = partial(Quiet, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_shards_from_a_web_server(tmp_path, server: str, cache) -> None:
    for number in range(3):
        shard(tmp_path / f"served/data/train-{number}.tar", pairs("a", "b"))
    local = read_records(tmp_path / "served/data", progress=False)
    urls = [f"{server}/data/train-{number}.tar?signature={number}" for number in range(3)]
    for source in (urls, f"{server}/data/*.tar"):
        records = read_records(source, progress=False)
        assert (records.ids, records.splits) == (local.ids, local.splits)
        assert [records.read_image(row) for row in range(6)] == [local.read_image(row) for row in range(6)]
    assert len(downloaded(cache)) == 3


def test_a_query_that_names_the_file(tmp_path, server: str, cache) -> None:
    for number, name in enumerate(("a", "b")):
        shard(tmp_path / f"served/{name}.tar", pairs(*"xy"[: number + 1]))
    records = read_records([f"{server}/get?name={name}.tar" for name in "ab"], progress=False)
    assert records.texts == ["caption of x", "caption of x", "caption of y"]
    assert len(downloaded(cache)) == 2


def test_a_connection_that_breaks_off_leaves_nothing(tmp_path, server: str, cache) -> None:
    shard(tmp_path / "served/broken.tar", pairs("a", "b"))
    with pytest.raises(DataError, match=r"broken.tar: cannot be downloaded to .*; try again"):
        read_records(f"{server}/broken.tar", progress=False)
    with pytest.raises(DataError, match=r"gone.tar: cannot be found: FileNotFoundError"):
        read_records(f"{server}/gone.tar", progress=False)
    assert downloaded(cache) == []
