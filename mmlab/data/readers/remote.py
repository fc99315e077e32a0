"""Tar shards at a URL: each is downloaded once, whole, to the user's cache folder, by any fsspec file system.

Costs the disk space of the data set, and its download before the first batch. Range requests would save the
space, but cost one request for each header, as planning needs all sizes, and one for each image in each
epoch: at 20 ms per request, 50 images a second per connection.

A file counts as downloaded when it has the size that the server states. It is downloaded again when the server states
another size, time of change or ETag; where it cannot be reached, the local file is used, with a warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import uuid
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mmlab.errors import DataError
from mmlab.machine import lock, progress_bar

_URL = re.compile(r"[a-z][\w+.-]*(::[a-z][\w+.-]*)*://", re.IGNORECASE)
_NUM_AT_ONCE = 4  # downloads
_IDENTITY = (  # what file systems state about a file's version, each under names of its own
    "size", "ETag", "etag", "blob_id", "Last-Modified", "LastModified", "last_modified", "mtime", "created"
)  # fmt: skip


def is_url(source: object) -> bool:
    """Whether fsspec has to open it.

    >>> is_url("https://host/0.tar"), is_url("simplecache::s3://bucket/0.tar"), is_url("shards/0.tar")
    (True, True, False)
    """
    return isinstance(source, str) and _URL.match(source) is not None


def download(urls: Sequence[str], *, progress: bool = True) -> list[Path]:
    """The local copies of files; local files are used where they are.

    Args:
        urls: of files, or patterns with `*`. Several processes may ask for the same file; one of them
            downloads it.
        progress: show a bar on stderr.

    Raises:
        DataError: a file cannot be found or downloaded whole; those that are complete are not downloaded again.
    """
    found = [place for url in urls for place in _found(url)]
    with ThreadPoolExecutor(_NUM_AT_ONCE) as pool:
        copies = pool.map(lambda place: _local_copy(*place), found)
        return list(progress_bar(copies, "shards", len(found), show=progress))


def _found(url: str) -> list[tuple[str, Any, str]]:
    """URL, file system and path of each file that a URL or pattern matches."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    try:
        system, path = url_to_fs(url)
        if "*" not in url:
            return [(url, system, path)]
        paths = sorted(system.glob(path))
    except Exception as error:  # an unknown protocol, a missing package, whatever a file system raises
        raise DataError(f"{url}: cannot be opened: {type(error).__name__}: {error}") from error
    if not paths:
        raise DataError(
            f"{url}: no file matches, or the server lists none: name them by {{000..099}}, or in a list"
        )
    return [(system.unstrip_protocol(path), system, path) for path in paths]


def _local_copy(url: str, system: Any, path: str) -> Path:
    from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

    if isinstance(system, LocalFileSystem):
        return Path(path)
    target = _place(url)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.with_name(f".{target.name}.origin"), "a+", encoding="utf-8") as origin:
        lock(origin.fileno(), wait=True)  # other processes wait here, and then find the file
        origin.seek(0)
        known = origin.read() if target.is_file() else ""
        try:
            info = system.info(path)
        except Exception as error:  # each file system raises errors of its own
            if not known:
                raise DataError(f"{url}: cannot be found: {type(error).__name__}: {error}") from error
            warnings.warn(f"{url} cannot be reached ({error}); {target} is used", stacklevel=2)
            return target
        identity = json.dumps({name: str(info[name]) for name in _IDENTITY if info.get(name) is not None})
        if identity != known:
            origin.truncate(0)
            _fetch(url, system, path, target, info.get("size"))
            origin.write(identity)
    return target


def _fetch(url: str, system: Any, path: str, target: Path, num_bytes: int | None) -> None:
    """Download the file to `target`, whole or not at all."""
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        system.get_file(path, str(draft))
        if num_bytes not in (None, found_bytes := draft.stat().st_size):
            raise OSError(f"expected {num_bytes} bytes, received {found_bytes}")
        os.replace(draft, target)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{url}: cannot be downloaded to {target}: {reason}; try again") from error
    finally:
        draft.unlink(missing_ok=True)


def _place(url: str) -> Path:
    """Where a URL's file is kept: folders as in the URL, without its password.

    A query counts only if the URL before it does not end in `.tar`; otherwise it is taken for a signature,
    new each time.
    """
    before, _, query = url.partition("?")
    bare = re.sub(r"//[^/@:]*:[^/@]*@", "//", before)
    if query and not before.endswith(".tar"):
        bare += f"/{hashlib.sha256(query.encode()).hexdigest()[:16]}.tar"
    parts = [quote(part, safe="") for part in re.split(r"::|://|/", bare) if part not in ("", ".", "..")]
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mmlab", "shards", *parts)
