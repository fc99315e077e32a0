"""What a generated picture shows: its size, surroundings, light, and one to three groups of coloured objects.

A `Scene` is a pure function of (seed, index), made in 0.1 ms; it holds no pixels and no words. The space
is large: 10 grounds x 4 backdrops x 3 lights, times over 3,000 looks (count, size, pattern, colour, shape) for each of
up to three groups.

`scenes.toml` lists everything that a scene is made of. Image sizes follow those of COCO val2017's 5,000
photographs: the 14 commonest sizes by their share, then a tail of other sizes, its aspect ratios drawn
between deciles.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

# its tables by name, each by the names of its entries
TABLES: dict[str, Any] = tomllib.loads(files(__package__).joinpath("scenes.toml").read_text("utf-8"))


def draw_one(rng: random.Random, entries: Mapping[str, Any]) -> str:
    """Draw the name of a table's entry, weighted by its `percent` or by its own value if a number."""
    weights = [entry["percent"] if isinstance(entry, dict) else entry for entry in entries.values()]
    return rng.choices(list(entries), weights)[0]


class Place(NamedTuple):
    """Where one object stands, in pixels."""

    x: float  # of its centre
    foot: float  # y of its lowest point
    diameter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Objects that look the same and stand together."""

    count: int
    size: str
    colour: str  # no other group of the scene has it
    pattern: str
    shape: str


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
    places: tuple[tuple[Place, ...], ...]  # for each group, one for each object
    seed: str  # of everything else that is random: texture, noise, wording


def make_scene(seed: int, index: int, max_side: int = 640) -> Scene:
    """The scene of one image.

    >>> [(group.count, group.colour, group.shape) for group in make_scene(0, 3).groups]
    [(2, 'black', 'cube'), (1, 'green', 'heart')]

    Args:
        seed, index: the only sources of chance; the same pair always gives the same scene.
        max_side: pixels; 640 keeps COCO's sizes, another value scales them all alike.
    """
    name = f"mmlab scene {seed} {index}"
    rng = random.Random(name)  # a str seed is hashed with SHA-512: stable across versions and machines
    width, height = draw_size(rng, max_side)
    ground = rng.choice(tuple(TABLES["grounds"]))
    horizon = rng.uniform(0.22, 0.42)
    groups: list[Group] = []
    for _ in range(int(draw_one(rng, TABLES["group_counts"]))):
        size = draw_one(rng, TABLES["sizes"])
        group = Group(
            count=min(int(draw_one(rng, TABLES["group_sizes"])), 2 if size == "large" else 4),
            size=size,
            colour=rng.choice([name for name in TABLES["colours"] if name not in {g.colour for g in groups}]),
            pattern=draw_one(rng, TABLES["patterns"]),
            shape=rng.choice(tuple(TABLES["shapes"])),
        )
        groups.append(group)
    deep = len(groups) > 1 and rng.random() < (0.35 if width > height else 0.7)
    lay_out = _lay_in_depth if deep else _lay_in_row
    places = lay_out(rng, groups, width, height, horizon * height)
    place = TABLES["grounds"][ground]["place"]
    backdrops = [name for name, backdrop in TABLES["backdrops"].items() if backdrop["place"] == place]
    return Scene(
        width=width,
        height=height,
        ground=ground,
        backdrop=rng.choice(backdrops),
        light=draw_one(rng, TABLES["lights"]),
        light_from_left=rng.random() < 0.5,
        horizon=horizon,
        arrangement="depth" if deep else "row",
        groups=tuple(groups),
        places=tuple(places),
        seed=name,
    )


def draw_size(rng: random.Random, max_side: int = 640) -> tuple[int, int]:
    """Width and height in pixels, from COCO's distribution, scaled by `max_side` / 640."""
    known = TABLES["image_sizes"]
    shares = [share for *_, share in known["common"]]
    width, height, _ = rng.choices([*known["common"], (0, 0, 0)], [*shares, known["tail_per_mille"]])[0]
    if not width:  # one of the tail
        long, deciles = int(draw_one(rng, known["tail_long_sides"])), known["tail_short_to_long"]
        rank = rng.random() * (len(deciles) - 1)
        low, high = deciles[int(rank)], deciles[int(rank) + 1]
        short = round(long * (low + (high - low) * (rank % 1)))
        width, height = (long, short) if rng.random() < known["tail_landscape_ratio"] else (short, long)
    return max(1, round(width * max_side / 640)), max(1, round(height * max_side / 640))


_SPACING = 0.85  # of the diameter, from one object of a group to the next
_USABLE = 0.94  # of the width


def _lay_in_row(
    rng: random.Random, groups: Sequence[Group], width: int, height: int, horizon: float
) -> list[tuple[Place, ...]]:
    """Groups side by side, in order from the left; all shrink alike where the row would not fit."""
    diameters = [_diameter(rng, group, width, height) for group in groups]
    needs = [_extent(group, diameter) for group, diameter in zip(groups, diameters, strict=True)]
    shrink = min(1.0, _USABLE * width / sum(needs))
    slack = width - shrink * sum(needs)
    taken = 0.0
    places = []
    cuts = sorted(rng.random() for _ in groups)
    for group, diameter, need, cut in zip(groups, diameters, needs, cuts, strict=True):
        foot = horizon + rng.uniform(0.45, 0.95) * (height - horizon)
        places.append(_lay_group(rng, group, diameter * shrink, taken + cut * slack, foot))
        taken += need * shrink
    return places


def _lay_in_depth(
    rng: random.Random, groups: Sequence[Group], width: int, height: int, horizon: float
) -> list[tuple[Place, ...]]:
    """The first group near the viewer, the others side by side farther back, smaller and not hidden."""
    front, *behind = groups
    diameter = min(_diameter(rng, front, width, height), 0.45 * height, _USABLE * width / _extent(front, 1))
    begin = rng.random() * (width - _extent(front, diameter))
    foot = horizon + rng.uniform(0.86, 0.96) * (height - horizon)
    places = [_lay_group(rng, front, diameter, begin, foot)]
    front_top = foot - 1.2 * diameter
    room = width / len(behind)
    for number, group in enumerate(behind):
        diameter = 0.85 * _diameter(rng, group, width, height)
        diameter = min(diameter, 0.36 * height, _USABLE * room / _extent(group, 1))
        begin = number * room + rng.random() * (room - _extent(group, diameter))
        foot = horizon + rng.uniform(0.15, 0.35) * (height - horizon)
        foot = max(min(foot, front_top + 0.5 * diameter), horizon + 0.08 * height)
        places.append(_lay_group(rng, group, diameter, begin, foot))
    return places


def _diameter(rng: random.Random, group: Group, width: int, height: int) -> float:
    """Pixels; low enough for the picture to hold the object."""
    share = TABLES["sizes"][group.size]["diameter"]
    return min(share * (width * height) ** 0.5 * rng.uniform(0.92, 1.08), 0.55 * height)


def _extent(group: Group, diameter: float) -> float:
    return diameter * (1 + _SPACING * (group.count - 1))


def _lay_group(
    rng: random.Random, group: Group, diameter: float, begin: float, foot: float
) -> tuple[Place, ...]:
    """Objects in a line from `begin`, every other one a little farther back."""
    return tuple(
        Place(
            x=begin + diameter * (0.5 + _SPACING * number),
            foot=foot - 0.2 * diameter * (number % 2) * rng.random(),
            diameter=diameter * rng.uniform(0.95, 1.03),
        )
        for number in range(group.count)
    )
