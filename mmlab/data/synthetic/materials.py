"""Textures: tileable noise and the ground materials made from it.

Each is a 512 x 512 tile, made once per process (10 to 60 ms; 1 MiB for noise, 3 MiB for a material) and reused with
random crops, so that an image costs lookups instead of fresh random numbers. Noise comes from a bit generator's raw
stream, which NumPy keeps stable across versions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.float32]  # (TILE, TILE), or (3, TILE, TILE) for a colour
TILE = 512  # pixels; a power of two, so that wrapping an index is a bitwise and


@cache
def noise(exponent: float, stretch: float = 1.0, salt: int = 0) -> Plane:
    """(TILE, TILE) tileable noise of mean 0 and deviation 1, amplitude falling as frequency^-exponent (0 is white).

    `stretch` > 1 draws it out along x; `salt` numbers independent tiles.
    """
    raw = np.random.PCG64([salt, round(100 * exponent), round(100 * stretch)]).random_raw(TILE * TILE)
    # the sum of four uniform numbers is nearly normal
    white = raw.view(np.uint16).reshape(TILE, TILE, 4).sum(axis=2, dtype=np.float32)
    if exponent:
        fy, fx = np.fft.fftfreq(TILE)[:, None], np.fft.rfftfreq(TILE)[None, :]
        frequency = np.hypot(fy, fx * stretch)
        frequency[0, 0] = np.inf
        white = np.fft.irfft2(np.fft.rfft2(white) * frequency**-exponent, s=(TILE, TILE))
    return ((white - white.mean()) / white.std()).astype(np.float32)


@cache
def material(name: str) -> list[tuple[float, NDArray[np.float32]]]:
    """For red, green and blue: the mean albedo, and a flat tile (TILE * TILE,) of the deviations from it."""
    albedo = np.clip(MATERIALS[name](), 0.02, 0.98).astype(np.float32)
    return [(float(plane.mean()), (plane - plane.mean()).ravel()) for plane in albedo]


def _tint(colour: tuple[float, float, float], *layers: Plane) -> Plane:
    """A colour times 1 + the sum of the layers: (3, TILE, TILE)."""
    return np.multiply.outer(np.asarray(colour, dtype=np.float32), 1 + np.sum(layers, axis=0))


def _grid(cell_w: int, cell_h: int, shift: bool) -> tuple[Plane, Plane]:
    """Mask of the joints between cells, and one value per cell in [-1, 1]; both (TILE, TILE)."""
    y, x = np.mgrid[:TILE, :TILE]
    row = y // cell_h
    x = (x + (row % 2) * (cell_w // 2) * shift) % TILE
    joint = np.minimum.reduce([x % cell_w, y % cell_h]) < 4
    value = noise(0.0)[row * 7 % TILE, (x // cell_w) * 13 % TILE].clip(-2, 2) / 2
    return joint.astype(np.float32), value


def _wood() -> Plane:
    joint, plank = _grid(512, 64, False)
    grain = 0.13 * noise(1.2, 12.0) + 0.05 * noise(0.3, 8.0)
    return _tint((0.56, 0.37, 0.21), 0.18 * plank, grain) * (1 - 0.6 * joint)


def _brick() -> Plane:
    joint, brick = _grid(128, 64, True)
    face = _tint((0.58, 0.27, 0.20), 0.2 * brick, 0.1 * noise(0.6), 0.08 * noise(0.0))
    mortar = _tint((0.62, 0.59, 0.55), 0.1 * noise(0.3))
    return face + (mortar - face) * joint


def _tiles() -> Plane:
    joint, tile = _grid(128, 128, False)
    y, x = np.mgrid[:TILE, :TILE]
    dark = ((x // 128 + y // 128) % 2).astype(np.float32)
    return _tint(
        (0.86, 0.88, 0.86), -0.55 * dark, 0.05 * tile, 0.05 * noise(1.3), 0.02 * noise(0.0), -0.3 * joint
    )


def _leaves() -> Plane:
    hue = np.clip(0.5 + 0.9 * noise(0.9, salt=1), 0, 1)
    yellow, brown = (_tint(colour, 0.3 * noise(0.7)) for colour in ((0.72, 0.44, 0.10), (0.42, 0.18, 0.07)))
    return (yellow * hue + brown * (1 - hue)) * (1 + 0.12 * noise(0.2, salt=2))


MATERIALS: dict[str, Callable[[], Plane]] = {
    "sand": lambda: _tint((0.80, 0.68, 0.47), 0.07 * noise(1.2, 3.0), 0.07 * noise(0.2)),
    "grass": lambda: _tint((0.33, 0.50, 0.17), 0.25 * noise(0.6, 0.4), 0.12 * noise(1.2), 0.10 * noise(0.0)),
    "snow": lambda: _tint((0.90, 0.92, 0.96), 0.04 * noise(1.4), 0.025 * noise(0.3)),
    "asphalt": lambda: _tint((0.36, 0.36, 0.38), 0.17 * noise(0.1), 0.08 * noise(1.2)),
    "earth": lambda: _tint((0.60, 0.29, 0.16), 0.16 * noise(1.0), 0.10 * noise(0.3)),
    "leaves": _leaves,
    "wood": _wood,
    "brick": _brick,
    "tiles": _tiles,
    "carpet": lambda: _tint((0.30, 0.20, 0.46), 0.10 * noise(1.1), 0.16 * noise(0.0)),
}
