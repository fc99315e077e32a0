"""Makes a data set of learnable image-text pairs: `make_dataset`, behind `mmlab data make`.

Photo-like pictures of coloured solids (`scenes`, `painting`) with compositional captions (`captions`), image sizes and
caption lengths drawn from COCO's. A 640 x 480 image takes about 15 ms of one core and 90 kB of disk, and follows from
(seed, index) alone. It is no substitute for photographs where content matters: ten grounds, eight solids, ten
colours.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mmlab.data.synthetic.captions import write_captions
from mmlab.data.synthetic.painting import paint
from mmlab.data.synthetic.scenes import make_scene
from mmlab.errors import OptionError, check_numbers
from mmlab.machine import num_usable_cores, progress_bar

__all__ = ["make_dataset"]

JPEG_QUALITY = 90
_MIN_IMAGES_PER_WORKER = 64  # fewer are done before a process has started

Made = tuple[int, int, list[str]]  # width, height, captions


def make_dataset(
    out: str | Path,
    *,
    num_images: int = 1000,
    captions_per_image: int = 5,
    seed: int = 0,
    max_side: int = 640,
    val_fraction: float = 0.1,
    num_workers: int | None = None,
    progress: bool = True,
) -> Path:
    """Write `out/images/*.jpg` and `out/captions.json` (COCO captions, each image with its `split`).

    The folder appears whole or not at all: it is written beside `out` and renamed at the end. The first images of a
    larger data set are those of a smaller one.

    Args:
        max_side: pixels of the longest side; 640 keeps COCO's sizes, another value scales them all alike.
        val_fraction: share of the images marked `val`, spread evenly; the others are `train`.
        num_workers: processes; all usable cores by default, 0 or 1 for none. The result does not depend on it. They are
            spawned: a script that makes 128 images or more this way needs `if __name__ == "__main__":`.

    Returns:
        The path of captions.json.

    Raises:
        OptionError: `out` exists and is not an empty folder, or a number is out of its range.
    """
    check_numbers(locals())
    num_workers = num_usable_cores() if num_workers is None else num_workers
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    with _written_whole(Path(out)) as folder:
        (folder / "images").mkdir()
        make = partial(_make_image, folder, seed, max_side, captions_per_image)
        with closing(_run(make, num_images, num_workers)) as results:
            made = progress_bar(results, "making images", num_images, show=progress)
            for index, (width, height, captions) in enumerate(made):
                held_out = round((index + 1) * val_fraction) > round(index * val_fraction)
                image = {"id": index, "file_name": _file_name(index), "width": width, "height": height}
                images.append(image | {"split": "val" if held_out else "train"})
                for caption in captions:
                    annotations.append({"id": len(annotations), "image_id": index, "caption": caption})
        info = {"description": f"made by mmlab data make, seed {seed}"}
        content = {"info": info, "images": images, "annotations": annotations}
        (folder / "captions.json").write_text(json.dumps(content, indent=0), encoding="utf-8")
    return Path(out) / "captions.json"


def _make_image(folder: Path, seed: int, max_side: int, num_captions: int, index: int) -> Made:
    scene = make_scene(seed, index, max_side)
    path = folder / "images" / _file_name(index)
    Image.fromarray(paint(scene)).save(path, format="JPEG", quality=JPEG_QUALITY)
    return scene.width, scene.height, write_captions(scene, num_captions)


def _run(make: Callable[[int], Made], num_images: int, num_workers: int) -> Generator[Made, None, None]:
    """The images in order, from worker processes where there is enough to do.

    Threads would be no faster than one: most of the time goes into short NumPy calls.
    """
    if min(num_workers, num_images // _MIN_IMAGES_PER_WORKER) < 2:
        yield from map(make, range(num_images))
        return
    context = multiprocessing.get_context("spawn")
    ignored = (signal.SIGINT, signal.SIG_IGN)  # an interrupt is left to the parent
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=signal.signal, initargs=ignored)
    try:
        yield from pool.map(make, range(num_images), chunksize=8)
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` on success and disappears on any failure, Ctrl-C included."""
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OptionError(f"{out} exists and is not an empty folder; name a new one or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as beside:
        folder = Path(beside) / out.name  # below, so that it has the usual access rights
        folder.mkdir()
        yield folder
        if out.exists():
            out.rmdir()
        folder.rename(out)


def _file_name(index: int) -> str:
    return f"{index:06d}.jpg"
