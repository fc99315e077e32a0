"""Manifests: one row per pair, in CSV, TSV, JSON Lines, a JSON list or Parquet.

Columns are found by name (`SYNONYMS`), in any order and case. Text files are read whole; row numbers are line
numbers as an editor shows them, also after a quoted field that spans several lines.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmlab.data.readers.rows import Row
from mmlab.errors import DataError

SYNONYMS = {  # column -> names it may have, preferred first; compared in lower case with _ for space and -
    "image": "image images image_path image_paths img img_path image_file image_filename image_name file_name filename "
    "file_path filepath file path jpg jpeg png webp",
    "text": "text caption captions texts sentence sentences description alt_text comment title txt",
    "id": "id key uid sample_id __key__",
    "label": "label class category target",
    "split": "split subset",
    "group": "group group_id image_id",
}
_HEAD_BYTES = 1 << 16
_FIRST_ROW_BYTES = 1 << 24  # the longest first row of JSON
_DELIMITERS = ",\t|;"
# first bytes of a file -> the command that decompresses it
_COMPRESSED = {b"\x1f\x8b": "gunzip", b"BZ": "bunzip2", b"\xfd7": "unxz", b"\x28\xb5": "unzstd"}


def match_columns(found: Iterable[object]) -> dict[str, str]:
    """Which of the columns found holds the image, the text and so on.

    >>> match_columns(["File Name", "caption", "width"])
    {'image': 'File Name', 'text': 'caption'}
    """
    # of several columns of one name, the first
    by_name = {_plain(column): column for column in reversed([*map(str, found)])}
    known = {column: list(filter(by_name.get, names.split())) for column, names in SYNONYMS.items()}
    return {column: by_name[names[0]] for column, names in known.items() if names}


def _plain(name: str) -> str:
    """A column's name as names are compared."""
    return name.strip().lower().replace(" ", "_").replace("-", "_")


def require_columns(found: Iterable[object], what: str, allow_missing_modality: bool) -> dict[str, str]:
    """`match_columns`, with image and text required (one of them under `allow_missing_modality`).

    Raises:
        DataError: a column is missing; names the columns that were found and the names that are accepted.
    """
    found_names = [str(column) for column in found]
    matched = match_columns(found_names)
    missing = [column for column in ("image", "text") if column not in matched]
    if len(missing) > (1 if allow_missing_modality else 0):
        names = "; ".join(f"{column}: {', '.join(SYNONYMS[column].split())}" for column in missing)
        talks = not {"conversations", "messages"}.isdisjoint(found_names)
        hint = "; conversations are read with the --processor of a vision-language model" if talks else ""
        raise DataError(
            f"{what}: no {' and no '.join(missing)} column among {', '.join(found_names) or 'no columns'}. "
            f"Rename one to any of these ({names}){hint}"
        )
    return matched


def why_not_manifest(path: Path, allow_missing_modality: bool) -> str:
    """Why the file is not a manifest; empty if it is. Looks at its beginning only."""
    try:
        require_columns(_columns(path), "a table", allow_missing_modality)
    except DataError as error:
        return str(error)
    return ""


def _columns(path: Path) -> list[str]:
    """The columns named at a file's beginning; of a text file, more is read if the first row is longer."""
    if is_parquet(path):
        with parquet_file(path) as table:
            return table.schema_arrow.names
    for num_bytes in (_HEAD_BYTES, _FIRST_ROW_BYTES):
        with open(path, "rb") as file:
            head = file.read(num_bytes)
        if b"\0" in head.partition(b"\n")[0]:
            raise DataError("is not text in UTF-8; save it so")
        text = head.decode("utf-8-sig", errors="ignore").lstrip()
        if text[:1] not in ("[", "{"):
            header = _header_line(text)
            return _split(header, sniff_delimiter(header))
        if entries := _first_objects(text):
            return list({name: None for entry in entries for name in entry})
        if text[0] == "{" and "\n" in text:  # a whole line that is no object
            break
    raise DataError(f"begins with {text[0]} but what follows is no object in one line, or no list of objects")


def read_manifest(path: Path, allow_missing_modality: bool) -> list[Row]:
    """The rows of a manifest file.

    Raises:
        DataError: not UTF-8, a broken table, no image or no text column.
    """
    if is_parquet(path):
        entries = _parquet(path, allow_missing_modality)
    else:
        text = decode_text(path)
        entries = read_json(text, path) if text.lstrip()[:1] in ("[", "{") else _delimited(text, path)
    return rows_of_entries(list(entries), str(path), allow_missing_modality)


def rows_of_entries(
    entries: Sequence[tuple[str, dict[str, Any] | str]], what: str, allow_missing_modality: bool
) -> list[Row]:
    """The rows of entries, each given with its location; a string in its place says what is wrong."""
    names = dict.fromkeys(name for _, entry in entries if isinstance(entry, dict) for name in entry)
    columns = require_columns(names, what, allow_missing_modality) if names else {}
    return [row for where, entry in entries for row in rows_of_entry(where, entry, columns)]


def read_json(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The entries of a JSON list or of JSON Lines, each with its location; a string says what is wrong.

    Raises:
        DataError: a list that is not JSON.
    """
    if text.lstrip()[:1] != "[":
        return _json_lines(text)
    try:
        return numbered(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON: {error}") from error


def _first_objects(text: str) -> list[dict[str, Any]]:
    """The complete objects in the beginning of JSON Lines or of a JSON list."""
    if text[0] == "{":
        return [entry for _, entry in _json_lines(text) if isinstance(entry, dict)]
    decoder, entries, position = json.JSONDecoder(), [], 1
    while (start := text.find("{", position)) >= 0:
        try:
            entry, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    return entries


def rows_of_entry(where: str, entry: dict[str, Any] | str, columns: dict[str, str]) -> Iterator[Row]:
    """One row for each image and caption of an entry; a string in its place says what is wrong."""
    if isinstance(entry, str):
        yield Row(where, None, None, problem=entry)
        return
    values = {column: _stated(entry.get(name)) for column, name in columns.items()}
    row_id = values.get("id")
    no_id = f"no {columns['id']}" if "id" in columns and row_id is None else ""
    sample = object() if isinstance(values.get("image"), list) else None
    for image_number, image in _each(values.get("image")):
        image = os.fspath(image) if isinstance(image, os.PathLike) else image
        is_path = image is None or isinstance(image, str)
        problem = "" if is_path else f"{columns['image']} must be a path, found {type(image).__name__}"
        for text_number, text in _each(values.get("text")):
            yield Row(
                where,
                image if is_path else None,
                text,
                id=None if row_id is None else f"{row_id}{image_number}{text_number}",
                label=values.get("label"),
                split=None if values.get("split") is None else str(values["split"]),
                group=None if values.get("group") is None else str(values["group"]),
                problem=problem or no_id,
                sample=sample,
            )


def _stated(value: Any) -> Any:
    """A value, or None for those that stand for a missing one: NaN, pandas.NA and NaT. pandas' lists may be arrays."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value.tolist()
    is_nan = isinstance(value, float) and math.isnan(value)
    return None if is_nan or type(value).__name__ in ("NAType", "NaTType") else value


def _each(value: Any) -> Iterator[tuple[str, Any]]:
    """The items of a list (None if empty), each with its suffix for the id; or one value, without."""
    if isinstance(value, list):
        yield from ((f"#{place}", item) for place, item in enumerate(value or [None]))
    else:
        yield "", value


def decode_text(path: Path) -> str:
    """A text file's content, a byte order mark removed.

    Raises:
        DataError: not UTF-8; names the line.
    """
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        remedy = f"{command} it" if (command := decompressor(path)) else "save the file as UTF-8"
        raise DataError(f"{path}, line {line}: not UTF-8 ({error.reason}); {remedy}") from error


def _header_line(text: str) -> str:
    return text[:_HEAD_BYTES].replace("\r", "\n").partition("\n")[0]


def sniff_delimiter(header: str) -> str:
    """The delimiter that splits the header line into the most columns with known names."""
    return max(_DELIMITERS, key=lambda delimiter: len(match_columns(_split(header, delimiter))))


def _split(header: str, delimiter: str) -> list[str]:
    return next(csv.reader([header], delimiter=delimiter, skipinitialspace=True), [])


def _delimited(text: str, path: Path) -> Iterator[tuple[str, dict[str, Any] | str]]:
    delimiter = sniff_delimiter(_header_line(text.lstrip()))
    lines = csv.reader(
        io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=delimiter != "\t"
    )
    try:
        header = next((values for values in lines if any(map(str.strip, values))), [])  # after blank lines
        while len(header) > 1 and not header[-1].strip():  # as spreadsheets write columns that were emptied
            header.pop()
        names = [*map(_plain, header)]
        if repeated := sorted({repr(name) for name in header if names.count(_plain(name)) > 1}):
            raise DataError(f"{path}: several columns are named {', '.join(repeated)}; keep one of each")
        start = lines.line_num + 1
        for values in lines:
            where, start = f"line {start}", lines.line_num + 1
            if not values:  # a blank line
                continue
            if len(values) < len(header) or any(value.strip() for value in values[len(header) :]):
                yield where, f"expected {len(header)} fields as in the header, found {len(values)}"
            elif any("\0" in value for value in values):
                yield where, "holds a NUL byte; remove it"
            elif delimiter == "\t" and any("\t" in value and "\n" in value for value in values):
                yield where, "a quote joins it with the lines below; double the quotes inside a quoted field"
            else:
                named = zip(header, values, strict=False)
                yield where, {name: value if value.strip() else None for name, value in named}
    except csv.Error as error:
        raise DataError(
            f"{path}, line {lines.line_num}: {error}; double the quotes inside a quoted field (a field may have "
            "131,072 characters)"
        ) from error


def _json_lines(text: str) -> Iterator[tuple[str, dict[str, Any] | str]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield f"line {number}", f"not JSON: {error}"
        else:
            yield f"line {number}", _as_entry(entry)


def numbered(entries: Iterable[object], kind: str = "item") -> Iterator[tuple[str, dict[str, Any] | str]]:
    """The entries of a list, or the rows of a table, each with its location; a string says what is wrong."""
    return ((f"{kind} {number}", _as_entry(entry)) for number, entry in enumerate(entries))


def _as_entry(entry: object) -> dict[str, Any] | str:
    return entry if isinstance(entry, dict) else f"expected an object, found {entry!r:.40}"


def decompressor(path: Path) -> str:
    """The command that decompresses a file; empty if it is not compressed."""
    with open(path, "rb") as file:
        return _COMPRESSED.get(file.read(2), "")


def is_parquet(path: Path) -> bool:
    """Whether the file begins as Parquet does."""
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a Parquet file.

    Raises:
        DataError: it is damaged.
    """
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except DataError:
        raise
    except (OSError, ValueError, ArithmeticError, NotImplementedError) as error:  # arrow's too
        raise DataError(f"{path}: this Parquet file is damaged: {error}") from error


def _parquet(path: Path, allow_missing_modality: bool) -> Iterator[tuple[str, dict[str, Any] | str]]:
    with parquet_file(path) as file:
        schema = file.schema_arrow
        columns = require_columns(schema.names, str(path), allow_missing_modality)
        if (image := columns.get("image")) and not _holds_strings(kind := schema.field(image).type):
            raise DataError(
                f"{path}: column {image} holds {kind}, expected paths. Read images inside Parquet through datasets: give "
                "datasets.load_dataset('parquet', data_files=...), or the folder that its save_to_disk(FOLDER) writes"
            )
        return numbered(file.read(columns=list(columns.values())).to_pylist(), "row")


def _holds_strings(kind: Any) -> bool:
    """Whether an Arrow type is of strings, or of lists of them."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
