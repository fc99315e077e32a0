"""Words for a `Scene`: five captions that name different parts of it, in different words and lengths.

Every caption names at least one group by count, colour and shape, and either the ground or a second group; size,
pattern, relation, backdrop and light come in as the length allows. Lengths are drawn from COCO's captions.
"""

from __future__ import annotations

import random

from mmlab.data.synthetic.scenes import TABLES, Group, Scene, draw_one
from mmlab.data.text import estimate_num_tokens


def write_captions(scene: Scene, num_captions: int = 5) -> list[str]:
    """Captions of one scene; a longer list begins with the captions of a shorter one."""
    captions = []
    for number in range(num_captions):
        rng = random.Random(f"{scene.seed} caption {number}")
        rng.random()  # not used any more; without it, the captions of every seed would change
        captions.append(_sentence(scene, rng))
    return captions


def _sentence(scene: Scene, rng: random.Random) -> str:
    """A core of two parts, then whatever else still fits into a length drawn beforehand."""
    target = int(draw_one(rng, TABLES["caption_lengths"]))
    order = rng.sample(range(len(scene.groups)), len(scene.groups))
    groups = [scene.groups[number] for number in order]
    parts = {"subject": _name(groups[0], groups[0].shape), "ground": _phrase("grounds", scene.ground, rng)}
    richer = {
        "subject": _full_name(groups[0], rng),
        "light": _phrase("lights", scene.light, rng),
        "backdrop": _phrase("backdrops", scene.backdrop, rng),
        "posture": rng.choice(TABLES["words"]["postures"]),
        "opening": rng.choice(TABLES["words"]["openings"]),
    }
    if len(groups) > 1 and rng.random() < 0.75:
        relation = _relation(scene, order[0], order[1], rng)
        parts["other"] = f"{relation} {_name(groups[1], groups[1].shape)}"
        richer["other"] = f"{relation} {_full_name(groups[1], rng)}"
        if len(groups) > 2:
            richer["third"] = f"and {_full_name(groups[2], rng)}"
        if estimate_num_tokens(_join(parts)) > target:
            del parts["ground" if rng.random() < 0.3 else "other"]
    for name in rng.sample(list(richer), len(richer)):
        longer = {**parts, name: richer[name]}
        if estimate_num_tokens(_join(longer)) <= target:
            parts = longer
    text = _join(parts)
    for extra in _extras(scene, rng):
        if estimate_num_tokens(f"{text} {extra}") <= target:
            text += " " + extra
    return text


_ORDER = ("opening", "subject", "posture", "other", "third", "ground", "backdrop", "light")


def _join(parts: dict[str, str]) -> str:
    text = " ".join(parts[name] for name in _ORDER if name in parts)
    return text[0].upper() + text[1:] + "."


def _full_name(group: Group, rng: random.Random) -> str:
    shape = rng.choice(TABLES["shapes"][group.shape])
    return _name(group, shape, _phrase("sizes", group.size, rng), _phrase("patterns", group.pattern, rng))


def _phrase(kind: str, name: str, rng: random.Random) -> str:
    """One of the words for an entry of a table."""
    return rng.choice(TABLES[kind][name]["words"])


def _name(group: Group, shape: str, *looks: str) -> str:
    noun = shape if group.count == 1 else TABLES["words"]["plurals"].get(shape, shape + "s")
    words = " ".join(word for word in (*looks, group.colour, noun) if word)
    count = "an" if group.count == 1 and words[0] in "aeiou" else TABLES["words"]["counts"][group.count]
    return f"{count} {words}"


def _relation(scene: Scene, first: int, second: int, rng: random.Random) -> str:
    """How one group stands to another; in depth, only relations to the front group are known."""
    if not (scene.arrangement == "row" or 0 in (first, second)) or rng.random() < 0.3:
        return rng.choice(TABLES["words"]["together"])
    return rng.choice(TABLES["relations"][scene.arrangement][0 if first < second else 1])


def _extras(scene: Scene, rng: random.Random) -> list[str]:
    """Whole sentences for long captions, in random order."""
    lit, shaded = ("left", "right") if scene.light_from_left else ("right", "left")
    total = sum(group.count for group in scene.groups)
    sentences = [
        f"The light comes from the {lit}.",
        f"Soft shadows fall to the {shaded}.",
        f"It was taken {_phrase('lights', scene.light, rng)}.",
        f"Everything stands {_phrase('grounds', scene.ground, rng)}, {_phrase('backdrops', scene.backdrop, rng)}.",
        f"Only {total} objects can be seen." if total > 1 else "Nothing else can be seen.",
        "The background is out of focus and a little darker near the corners.",
    ]
    sentences += [f"One can make out {_full_name(group, rng)}." for group in scene.groups]
    rng.shuffle(sentences)
    return sentences
