"""Words for a `Scene`: five captions that each name other parts of it, in other words and at other lengths.

Every caption names at least one group by count, colour and shape, and either the ground or a second group; size,
pattern, relation, backdrop and light come in as the length allows. Lengths are drawn from COCO's captions; a share may
imitate web alt-text instead, longer and with a heavy tail.
"""

from __future__ import annotations

import math
import random
import re

from mmlab.data.synthetic.scenes import Group, Scene, weighted

# num_tokens (WordPiece, the two special tokens included): per 10,000 captions of COCO val2017, 25,014 in all; mean 13.4
CAPTION_LENGTHS = {
    **{
        9: 42,
        10: 460,
        11: 1600,
        12: 2025,
        13: 1907,
        14: 1445,
        15: 951,
        16: 606,
        17: 345,
        18: 215,
        19: 132,
        20: 88,
    },
    **{21: 53, 22: 35, 23: 20, 24: 16, 25: 14, 26: 10, 27: 10, 28: 10, 30: 6, 33: 5, 36: 3, 42: 1, 59: 1},
}
# words of web alt-text: log-normal with the mean 20.2 and deviation 16.3 of Conceptual 12M (Changpinyo et al. 2021)
ALT_TEXT_LOG_MEAN, ALT_TEXT_LOG_STD, ALT_TEXT_MAX_WORDS = 2.755, 0.708, 300

_COUNTS = ("no", "a", "two", "three", "four")
_SIZES = {"small": ("small", "little", "tiny"), "medium": ("",), "large": ("large", "big", "huge")}
_PATTERNS = {
    "plain": ("",),
    "striped": ("striped",),
    "spotted": ("spotted", "dotted"),
    "checked": ("checked", "checkered"),
}
_PLURALS = {"box": "boxes", "cross": "crosses"}
_SHAPES = {"cube": ("cube", "box", "block")}
_GROUNDS = {
    "sand": ("on sand", "on the sand", "on a sandy beach"),
    "grass": ("on grass", "on the grass", "on a green lawn", "in a grassy field"),
    "snow": ("on snow", "in the snow", "on white snow"),
    "asphalt": ("on asphalt", "on a grey road", "on the street"),
    "earth": ("on red earth", "on red soil", "in a red desert"),
    "leaves": ("on autumn leaves", "on fallen leaves", "on brown leaves"),
    "wood": ("on wood", "on a wooden floor", "on wooden boards"),
    "brick": ("on bricks", "on red bricks", "on a brick floor"),
    "tiles": ("on tiles", "on a tiled floor", "on black and white tiles"),
    "carpet": ("on a carpet", "on a purple carpet", "on purple carpet"),
}
_BACKDROPS = {
    "sky": ("under a blue sky", "below a clear sky"),
    "clouds": ("under a cloudy sky", "below grey clouds"),
    "trees": ("with trees behind", "by a dark forest"),
    "sea": ("by the sea", "with blue water behind"),
    "wall": ("by a pale wall", "with a plain wall behind"),
    "curtain": ("by a red curtain", "with a red curtain behind"),
    "shelf": ("by a brown shelf", "with brown wood behind"),
    "window": ("by a bright window", "with a bright window behind"),
}
_LIGHTS = {
    "day": ("in daylight", "by day"),
    "evening": ("at sunset", "in warm evening light"),
    "dusk": ("at dusk", "in dim blue light"),
}
_RELATIONS = {  # how the first of two groups stands to the second, and the second to the first
    "row": (("left of", "to the left of"), ("right of", "to the right of")),
    "depth": (("in front of", "before"), ("behind", "in back of")),
}
_TOGETHER = ("and", "next to", "near", "with", "beside")
_OPENINGS = ("a photo of", "a picture of", "a view of", "a scene with", "an image of", "we see")
_POSTURES = ("sitting", "standing", "placed", "resting")
_TAGS = (
    "stock photo", "free download", "high resolution", "image", "wallpaper", "royalty free", "best price", "new",
    "photography", "close up", "background", "gift idea", "shop online", "photo 12 of 40", "640 x 480", "jpg", "toys",
    "for kids", "home decor", "print", "outdoor", "set", "design", "art", "buy now", "gallery", "sale",
)  # fmt: skip


def write_captions(scene: Scene, num_captions: int = 5, alt_text_ratio: float = 0.0) -> list[str]:
    """Captions of one scene; the first ones of a longer list are those of a shorter.

    Args:
        alt_text_ratio: the chance, for each caption, of alt-text instead of a sentence.
    """
    captions = []
    for number in range(num_captions):
        rng = random.Random(f"{scene.seed} caption {number}")
        captions.append((_alt_text if rng.random() < alt_text_ratio else _sentence)(scene, rng))
    return captions


def num_words(text: str) -> int:
    """Words and punctuation marks.

    >>> num_words("Two red balls, on sand.")
    7
    """
    return len(re.findall(r"\w+|[^\w\s]", text))


def _sentence(scene: Scene, rng: random.Random) -> str:
    """A core of two parts, then whatever else still fits into a length drawn beforehand."""
    target = weighted(rng, CAPTION_LENGTHS) - 2  # without the special tokens
    order = rng.sample(range(len(scene.groups)), len(scene.groups))
    groups = [scene.groups[number] for number in order]
    parts = {"subject": _plain_name(groups[0]), "ground": rng.choice(_GROUNDS[scene.ground])}
    richer = {
        "subject": _full_name(groups[0], rng),
        "light": rng.choice(_LIGHTS[scene.light]),
        "backdrop": rng.choice(_BACKDROPS[scene.backdrop]),
        "posture": rng.choice(_POSTURES),
        "opening": rng.choice(_OPENINGS),
    }
    if len(groups) > 1 and rng.random() < 0.75:
        relation = _relation(scene, order[0], order[1], rng)
        parts["other"] = f"{relation} {_plain_name(groups[1])}"
        richer["other"] = f"{relation} {_full_name(groups[1], rng)}"
        if len(groups) > 2:
            richer["third"] = f"and {_full_name(groups[2], rng)}"
        if num_words(_join(parts)) > target:
            del parts["ground" if rng.random() < 0.3 else "other"]
    for name in rng.sample(list(richer), len(richer)):
        longer = {**parts, name: richer[name]}
        if num_words(_join(longer)) <= target:
            parts = longer
    text = _join(parts)
    for extra in _extras(scene, rng):
        if num_words(text) + num_words(extra) <= target:
            text += " " + extra
    return text


_ORDER = ("opening", "subject", "posture", "other", "third", "ground", "backdrop", "light")


def _join(parts: dict[str, str]) -> str:
    text = " ".join(parts[name] for name in _ORDER if name in parts)
    return text[0].upper() + text[1:] + "."


def _plain_name(group: Group) -> str:
    return _name(group, "", "", group.shape)


def _full_name(group: Group, rng: random.Random) -> str:
    shape = rng.choice(_SHAPES.get(group.shape, (group.shape,)))
    return _name(group, rng.choice(_SIZES[group.size]), rng.choice(_PATTERNS[group.pattern]), shape)


def _name(group: Group, size: str, pattern: str, shape: str) -> str:
    noun = shape if group.count == 1 else _PLURALS.get(shape, shape + "s")
    words = " ".join(word for word in (size, pattern, group.colour, noun) if word)
    count = "an" if group.count == 1 and words[0] in "aeiou" else _COUNTS[group.count]
    return f"{count} {words}"


def _relation(scene: Scene, first: int, second: int, rng: random.Random) -> str:
    """How one group stands to another, in words; behind the first of a scene in depth there is no order."""
    known = scene.arrangement == "row" or 0 in (first, second)
    if not known or rng.random() < 0.3:
        return rng.choice(_TOGETHER)
    return rng.choice(_RELATIONS[scene.arrangement][0 if first < second else 1])


def _extras(scene: Scene, rng: random.Random) -> list[str]:
    """Whole sentences for long captions, in random order."""
    lit, shaded = ("left", "right") if scene.light_from_left else ("right", "left")
    total = sum(group.count for group in scene.groups)
    sentences = [
        f"The light comes from the {lit}.",
        f"Soft shadows fall to the {shaded}.",
        f"It was taken {rng.choice(_LIGHTS[scene.light])}.",
        f"Everything stands {rng.choice(_GROUNDS[scene.ground])}, {rng.choice(_BACKDROPS[scene.backdrop])}.",
        f"Only {total} objects can be seen." if total > 1 else "Nothing else can be seen.",
        "The background is out of focus and a little darker near the corners.",
    ]
    sentences += [f"One can make out {_full_name(group, rng)}." for group in scene.groups]
    rng.shuffle(sentences)
    return sentences


def _alt_text(scene: Scene, rng: random.Random) -> str:
    """Search words and phrases strung together, the scene's own first."""
    normal = math.sqrt(-2 * math.log(1 - rng.random())) * math.cos(2 * math.pi * rng.random())
    target = min(ALT_TEXT_MAX_WORDS, max(4, round(math.exp(ALT_TEXT_LOG_MEAN + ALT_TEXT_LOG_STD * normal))))
    pieces = [_full_name(group, rng) for group in scene.groups]
    pieces.append(rng.choice(_GROUNDS[scene.ground]))
    separator = rng.choice((", ", " - ", " | ", " "))
    while num_words(separator.join(pieces)) < target:
        own = (_full_name(rng.choice(scene.groups), rng), rng.choice(_BACKDROPS[scene.backdrop]))
        pieces.append(rng.choice((*own, rng.choice(_LIGHTS[scene.light]), *rng.sample(_TAGS, 3))))
    while len(pieces) > 1 and num_words(separator.join(pieces)) > target:
        pieces.pop()
    return separator.join(pieces)
