"""Film the live panel during a real comparison in JupyterLab, for the front page: `make film` runs this, on a quiet machine.

    python docs/site/film_panel.py runs/scenes

Writes `docs/images/live_panel.gif`, frames at even distances over the run, and the last one as `live_panel.png`.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from playwright.sync_api import sync_playwright

from mmlab.machine import num_usable_cores, share_cores

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.browser.jupyter import Notebook, Server, launch  # noqa: E402

IMAGES = ROOT / "docs" / "images"
EVERY_S, NUM_FRAMES, FRAME_MS, LAST_MS = 1.0, 40, 200, 4000
WIDTH, NUM_COLOURS = 960, 64
LAB = """from mmlab import Lab
lab = Lab({data!r}, schedulers=("random", "sorted", "fastest"), epochs=2, image="aspect:80", out="runs/comparison")
lab.start()
lab.panel()"""


def film(data: Path, folder: Path) -> list[Image.Image]:
    """The panel from its first steps to the verdict."""
    share_cores()  # as in the processes that mmlab starts
    threads = {"OMP_NUM_THREADS": str(num_usable_cores())}  # as for a user
    server = Server(folder, ["-m", "jupyterlab"], status="api/status", **threads)
    try:
        with sync_playwright() as playwright:
            page = launch(playwright).new_page(viewport={"width": 1280, "height": 1400})
            notebook = Notebook(server, page, "film.ipynb").create()
            panel = notebook.panel(notebook.run(LAB.format(data=str(data.resolve()))))
            panel.wait_points(20)
            frames = []
            while panel.data("state") in ("running", "starting"):
                frames.append(picture(panel.root.screenshot()))
                page.wait_for_timeout(1000 * EVERY_S)
            panel.wait_state("done")
            page.wait_for_timeout(1000 * EVERY_S)
            return [*frames, picture(panel.root.screenshot())]
    finally:
        server.close()


def picture(screenshot: bytes) -> Image.Image:
    """A screenshot as wide as the page shows it."""
    image = Image.open(io.BytesIO(screenshot)).convert("RGB")
    return image.resize((WIDTH, round(image.height * WIDTH / image.width)), Image.Resampling.LANCZOS)


def main() -> None:
    """Write the animated picture and the still one."""
    with TemporaryDirectory() as folder:
        frames = film(Path(sys.argv[1]), Path(folder))
    frames = [
        frames[place] for place in sorted({round(x) for x in np.linspace(0, len(frames) - 1, NUM_FRAMES)})
    ]
    size = (WIDTH, max(frame.height for frame in frames))
    palette = frames[-1].quantize(NUM_COLOURS, Image.Quantize.FASTOCTREE)  # keeps the colours of thin lines
    drawn = []
    for frame in frames:
        whole = Image.new("RGB", size, "white")
        whole.paste(frame)
        drawn.append(whole.quantize(palette=palette, dither=Image.Dither.NONE))
    duration = [FRAME_MS] * (len(drawn) - 1) + [LAST_MS]
    path = IMAGES / "live_panel.gif"
    drawn[-1].save(path.with_suffix(".png"), optimize=True)
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=duration, loop=0, optimize=True)
    print(f"{path.relative_to(ROOT)}: {len(drawn)} frames, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
