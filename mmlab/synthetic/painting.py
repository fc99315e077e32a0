"""Paints a `Scene`: textured ground in perspective, blurred backdrop, shaded solids with soft shadows, light, sensor noise.

Pixels are a pure function of the scene. NumPy only, and no random numbers beyond the scene's own: about 20 ms for
640 x 480 on one core, JPEG included. It imitates a photograph's statistics (spectrum, noise, file size), not its content.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from mmlab.synthetic.materials import TILE, material, noise
from mmlab.synthetic.shapes import outline
from mmlab.synthetic.scenes import Group, Scene

if TYPE_CHECKING:
    from numpy.typing import NDArray

PALETTE = {
    "red": (0.80, 0.09, 0.08),
    "orange": (0.93, 0.45, 0.04),
    "yellow": (0.93, 0.80, 0.08),
    "green": (0.07, 0.52, 0.16),
    "turquoise": (0.10, 0.70, 0.68),
    "blue": (0.09, 0.20, 0.72),
    "purple": (0.45, 0.12, 0.58),
    "pink": (0.95, 0.50, 0.66),
    "white": (0.92, 0.92, 0.90),
    "black": (0.07, 0.07, 0.08),
}
_BACKDROPS = {  # colour at the top, colour at the horizon, strength and stretch of its blurred texture
    "sky": ((0.25, 0.48, 0.82), (0.72, 0.84, 0.94), 0.04, 3.0),
    "clouds": ((0.55, 0.58, 0.63), (0.82, 0.83, 0.84), 0.16, 2.5),
    "trees": ((0.13, 0.22, 0.10), (0.20, 0.30, 0.12), 0.40, 0.7),
    "sea": ((0.62, 0.78, 0.90), (0.10, 0.34, 0.50), 0.06, 8.0),
    "wall": ((0.74, 0.70, 0.62), (0.84, 0.80, 0.72), 0.03, 1.0),
    "curtain": ((0.50, 0.08, 0.12), (0.62, 0.12, 0.16), 0.10, 0.1),
    "shelf": ((0.34, 0.22, 0.14), (0.42, 0.28, 0.18), 0.22, 0.3),
    "window": ((0.90, 0.94, 0.98), (0.72, 0.80, 0.86), 0.08, 0.3),
}
_LIGHTS = {"day": (1.0, 1.0, 1.0), "evening": (1.12, 0.90, 0.62), "dusk": (0.50, 0.58, 0.80)}
_NOISE = 0.014  # deviation of the sensor noise, of full scale


def paint(scene: Scene) -> NDArray[np.uint8]:
    """The picture of a scene, (height, width, 3) uint8."""
    rng = random.Random(scene.seed + " paint")
    picture = _paint_surroundings(scene, rng)
    ordered = sorted(
        ((place, group) for group in scene.groups for place in group.places), key=lambda item: item[0][1]
    )
    for place, _ in ordered:
        _cast_shadow(picture, scene, place)
    for place, group in ordered:
        _paint_object(picture, scene, group, place, rng)
    picture *= _light_map(scene, rng)
    grain = _NOISE * (1.5 if scene.light == "dusk" else 1.0)
    picture += grain * _crop(noise(0.0, salt=1), scene.height, scene.width, rng)[..., None]
    picture[..., 0] += 0.5 * grain * _crop(noise(0.15, salt=2), scene.height, scene.width, rng)
    picture[..., 2] += 0.5 * grain * _crop(noise(0.15, salt=3), scene.height, scene.width, rng)
    np.clip(picture, 0.0, 1.0, out=picture)
    picture *= 255.0
    picture += 0.5
    return picture.astype(np.uint8)


def _paint_surroundings(scene: Scene, rng: random.Random) -> NDArray[np.float32]:
    """Backdrop above the horizon, ground in perspective below; both blend over a few rows."""
    height, width = scene.height, scene.width
    horizon = round(scene.horizon * height)
    picture = np.empty((height, width, 3), dtype=np.float32)
    rows = np.arange(1, height - horizon + 1, dtype=np.float32)
    # a row's distance grows as 1 / (rows below the horizon); at the bottom edge one texel is about one pixel
    distance = rows[-1] * 1.15 / (rows + 0.15 * rows[-1])
    across = (np.arange(width, dtype=np.float32) - width / 2)[None, :] * distance[:, None]
    along = distance * rows[-1] * 1.1
    texel_x = (across.astype(np.int32) + rng.randrange(TILE)) & (TILE - 1)
    texel_y = (along.astype(np.int32) + rng.randrange(TILE)) & (TILE - 1)
    tile = material(scene.ground)
    ground = tile.reshape(-1, 3)[texel_y[:, None] * TILE + texel_x]
    # far rows lose their detail, as under a lens focused on the foreground
    detail = np.clip((rows / rows[-1]) * 1.6 + 0.1, 0.0, 1.0)[:, None, None]
    mean = tile.mean(axis=(0, 1))
    ground -= mean
    ground *= detail
    ground += mean
    picture[horizon:] = ground
    if horizon:
        picture[:horizon] = _backdrop(scene, horizon, rng)
        blend = max(1, height // 60)
        seam = slice(max(0, horizon - blend), min(height, horizon + blend))
        weight = np.linspace(0, 1, seam.stop - seam.start, dtype=np.float32)[:, None, None]
        picture[seam] = picture[seam.start] * (1 - weight) + picture[seam.stop - 1] * weight
    return picture


def _backdrop(scene: Scene, rows: int, rng: random.Random) -> NDArray[np.float32]:
    """(rows, width, 3): painted at an eighth of the size and enlarged, so that it is out of focus."""
    top, bottom, strength, stretch = _BACKDROPS[scene.backdrop]
    small_h, small_w = rows // 8 + 2, scene.width // 8 + 2
    fall = np.linspace(0, 1, small_h, dtype=np.float32)[:, None, None]
    if scene.backdrop == "sea":
        fall = np.clip((fall - 0.55) * 12, 0, 1)
    colour = np.asarray(top, dtype=np.float32) * (1 - fall) + np.asarray(bottom, dtype=np.float32) * fall
    blotches = _crop(noise(1.3, stretch, salt=4), small_h, small_w, rng)[..., None]
    small = np.broadcast_to(colour, (small_h, small_w, 3)) * (1 + strength * blotches)
    return _enlarge(small, rows, scene.width)


def _cast_shadow(picture: NDArray[np.float32], scene: Scene, place: tuple[float, float, float]) -> None:
    """Darken a soft ellipse at the foot, drawn out away from the light."""
    x, foot, diameter = place
    away = 1 if scene.light_from_left else -1
    centre_x, centre_y = x + away * 0.35 * diameter, foot - 0.03 * diameter
    half_w, half_h = 1.1 * diameter, 0.34 * diameter
    top, bottom = _span(centre_y, half_h, scene.height)
    left, right = _span(centre_x, half_w, scene.width)
    if top >= bottom or left >= right:
        return
    dy = (np.arange(top, bottom, dtype=np.float32)[:, None] - centre_y) / half_h
    dx = (np.arange(left, right, dtype=np.float32)[None, :] - centre_x) / half_w
    squared = dx * dx + dy * dy
    contact = np.exp(-12 * ((dx + away * 0.32) ** 2 + dy * dy))
    dark = 0.45 * np.clip(1 - squared, 0, 1) + 0.35 * contact
    picture[top:bottom, left:right] *= (1 - np.minimum(dark, 0.75))[..., None]


def _paint_object(
    picture: NDArray[np.float32],
    scene: Scene,
    group: Group,
    place: tuple[float, float, float],
    rng: random.Random,
) -> None:
    x, foot, diameter = place
    radius = diameter / 2
    centre_y = foot - radius
    top, bottom = _span(centre_y, radius + 2, scene.height)
    left, right = _span(x, radius + 2, scene.width)
    if top >= bottom or left >= right:
        return
    v = (np.arange(top, bottom, dtype=np.float32)[:, None] - centre_y) / radius
    u = (np.arange(left, right, dtype=np.float32)[None, :] - x) / radius
    u, v = np.broadcast_arrays(u, v)
    distance, (nx, ny, nz) = outline(group.shape, u, v)
    depth = (foot / scene.height - scene.horizon) / (1 - scene.horizon)  # 0 at the horizon, 1 at the bottom
    softness = 1.0 + 1.5 * max(0.0, 0.5 - depth)  # pixels over which an edge fades; more when far
    coverage = np.clip(0.5 - distance * (radius / softness), 0, 1)

    light_x = -0.52 if scene.light_from_left else 0.52
    toward = nx * light_x + ny * -0.55 + nz * 0.65
    shade = 0.42 + 0.62 * np.clip(toward, 0, 1) - 0.14 * np.clip(v, 0, 1)
    half = nx * (0.55 * light_x) + ny * -0.30 + nz * 0.90
    gloss = 0.45 * np.clip(half, 0, 1) ** 40
    grain = _crop(noise(0.5, salt=5), bottom - top, right - left, rng)
    albedo = _pattern(group, u, v) * (1 + 0.06 * grain)[..., None]
    surface = albedo * shade[..., None] + gloss[..., None]
    view = picture[top:bottom, left:right]
    view += (surface - view) * coverage[..., None]


def _pattern(group: Group, u: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Albedo (h, w, 3): the group's colour, or that colour with a second one in stripes, spots or checks."""
    base = np.asarray(PALETTE[group.colour], dtype=np.float32)
    if group.pattern == "plain":
        return np.broadcast_to(base, (*u.shape, 3))
    second = np.asarray(
        PALETTE["black" if group.colour in ("white", "yellow", "pink") else "white"], dtype=np.float32
    )
    bulge = 1 + 0.25 * (u * u + v * v)  # lines crowd towards the edge, as on a round body
    a, b = u * bulge, v * bulge
    if group.pattern == "striped":
        wave = np.sin(9.5 * (0.8 * a + 0.6 * b)) - 0.35
    elif group.pattern == "spotted":
        wave = np.cos(10.0 * a) + np.cos(10.0 * b) - 1.05
    else:
        wave = np.sin(7.5 * a) * np.sin(7.5 * b) * 2 - 0.15
    mix = np.clip(0.5 + 3 * wave, 0, 1)[..., None]
    return base + (second - base) * mix


def _light_map(scene: Scene, rng: random.Random) -> NDArray[np.float32]:
    """(height, width, 3) factors: colour cast, a gradient from the light's side, clouds of light, vignette."""
    small_h, small_w = scene.height // 8 + 2, scene.width // 8 + 2
    y = np.linspace(-1, 1, small_h, dtype=np.float32)[:, None]
    x = np.linspace(-1, 1, small_w, dtype=np.float32)[None, :]
    lean = -0.14 if scene.light_from_left else 0.14
    patches = 0.05 * _crop(noise(1.8, salt=6), small_h, small_w, rng)
    level = (1 + lean * x - 0.05 * y + patches) * (1 - 0.12 * (x * x + y * y)) * rng.uniform(0.9, 1.1)
    return _enlarge(
        level[..., None] * np.asarray(_LIGHTS[scene.light], dtype=np.float32), scene.height, scene.width
    )


def _crop(tile: NDArray[np.float32], height: int, width: int, rng: random.Random) -> NDArray[np.float32]:
    """A random (height, width) window of an endless tile."""
    rows = (np.arange(height) + rng.randrange(TILE)) & (TILE - 1)
    cols = (np.arange(width) + rng.randrange(TILE)) & (TILE - 1)
    return tile[rows[:, None], cols]


def _enlarge(small: NDArray[np.float32], height: int, width: int) -> NDArray[np.float32]:
    """Smooth enlargement of (h, w, 3) to (height, width, 3)."""
    planes = [
        Image.fromarray(np.ascontiguousarray(small[..., channel])).resize(
            (width, height), Image.Resampling.BILINEAR
        )
        for channel in range(3)
    ]
    return np.stack([np.asarray(plane) for plane in planes], axis=-1)


def _span(centre: float, half: float, limit: int) -> tuple[int, int]:
    return max(0, int(centre - half)), min(limit, int(centre + half) + 1)
