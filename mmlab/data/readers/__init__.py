"""Reading image-text pairs from what users have: `read_records(source)` recognises the format by content.

`docs/internals/data_formats.md` has the one table of formats. Each format's module only finds rows; all checks, the image sizes
and the `Records` come from `rows`. Loads no torch, decodes no pixel.
"""

from __future__ import annotations

import glob
import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.data.readers.files import read_data_file, read_folder
from mmlab.data.readers.hub import is_dataset, is_saved_dataset, read_dataset, read_saved_dataset
from mmlab.data.readers.manifest import numbered, rows_of_entries
from mmlab.data.readers.remote import download, is_url
from mmlab.data.readers.rows import Row, Table, image_folder, to_records
from mmlab.data.readers.tar import is_tar, named_shards, read_shards
from mmlab.data.records import FileStore, Records
from mmlab.data.text import load_tokenizer, measure_tokens
from mmlab.errors import DataError, check_is, check_name, check_numbers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def read_records(
    source: Any,
    texts: Iterable[str | None] | None = None,
    *,
    images: str | Path | None = None,
    tokenizer: PreTrainedTokenizerFast | str | None = None,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    errors: str = "raise",
    allow_missing_modality: bool = False,
    progress: bool = True,
) -> Records:
    """Read the metadata of image-text pairs from any of the formats in `docs/internals/data_formats.md`.

    Args:
        source: a file, a folder, a list of tar shards or a glob for them, paths or URLs (also with `{000..099}`), a
            `datasets.Dataset`, a `pandas.DataFrame`, a list of dicts, or image paths.
        texts: the texts of a list of image paths, one each.
        images: the folder of the images, where they are not beside the data file.
        tokenizer: measures text lengths: a tokenizer, or a name for `mmlab.data.text.load_tokenizer`, such as
            `"builtin"`; without one they are estimated (`mmlab.data.text.estimate_num_tokens`).
        split: keep one split; rows of others are not checked.
        limit: keep this many records, drawn by `seed` from every split; see `Records.sample`.
        errors: `"raise"` lists every bad row; `"report"` leaves them out, warns, and keeps them in `.bad_rows`.
        allow_missing_modality: keep records that have a text only or an image only.
        progress: show a bar while image headers are read, on stderr.

    Raises:
        DataError: an unknown format, bad rows (all of them in the error's `.bad_rows`), no such split.
        OptionError: an option out of range, `images` that is no folder, or something else as tokenizer.
    """
    check_name("errors=", errors, ("raise", "report"))
    check_numbers({"limit": limit, "seed": seed})
    check_is("tokenizer", tokenizer, str | Callable, "a tokenizer or its name", optional=True)
    folder = None if images is None else image_folder(images)
    if texts is None:
        table = _table(source, folder, allow_missing_modality, progress)
    else:
        table = _from_lists(source, texts, folder)
    if folder is not None and not isinstance(table.store, FileStore):
        warnings.warn("images= has no effect: these data hold their images themselves", stacklevel=2)
    records = to_records(
        table,
        source=str(source) if isinstance(source, str | os.PathLike) else type(source).__name__,
        split=split,
        errors=errors,
        progress=progress,
        allow_missing_modality=allow_missing_modality,
    )
    records = records.sample(limit, seed=seed)
    if isinstance(tokenizer, str):
        tokenizer = load_tokenizer(tokenizer, records=records)
    return records if tokenizer is None else measure_tokens(records, tokenizer)


def errors_of(skip_bad_rows: bool) -> str:
    """The value of `errors` that the option `skip_bad_rows`, of runs and of the command line, stands for."""
    return "report" if skip_bad_rows else "raise"


def _table(source: Any, images: Path | None, allow_missing_modality: bool, progress: bool) -> Table:
    if is_dataset(source):
        return read_dataset(source, images, allow_missing_modality)
    if hasattr(source, "iterrows"):  # a pandas.DataFrame
        source = source.to_dict("records")
    if isinstance(source, str) and "{" in source and not os.path.exists(source):
        source = named_shards(source)
    if isinstance(source, list | tuple) and source:
        if isinstance(source[0], dict):
            rows = rows_of_entries(list(numbered(source)), "a list", allow_missing_modality)
            return Table(rows=rows, root=images)
        for number, shard in enumerate(source):
            if not isinstance(shard, str | os.PathLike):
                raise DataError(f"item {number}: expected a dict or a tar shard's path, found {shard!r:.40}")
        if any(map(is_url, source)):
            return read_shards(download(list(map(str, source)), progress=progress))
        return read_shards(list(map(Path, source)))
    if not isinstance(source, str | os.PathLike):
        kind = "an empty list" if isinstance(source, list | tuple) else type(source).__name__
        raise DataError(
            f"cannot read records from {kind}: pass a path, a datasets.Dataset, a DataFrame, a list of dicts, or images and texts"
        )
    if is_url(source):
        return read_shards(download([str(source)], progress=progress))
    path = Path(source).expanduser()
    if path.is_dir():
        if is_saved_dataset(path):
            return read_saved_dataset(path, images, allow_missing_modality)
        shards = sorted([*path.glob("*.tar"), *path.glob("*/*.tar")])
        return read_shards(shards) if shards else read_folder(path, images, allow_missing_modality)
    if path.is_file():
        if is_tar(path) or ".tar" in path.suffixes:
            return read_shards([path])
        return read_data_file(path, images, allow_missing_modality)
    shards = [Path(found) for found in sorted(glob.glob(str(path))) if os.path.isfile(found)]
    if not shards:
        raise DataError(
            f"{path}: no such file or folder, and no file matches it as a pattern of *, ?, [0-9] and {{00..99}}"
        )
    return read_shards(shards)


def _from_lists(image_paths: Iterable[Any], texts: Iterable[str | None], images: Path | None) -> Table:
    if any(isinstance(given, str) or not isinstance(given, Iterable) for given in (image_paths, texts)):
        raise DataError(f"expected lists of image paths and texts, found {image_paths!r:.40}, {texts!r:.40}")
    image_paths, texts = list(image_paths), list(texts)
    if len(image_paths) != len(texts):
        raise DataError(f"as many texts as image paths are needed, found {len(texts)} and {len(image_paths)}")
    for number, image in enumerate(image_paths):
        if not isinstance(image, str | os.PathLike | None):
            raise DataError(f"item {number}: expected an image path, found {image!r:.40}")
    rows = [
        Row(f"item {number}", None if image is None else os.fspath(image), text)
        for number, (image, text) in enumerate(zip(image_paths, texts, strict=True))
    ]
    return Table(rows=rows, root=images)
