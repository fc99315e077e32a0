"""Outlines and surface normals of the eight solids, as closed formulas on a grid.

The object fills the square [-1, 1]: u grows to the right, v downward, its foot is at v = 1. Distances are approximate
(exact enough for soft edges), negative inside, in units of half the diameter.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.floating]  # (h, w)
# distance to the silhouette (h, w), and the normal's x, y (down) and z (to the viewer)
Solid = tuple[Plane, tuple[Plane, Plane, Plane]]


def _ball(u: Plane, v: Plane) -> Solid:
    squared = u * u + v * v
    return np.sqrt(squared) - 1, (u, v, np.sqrt(np.maximum(1 - squared, 0)))


def _ring(u: Plane, v: Plane) -> Solid:
    """A torus on its rim, facing the viewer."""
    radius = np.sqrt(u * u + v * v) + 1e-6
    offset = (radius - 0.69) / 0.31
    normal = u / radius * offset, v / radius * offset, np.sqrt(np.maximum(1 - offset * offset, 0))
    return (np.abs(offset) - 1) * 0.31, normal


def _cube(u: Plane, v: Plane) -> Solid:
    """Seen from the upper right: front face, top, right side."""
    corner_u, corner_v, slant = 0.48, -0.42, 0.5
    distance = np.maximum.reduce(
        [np.abs(u) - 0.98, np.abs(v) - 0.98, (-(u - 0.48) - (v - corner_v) - 2 * slant - 0.46) * 0.7,
         ((u - corner_u) + (v - 0.98)) * 0.7]
    )  # fmt: skip
    front = (u <= corner_u) & (v >= corner_v)
    above = ~front & (v - corner_v < -(u - corner_u))
    side = ~front & ~above
    down = np.where(above, -0.95, np.where(front, 0.25, 0.0))
    return distance, (np.where(side, 0.95, 0.0), down, np.where(front, 0.85, 0.3))


def _cylinder(u: Plane, v: Plane) -> Solid:
    half, lid = 0.72, 0.2
    across = np.clip(u / half, -1, 1)
    bow = lid * np.sqrt(1 - across * across)
    distance = np.maximum.reduce([np.abs(u) - half, v - (1 - lid) - bow, -(v + 1 - lid) - bow])
    above = v + 1 - lid < bow
    forward = np.where(above, 0.3, 0.9 * np.sqrt(1 - across * across))
    return distance, (np.where(above, 0.0, across), np.where(above, -0.95, 0.25), forward)


def _cone(u: Plane, v: Plane) -> Solid:
    half = np.maximum(0.44 * (v + 1), 0.02)
    across = np.clip(u / half, -1, 1)
    bow = 0.16 * np.sqrt(1 - np.clip(u / 0.82, -1, 1) ** 2)
    distance = np.maximum((np.abs(u) - half) * 0.9, v - 0.84 - bow)
    forward = np.sqrt(np.maximum(0.88 - 0.8 * across * across, 0))
    return distance, (0.9 * across, np.full_like(u, -0.35), forward)


def _star(u: Plane, v: Plane) -> Solid:
    """Five points; each tenth of the turn is one straight edge from a point to a notch."""
    tenth = np.pi / 5
    angle = np.arctan2(u, -v)
    folded = np.abs((angle + tenth) % (2 * tenth) - tenth)
    radius = np.sqrt(u * u + v * v)
    notch = 0.48
    edge_u, edge_v = notch * np.sin(tenth), notch * np.cos(tenth) - 1  # from the point at (0, 1) to the notch
    length = np.hypot(edge_u, edge_v)
    distance = (radius * np.sin(folded) * -edge_v + (radius * np.cos(folded) - 1) * edge_u) / length
    return _puffed(distance, 0.3)


def _heart(u: Plane, v: Plane) -> Solid:
    """Two discs melted into a corner."""
    wide = np.abs(u)
    lobe = np.hypot(wide - 0.44, v + 0.42) - 0.45
    corner = np.maximum(0.72 * wide + 0.69 * (v - 0.98), -0.42 - v)
    mix = np.clip(0.5 + (corner - lobe) / 0.5, 0, 1)
    return _puffed(corner + (lobe - corner) * mix - 0.25 * mix * (1 - mix), 0.4)


def _cross(u: Plane, v: Plane) -> Solid:
    wide, narrow = np.maximum(np.abs(u), np.abs(v)) - 0.97, np.minimum(np.abs(u), np.abs(v)) - 0.32
    return _puffed(np.maximum(wide, narrow), 0.25)


def _puffed(distance: Plane, bevel: float) -> Solid:
    """A flat body with a rounded rim `bevel` wide: the normal leans outward there."""
    slope_v, slope_u = np.gradient(distance) if min(distance.shape) > 1 else (np.zeros_like(distance),) * 2
    length = np.hypot(slope_u, slope_v) + 1e-6
    lean = np.clip(1 + distance / bevel, 0, 1) ** 2 * 0.95
    return distance, (slope_u / length * lean, slope_v / length * lean, np.sqrt(1 - lean * lean))


SOLIDS: dict[str, Callable[[Plane, Plane], Solid]] = {
    "ball": _ball,
    "cube": _cube,
    "cone": _cone,
    "cylinder": _cylinder,
    "ring": _ring,
    "star": _star,
    "heart": _heart,
    "cross": _cross,
}
