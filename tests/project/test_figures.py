"""Every measured figure has a source: its section links to a result file, which one command rewrites.

A paragraph, list item or table states a measured figure where it has a number with a unit of speed, or says that something
was measured and has a number with a unit. Code is left out. What was measured without a result file is not written down.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.checkout import read, tracked

PAGES = tracked("README*.md", "docs/*.md")
NUMBER = r"(?<![\w.])\d[\d,.]*(?: (?:to|and|or|/) [\d.,]+)* ?"
SPEED = re.compile(
    NUMBER
    + r"(?:samples/s|images/s|tokens/s|batches/s|steps/s|(?:samples|images|tokens|batches) a second|ms\b|us\b|µs\b"
    r"|MiB/s|MB/s|GB/s|times (?:as (?:fast|slow)|faster|slower)|x (?:faster|slower)|% (?:faster|slower)"
    r"|张/秒|样本/秒|毫秒|倍速)"
)
MEASURED = re.compile(r"\b(?<!not )(?<!not yet )(?:measured|took)\b|实测", re.IGNORECASE)
QUANTITY = re.compile(NUMBER + r"(?:%|s\b|seconds|minutes|MiB|GiB|KiB|kB|MB|GB|times\b|points|秒|个百分点)")
TABLE = re.compile(  # with a unit of speed in one cell and a number in another
    r"\A\s*\|(?=.*\b(?:(?:samples|images|tokens|batches|steps)(?:/s|_per_s| a second)|ms|us|µs|training time)\b).*\| ?[-+±]?\d",
    re.DOTALL,
)
SOURCE = re.compile(r"\]\((?:\.\./)*benchmarks/results/\w+\.json\)")


def sections(text: str) -> list[tuple[str, str]]:
    """Heading and text of each section, without code."""
    text = re.sub(r"```.*?```|^(?: {4}[^\n]*\n)+", "", text, flags=re.DOTALL | re.MULTILINE)
    parts = re.split(r"^(#+ .*)$", f"# \n{text}", flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def unsourced(text: str) -> list[str]:
    """Blocks that state a measured figure in a section without a result file, each cut short.

    >>> unsourced("# Gain\\n\\nIt trains 439 samples/s.")
    ['# Gain: 439 samples/s']
    """
    found = []
    for heading, body in sections(text):
        if SOURCE.search(body):
            continue
        for block in re.split(r"\n\s*\n|\n(?=[-*] )", body):
            figure = SPEED.search(block) or (MEASURED.search(block) and QUANTITY.search(block))
            if figure or TABLE.search(block):
                found.append(f"{heading}: {figure[0] if figure else 'a table of speeds'}")
    return found


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_every_measured_figure_has_a_result_file(path: Path) -> None:
    assert unsourced(read(path)) == [], (
        f"{path}: link the section to benchmarks/results/NAME.json, or drop the figure"
    )


LINK = "[figures](../benchmarks/results/demo.json)"


@pytest.mark.parametrize(
    ("claim", "is_found"),
    [
        ("mmlab is 1.7 times as fast.", True),
        ("A step takes 34 ms.", True),
        ("| loader | speed |\n|---|---|\n| mmlab | 420 images/s |", True),
        ("| loader | samples/s |\n|---|---|\n| mmlab | 420 |", True),
        ("| claim | gain |\n|---|---|\n| samples a second | +15 % |", True),
        ("Measured here: 12 % less.", True),
        ("速度为 420 张/秒。", True),
        (f"A step takes 34 ms ({LINK}).", False),
        (f"From {LINK}.\n\nA step takes 34 ms.", False),
        (f"# Other\n\n{LINK}\n\n# Speed\n\nA step takes 34 ms.", True),
        ("The limit is 5 %, within 16 GiB.", False),
        ("```\n420 images/s\n```", False),
        ("On a GPU: not yet measured.", False),
    ],
)
def test_a_claim_without_a_source_is_found(claim: str, is_found: bool) -> None:
    assert bool(unsourced(claim)) == is_found
