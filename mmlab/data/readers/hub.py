"""Hugging Face `datasets`: a `Dataset`, a `DatasetDict`, or a folder that one was saved to.

The image feature is read with decoding off, so that sizes come from the encoded bytes' headers. Costs one
pass over the image column each time: sizes are not saved, since the rows have no files of their own. Does not
read streaming datasets.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.data.readers.manifest import require_columns, rows_of_entry
from mmlab.data.readers.rows import Row, Table
from mmlab.data.records import FileStore
from mmlab.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

_BATCH_SIZE = 1000  # rows


class DatasetStore:
    """Images inside datasets; the key is `SPLIT/ROW`, with `#PLACE` in a list. Keeps only image columns."""

    def __init__(self, columns: Mapping[str, tuple[Dataset, str]]) -> None:
        self._columns = dict(columns)  # split -> a dataset that does not decode, its image column

    def read(self, image_path: str) -> bytes:
        """The encoded bytes of the row's image, from the table or from the file that the row names.

        Raises:
            OSError: that file cannot be read.
        """
        split, _, row = image_path.rpartition("/")
        row, _, place = row.partition("#")
        dataset, column = self._columns[split]
        value = dataset[int(row)][column]
        value = value[int(place)] if place else value
        content = value if isinstance(value, bytes) else value["bytes"]
        return FileStore().read(value["path"]) if content is None else content


def is_dataset(source: object) -> bool:
    """Whether the object comes from `datasets`, which is not imported to find out."""
    return type(source).__module__.partition(".")[0] == "datasets"


def is_saved_dataset(folder: Path) -> bool:
    """Whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote the folder."""
    saved = ("dataset_dict.json",), ("state.json", "dataset_info.json")
    return any(all((folder / name).is_file() for name in names) for names in saved)


def read_saved_dataset(folder: Path, images: Path | None, allow_missing_modality: bool) -> Table:
    """The rows of a saved dataset."""
    from datasets import load_from_disk

    try:
        saved = load_from_disk(str(folder))
    except (ValueError, OSError, KeyError) as error:  # pyarrow's errors are ValueErrors
        raise DataError(f"{folder}: this saved dataset is damaged ({error}); save it again") from error
    return read_dataset(saved, images, allow_missing_modality)


def read_dataset(source: Any, images: Path | None, allow_missing_modality: bool) -> Table:
    """The rows of a dataset, or of every split of a dictionary of them.

    Raises:
        DataError: a streaming dataset, no image or no text column, an image column of another kind.
    """
    from datasets import ClassLabel, Dataset

    parts = source if isinstance(source, Mapping) else {"": source}
    image_columns: dict[str, tuple[Dataset, str]] = {}
    label_names: tuple[str, ...] = ()
    rows: list[Row] = []
    for split, dataset in parts.items():
        what = f"dataset {split}".strip()
        if not isinstance(dataset, Dataset):
            kind = type(dataset).__name__
            raise DataError(f"{what} is a {kind}: load it without streaming=True, a plan needs its length")
        columns = require_columns(dataset.column_names, what, allow_missing_modality)
        if isinstance(feature := dataset.features.get(columns.get("label")), ClassLabel):
            label_names = tuple(feature.names)
        dataset = dataset.with_format(None)
        inside = _images_inside(dataset, columns, what)
        others = [name for column, name in columns.items() if column != "image" or inside is None]
        values = dataset.select_columns(others).to_dict()
        if inside is not None:
            image_columns[split] = inside, columns["image"]
            values[columns["image"]] = list(_keys(inside, split))
            if columns.setdefault("id", "") == "":
                values[""] = [f"{split}/{number}" if split else number for number in range(len(dataset))]
        for number, entry in enumerate(zip(*values.values(), strict=True)):
            where = f"{split} row {number}".lstrip()
            for row in rows_of_entry(where, dict(zip(values, entry, strict=True)), columns):
                row.split = row.split or split or None
                rows.append(row)
    table = Table(rows=rows, root=images, label_names=label_names)
    if image_columns:
        store = table.store = DatasetStore(image_columns)
        table.root, table.find = None, lambda key: (key, None)
        table.open_image = lambda key: io.BytesIO(store.read(key))
    return table


def _images_inside(dataset: Dataset, columns: Mapping[str, str], what: str) -> Dataset | None:
    """The image column alone, not decoded; None if there is none, or if it holds file paths.

    Raises:
        DataError: a column of another kind.
    """
    from datasets import Image

    if "image" not in columns:
        return None
    column = as_stored(dataset.select_columns(columns["image"]), columns["image"])
    stated = dataset.features[columns["image"]]
    feature = getattr(stated, "feature", stated)
    kind = getattr(feature, "dtype", "")
    if kind in ("string", "large_string"):
        return None
    is_struct = isinstance(feature, dict) and feature.keys() == {"bytes", "path"}
    if isinstance(feature, Image) or is_struct or kind in ("binary", "large_binary"):
        return column
    raise DataError(
        f"{what}: column {columns['image']} holds {stated}, expected images, encoded bytes or paths, or lists of them"
    )


def as_stored(dataset: Dataset, name: str) -> Dataset:
    """The dataset with decoding off for a column of images or lists of images; else unchanged."""
    from datasets import Image

    stated, encoded = dataset.features[name], Image(decode=False)
    if isinstance(stated, Image):
        return dataset.cast_column(name, encoded)
    if isinstance(getattr(stated, "feature", None), Image):
        return dataset.cast_column(name, replace(stated, feature=encoded))
    return dataset


def _keys(inside: Dataset, split: str) -> Iterator[str | list[str | None] | None]:
    """The store's key of each row, or its list of keys; None without an image. No image is copied."""
    import pyarrow as pa

    images = (image for batch in inside.with_format("arrow").iter(_BATCH_SIZE) for image in batch.column(0))
    for number, image in enumerate(images):
        row = f"{split}/{number}"
        if isinstance(image, pa.ListScalar):
            own = enumerate(image.values or ())
            yield [f"{row}#{place}" if item.is_valid else None for place, item in own]
        else:
            yield row if image.is_valid else None
