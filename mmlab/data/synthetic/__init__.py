"""Makes a data set of learnable image-text pairs: `make_dataset`, behind `mmlab data make`.

Photo-like pictures of coloured solids (`scenes`, `painting`) with compositional captions (`captions`), image sizes and
caption lengths drawn from COCO's. A 640 x 480 image takes about 15 ms of one core and 90 kB of disk, and follows from
(seed, index) alone. It is no substitute for photographs where content matters: ten grounds, eight solids, ten
colours.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mmlab.data.synthetic.captions import write_captions
from mmlab.data.synthetic.painting import paint
from mmlab.data.synthetic.scenes import make_scene
from mmlab.errors import OptionError, check_numbers
from mmlab.machine import progress_bar


def make_dataset(
    out: str | Path,
    *,
    num_images: int = 1000,
    captions_per_image: int = 5,
    seed: int = 0,
    max_side: int = 640,
    val_fraction: float = 0.1,
    progress: bool = True,
) -> Path:
    """Write `out/images/*.jpg` and `out/captions.json` (COCO captions, each image with its `split`).

    The folder appears whole or not at all: it is written beside `out` and renamed at the end. The first images of a
    larger data set are those of a smaller one.

    Args:
        max_side: pixels of the longest side; 640 keeps COCO's sizes, another value scales them all alike.
        val_fraction: share of the images marked `val`, spread evenly; the others are `train`.

    Returns:
        The path of captions.json.

    Raises:
        OptionError: `out` exists and is not an empty folder, or a number is out of its range.
    """
    check_numbers(locals())
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    with _written_whole(Path(out)) as folder:
        (folder / "images").mkdir()
        for index in progress_bar(range(num_images), "making images", show=progress):
            scene, name = make_scene(seed, index, max_side), f"{index:06d}.jpg"
            Image.fromarray(paint(scene)).save(folder / "images" / name, format="JPEG", quality=90)
            held_out = round((index + 1) * val_fraction) > round(index * val_fraction)
            image = {"id": index, "file_name": name, "width": scene.width, "height": scene.height}
            images.append(image | {"split": "val" if held_out else "train"})
            for caption in write_captions(scene, captions_per_image):
                annotations.append({"id": len(annotations), "image_id": index, "caption": caption})
        info = {"description": f"made by mmlab data make, seed {seed}"}
        content = {"info": info, "images": images, "annotations": annotations}
        (folder / "captions.json").write_text(json.dumps(content, indent=0), encoding="utf-8")
    return Path(out) / "captions.json"


@contextmanager
def _written_whole(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes `out` on success and disappears on any failure, Ctrl-C included."""
    out = out.absolute()
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise OptionError(f"{out} exists and is not an empty folder; name a new one or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}.partial-", dir=out.parent) as beside:
        folder = Path(beside) / out.name  # below, so that it has the usual access rights
        folder.mkdir()
        yield folder
        if out.exists():
            out.rmdir()
        folder.rename(out)
