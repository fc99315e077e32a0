"""Records: the metadata of every image-text pair, in columns.

Reading a data set (`mmlab.data.readers.read_records`) gives one `Records`. It knows sizes, lengths and where each image
is stored, and holds no pixels, so that planning never decodes anything. Selecting rows costs a copy of their metadata.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mmlab.errors import DataError, check_numbers
from mmlab.machine import open_regular, regular
from mmlab.types import ImagePolicy, Record, SampleSizes

if TYPE_CHECKING:
    import pandas as pd


class ImageStore(Protocol):
    """Where encoded images are kept. Picklable (workers get a copy); `read` is thread-safe."""

    def read(self, image_path: str) -> bytes:
        """The encoded bytes of one image. Raises OSError where they cannot be read."""
        ...


def read_bytes(path: str, start: int = 0, num_bytes: int | None = None) -> bytes:
    """`num_bytes` of a regular file from `start` (None: to the end); fewer if the file ends sooner.

    Meant for loading threads: each system call releases the interpreter's lock and must get it back from the
    other threads. Reading a file through a file object takes nine system calls, this function four.

    Raises:
        OSError: no regular file, or it cannot be read.
    """
    number, size = open_regular(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        if start:
            os.lseek(number, start, os.SEEK_SET)
        left = size - start if num_bytes is None else num_bytes
        content = os.read(number, left)
        while len(content) < left and (more := os.read(number, left - len(content))):
            content += more  # some network file systems give less at once
        return content
    finally:
        os.close(number)


class FileStore:
    """Images that are plain files; the path is the key."""

    def read(self, image_path: str) -> bytes:
        """The file's bytes."""
        return read_bytes(image_path)

    def part_of(self, image_path: str) -> tuple[str, int, int]:
        """The file that holds an image, its offset there, and its number of bytes (0: to the end)."""
        return image_path, 0, 0


@dataclass(frozen=True, slots=True)
class BadRow:
    """One row that could not be used, and why."""

    row: str  # how the user finds it: "line 17", "annotation 12", "shard.tar: 000003"
    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.row}: {self.path}: {self.reason}" if self.path else f"{self.row}: {self.reason}"


_SINGULAR = {"ids": "id", "image_paths": "image_path", "texts": "text", "labels": "label", "splits": "split"}
_COLUMNS = ("ids", "image_paths", "texts", "height", "width", "num_tokens", "group", "labels", "splits")


def connected_groups(keys: Sequence[Sequence[Hashable]]) -> NDArray[np.int64]:
    """(N,) group numbers, by first appearance: rows linked by keys, even through other rows, share one.

    >>> connected_groups(["a", "b", "", "bc", "c"]).tolist()
    [0, 1, 2, 1, 1]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    numbers: dict[Hashable, int] = {}
    pairs = [(row, numbers.setdefault(key, len(numbers))) for row, own in enumerate(keys) for key in own]
    row, number = np.array(pairs, np.int64).reshape(-1, 2).T
    size = len(keys) + len(numbers)
    links = coo_array((np.ones(len(pairs)), (row, len(keys) + number)), shape=(size, size))
    return connected_components(links, directed=False)[1][: len(keys)].astype(np.int64)


class Grouped:
    """Rows grouped by image; the rows of a group are drawn and held out together."""

    __slots__ = ()
    if TYPE_CHECKING:
        ids: list[str]

        @property
        def group(self) -> NDArray[np.int64]: ...
        @property
        def splits(self) -> list[str | None] | None: ...
        def _columns(self) -> dict[str, Any]: ...

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: Sequence[int] | NDArray[np.integer | np.bool_]) -> Self:
        """The given rows in the given order, or the rows where a mask is True; the store of images is shared."""
        index = np.asarray(rows)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.int64)
        chosen = index.tolist()
        columns: dict[str, Any] = {
            name: column[index] if isinstance(column, np.ndarray) else [column[row] for row in chosen]
            for name, column in self._columns().items()
        }
        return replace(self, **columns)  # type: ignore[type-var]

    def sample(self, num: int | None, *, seed: int = 0) -> Self:
        """`num` records, drawn by `seed`, in their original order; all for None or if there are no more.

        The records of an image (group) are drawn together, but `num` may cut some of them off. Every split is
        drawn from in proportion to its size, but with at least two images if `num` is large enough for all
        their records, so that even a small sample has something to hold out.

        Raises:
            OptionError: `num` is not a whole number from 0.
        """
        check_numbers({"num": num})
        if num is None or num >= len(self):
            return self
        split = np.unique([str(name) for name in self.splits or [None] * len(self)], return_inverse=True)[1]
        groups, group = np.unique(np.stack([split, self.group]), axis=1, return_inverse=True)
        place = np.empty(groups.shape[1])
        rng = np.random.default_rng(seed)
        for name in np.unique(split):
            rows = np.flatnonzero(groups[0] == name)
            turn = rng.permutation(len(rows))
            place[rows] = np.where(turn < 2, -1, turn / len(rows))
        return self.select(np.sort(np.argsort(place[group.ravel()], kind="stable")[:num]))

    def hold_out(self, fraction: float = 0.1, *, seed: int = 0) -> tuple[Self, Self]:
        """Split off a share of the *images* (groups), so that no image is on both sides.

        Returns:
            (kept, held_out)

        Raises:
            OptionError: `fraction` is not between 0 and 1.
            DataError: there is only one group.
        """
        check_numbers({"fraction": fraction, "seed": seed})
        groups = np.unique(group := self.group)
        if len(groups) < 2:
            raise DataError(
                f"cannot hold out images: all {len(self)} records are of one group (the captions of one image, or what "
                "the column `group` joins), at least 2 groups are needed"
            )
        num_held_out = min(len(groups) - 1, max(1, round(fraction * len(groups))))
        held_out = np.isin(group, np.random.default_rng(seed).choice(groups, num_held_out, replace=False))
        return self.select(~held_out), self.select(held_out)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Records(Grouped, Sequence[Record]):
    """A sequence of `Record` kept as columns of N rows.

    `height` and `width` are the image's displayed size in pixels (zero without an image), `num_tokens` the text's
    length with special tokens (zero without a text), `group` a number shared by all records of one image.

    Raises:
        ValueError: columns of different length.
    """

    ids: list[str]
    image_paths: list[str | None]
    texts: list[str | None]
    height: NDArray[np.int32]  # (N,)
    width: NDArray[np.int32]  # (N,)
    num_tokens: NDArray[np.int32]  # (N,)
    group: NDArray[np.int64]  # (N,)
    labels: NDArray[np.int64] | None = None  # (N,), None when the data set has no labels
    label_names: tuple[str, ...] = ()  # the class that each label stands for, where the data set names them
    splits: list[str | None] | None = None
    store: ImageStore = field(default_factory=FileStore)
    bad_rows: tuple[BadRow, ...] = ()  # rows left out under errors="report"
    source: str = ""  # what was read, for titles and reports

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self._columns().items()}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"columns must have one length, found {found}")

    def __repr__(self) -> str:
        num_images = len({path for path in self.image_paths if path is not None})
        return f"<{len(self)} records of {num_images} images{self.source and ' from ' + self.source}>"

    def __getitem__(self, row):
        if isinstance(row, slice):
            return self.select(range(*row.indices(len(self))))
        found = {_SINGULAR.get(name, name): column[row] for name, column in self._columns().items()}
        numbers = {name: int(value) for name, value in found.items() if isinstance(value, np.integer)}
        return Record(**(found | numbers))

    def split(self, name: str) -> Records:
        """The records of one split.

        Raises:
            DataError: the data set has no such split.
        """
        known = sorted({split for split in self.splits or () if split})
        if name not in known:
            raise DataError(
                f"no split {name!r} in {self.source or 'these records'}; known: {', '.join(known) or 'none'}"
            )
        return self.select([row for row, split in enumerate(self.splits or ()) if split == name])

    def with_num_tokens(self, num_tokens: Sequence[int] | NDArray[np.integer]) -> Records:
        """The same records with text lengths measured by a tokenizer (see `mmlab.data.text.measure_tokens`)."""
        return replace(self, num_tokens=np.asarray(num_tokens, dtype=np.int32))

    def sizes(self, policy: ImagePolicy | None = None) -> SampleSizes:
        """The planner's columns, with image sizes after `policy` (as stored when None)."""
        own = SampleSizes(num_tokens=self.num_tokens, height=self.height, width=self.width, group=self.group)
        return own if policy is None else own.resized(policy)

    def read_image(self, row: int) -> bytes:
        """The encoded image of one row.

        Raises:
            DataError: the row has no image.
            OSError: the image cannot be read.
        """
        path = self.image_paths[row]
        if path is None:
            raise DataError(f"record {self.ids[row]!r} has no image")
        return self.store.read(path)

    def announce(self, row: int) -> None:
        """Tell the operating system that a row's image will be read soon, if its store can name the file."""
        path, part_of = self.image_paths[row], getattr(self.store, "part_of", None)
        if path is not None and part_of is not None and hasattr(os, "posix_fadvise"):
            name, start, num_bytes = part_of(path)
            with suppress(OSError), open(name, "rb", buffering=0, opener=regular) as file:
                os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)

    def to_frame(self) -> pd.DataFrame:
        """One row per record, for inspection."""
        import pandas as pd

        return pd.DataFrame({_SINGULAR.get(name, name): column for name, column in self._columns().items()})

    def _columns(self) -> dict[str, Any]:
        """The columns that the data set has, each of N rows."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        return {name: column for name, column in columns.items() if column is not None}


@contextmanager
def reading_image(kind: str, name: str, path: str | None) -> Iterator[None]:
    """Wrap the reading or decoding of an image: an error names the image and its record or conversation.

    Raises:
        DataError: the image cannot be read.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(
            f"{kind} {name!r}: cannot read image {path or 'inside the row'}: {error}; "
            f"repair or remove the file, then read the {kind}s again"
        ) from error
