"""What a made picture shows: its size, surroundings, light, and one to three groups of coloured objects.

A `Scene` is a pure function of (seed, index), some microseconds long; it holds no pixels and no words. The space is large:
10 grounds x 4 backdrops x 3 lights, times about 2,000 looks (count, size, pattern, colour, shape) for each group.

Image sizes follow those of COCO val2017's 5,000 photographs: the 14 commonest sizes by their share, then a tail of
free proportions by its deciles.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate

# (width, height): per mille of the images of COCO val2017 (https://cocodataset.org, Lin et al. 2014)
COMMON_SIZES = {
    (640, 480): 212,
    (640, 427): 121,
    (480, 640): 67,
    (500, 375): 48,
    (640, 426): 43,
    (427, 640): 34,
    (640, 428): 32,
    (640, 425): 29,
    (612, 612): 21,
    (375, 500): 19,
    (500, 333): 16,
    (426, 640): 15,
    (640, 640): 11,
    (640, 360): 11,
}
TAIL_PER_MILLE = 321  # all other sizes
TAIL_LONG_SIDES = {640: 790, 500: 200, 320: 10}  # pixels: per mille of the tail
TAIL_LANDSCAPE_RATIO = 0.655
TAIL_SHORT_TO_LONG = (0.248, 0.567, 0.64, 0.662, 0.669, 0.681, 0.714, 0.747, 0.762, 0.828, 1.0)  # deciles

SHAPES = ("ball", "cube", "cone", "cylinder", "ring", "star", "heart", "cross")
COLOURS = ("red", "orange", "yellow", "green", "turquoise", "blue", "purple", "pink", "white", "black")
PATTERNS = {"plain": 55, "striped": 15, "spotted": 15, "checked": 15}  # per cent
SIZES = {"small": 30, "medium": 40, "large": 30}
COUNTS = {1: 50, 2: 25, 3: 15, 4: 10}
NUM_GROUPS = {1: 25, 2: 50, 3: 25}
OUTDOOR, INDOOR = ("sky", "clouds", "trees", "sea"), ("wall", "curtain", "shelf", "window")
GROUNDS = {
    "sand": OUTDOOR,
    "grass": OUTDOOR,
    "snow": OUTDOOR,
    "asphalt": OUTDOOR,
    "earth": OUTDOOR,
    "leaves": OUTDOOR,
    "wood": INDOOR,
    "brick": INDOOR,
    "tiles": INDOOR,
    "carpet": INDOOR,
}  # each with the backdrops that go with it
LIGHTS = {"day": 50, "evening": 25, "dusk": 25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Objects that look the same and stand together."""

    count: int
    size: str
    colour: str
    pattern: str
    shape: str
    places: tuple[tuple[float, float, float], ...]  # of each object: centre x, foot y, diameter; in pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that the painter and the caption writer need to know."""

    width: int  # pixels
    height: int
    ground: str
    backdrop: str
    light: str
    light_from_left: bool
    horizon: float  # share of the height that lies above it
    arrangement: str  # "row": from left to right; "depth": the first group stands in front of the others
    groups: tuple[Group, ...]
    seed: str  # of whatever else is random: texture, noise, wording


def make_scene(seed: int, index: int, max_side: int = 640) -> Scene:
    """The scene of one image.

    Args:
        seed, index: the only sources of chance; the same pair always gives the same scene.
        max_side: pixels; 640 keeps COCO's sizes, less shrinks them all alike.
    """
    name = f"mmlab scene {seed} {index}"
    rng = random.Random(name)  # a str seed is hashed with SHA-512: stable across versions and machines
    width, height = draw_size(rng, max_side)
    ground = rng.choice(tuple(GROUNDS))
    horizon = rng.uniform(0.22, 0.42)
    num_groups = weighted(rng, NUM_GROUPS)
    looks: list[tuple[int, str, str, str, str]] = []
    for _ in range(num_groups):
        size = weighted(rng, SIZES)
        count = min(weighted(rng, COUNTS), 2 if size == "large" else 4)
        colour = rng.choice([colour for colour in COLOURS if all(colour != look[2] for look in looks)])
        looks.append((count, size, colour, weighted(rng, PATTERNS), rng.choice(SHAPES)))
    arrangement = "depth" if num_groups > 1 and rng.random() < (0.35 if width > height else 0.7) else "row"
    lay_out = _lay_in_depth if arrangement == "depth" else _lay_in_row
    places = lay_out(rng, [(look[0], look[1]) for look in looks], width, height, horizon)
    groups = tuple(
        Group(count=count, size=size, colour=colour, pattern=pattern, shape=shape, places=place)
        for (count, size, colour, pattern, shape), place in zip(looks, places, strict=True)
    )
    return Scene(
        width=width,
        height=height,
        ground=ground,
        backdrop=rng.choice(GROUNDS[ground]),
        light=weighted(rng, LIGHTS),
        light_from_left=rng.random() < 0.5,
        horizon=horizon,
        arrangement=arrangement,
        groups=groups,
        seed=name,
    )


def draw_size(rng: random.Random, max_side: int = 640) -> tuple[int, int]:
    """Width and height in pixels, from COCO's distribution, scaled by `max_side` / 640."""
    size = weighted(rng, {**COMMON_SIZES, (0, 0): TAIL_PER_MILLE})
    if size == (0, 0):
        long = weighted(rng, TAIL_LONG_SIDES)
        rank = rng.random() * (len(TAIL_SHORT_TO_LONG) - 1)
        low, high = TAIL_SHORT_TO_LONG[int(rank)], TAIL_SHORT_TO_LONG[int(rank) + 1]
        short = round(long * (low + (high - low) * (rank % 1)))
        size = (long, short) if rng.random() < TAIL_LANDSCAPE_RATIO else (short, long)
    return max(1, round(size[0] * max_side / 640)), max(1, round(size[1] * max_side / 640))


def weighted(rng: random.Random, weights):  # type: ignore[no-untyped-def]
    """One key of a dict of integer weights."""
    ticket = rng.random() * sum(weights.values())
    return next(key for key, mark in zip(weights, accumulate(weights.values()), strict=True) if ticket < mark)


_DIAMETER = {"small": 0.15, "medium": 0.24, "large": 0.38}  # of the geometric mean side
_SPACING = 0.85  # of the diameter, from one object of a group to the next


def _lay_in_row(rng, sizes, width, height, horizon):  # type: ignore[no-untyped-def]
    """Groups side by side, in order from the left; all shrink together where the row would not fit."""
    side = (width * height) ** 0.5
    diameters = [_DIAMETER[size] * side * rng.uniform(0.92, 1.08) for _, size in sizes]
    needs = [_extent(count, diameter) for (count, _), diameter in zip(sizes, diameters, strict=True)]
    shrink = min(1.0, 0.94 * width / sum(needs))
    slack = width - shrink * sum(needs)
    cuts = sorted(rng.random() for _ in sizes)
    places = []
    left = 0.0
    for number, ((count, _), diameter, need) in enumerate(zip(sizes, diameters, needs, strict=True)):
        begin = left + cuts[number] * slack
        foot = rng.uniform(horizon + 0.45 * (1 - horizon), 0.96) * height
        places.append(_lay_group(rng, count, diameter * shrink, begin, foot))
        left += need * shrink
    return places


def _lay_in_depth(rng, sizes, width, height, horizon):  # type: ignore[no-untyped-def]
    """The first group near the viewer, the others farther back: smaller by perspective, higher in the picture."""
    side = (width * height) ** 0.5
    places = []
    num_behind = len(sizes) - 1
    for number, (count, size) in enumerate(sizes):
        front = number == 0
        diameter = _DIAMETER[size] * side * rng.uniform(0.92, 1.08) * (1.0 if front else 0.85)
        low, high = (0.0, 1.0) if front else ((number - 1) / num_behind, number / num_behind)
        need = _extent(count, diameter)
        diameter *= min(1.0, 0.94 * (high - low) * width / need)
        need = _extent(count, diameter)
        begin = low * width + rng.random() * ((high - low) * width - need)
        depth = rng.uniform(0.86, 0.97) if front else rng.uniform(0.15, 0.35)
        places.append(_lay_group(rng, count, diameter, begin, (horizon + depth * (1 - horizon)) * height))
    return places


def _extent(count: int, diameter: float) -> float:
    return diameter * (1 + _SPACING * (count - 1))


def _lay_group(rng, count, diameter, begin, foot):  # type: ignore[no-untyped-def]
    return tuple(
        (
            begin + diameter * (0.5 + _SPACING * number),
            foot - diameter * 0.25 * (number % 2) * rng.random(),
            diameter * rng.uniform(0.95, 1.03),
        )
        for number in range(count)
    )
