"""From paths as written to real files that lie where they may."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mmlab.data.readers.sidecar import Stamp
from mmlab.errors import OptionError


def image_folder(images: str | Path) -> Path:
    """The folder that `images=` names.

    Raises:
        OptionError: there is none.
    """
    if isinstance(images, str | os.PathLike) and (folder := Path(images).expanduser()).is_dir():
        return folder
    raise OptionError(f"images={images}: not a folder")


class FileResolver:
    """Turns a path as written into the real path of a file inside `root`, in about one `lstat`.

    In the Hugging Face hub's cache, where a snapshot's files are links into the repository's `blobs/`, those count as
    inside.
    """

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else os.path.realpath(root)
        allowed = [""] if self.root is None else [self.root, *_blobs_of(self.root)]
        self._inside = tuple(folder and os.path.join(folder, "") for folder in allowed)
        self._folders: dict[str, str] = {}  # as written -> real

    def __call__(self, name: str) -> tuple[str, Stamp] | str:
        """The real path and its stamp, or why the file cannot be used."""
        folder, base = os.path.split(os.path.join(self.root or "", name))
        try:
            if folder not in self._folders:
                self._folders[folder] = os.path.realpath(folder)
            path = os.path.join(self._folders[folder], base)
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):  # a symbolic link, "..", a folder
                path = os.path.realpath(path)
                status = os.stat(path)
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            if not isinstance(error, FileNotFoundError):
                return f"cannot be opened: {error}"
            where = f" in {self.root} (images=FOLDER says where the images are)" if self.root else ""
            return f"file not found{where}"
        if not path.startswith(self._inside):
            return f"leads outside {self.root} {self._way_out(name)}"
        if not stat.S_ISREG(status.st_mode):
            return "not a file"
        return path, (status.st_size, status.st_mtime_ns)

    def _way_out(self, name: str) -> str:
        """The link on a path's way that leads out of the root, and what to do about it."""
        assert self.root is not None
        place = Path(self.root, name)
        for link in reversed([place, *place.parents]):
            if link.is_symlink() and link.is_relative_to(self.root):
                return (
                    f"({link} is a symlink to {os.path.realpath(link)}: put the images themselves there, or name them "
                    "relative to their real folder and pass images=FOLDER)"
                )
        return "(images=FOLDER names another folder)"


def _blobs_of(root: str) -> list[str]:
    """`REPO/blobs` of a folder in `REPO/snapshots/REVISION`; none of any other folder."""
    snapshots = (folder for folder in Path(root).parents if folder.name == "snapshots")
    return [str(blobs) for folder in snapshots if (blobs := folder.parent / "blobs").is_dir()]
