"""Documents do not lie: links lead somewhere, named tests exist, nothing names a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.project.checkout import ROOT, read, tracked

DOCUMENTS = tracked("*.md")
# Written so that the patterns do not match themselves.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|work|root|Users|farm|tmp)/")
PACKAGE_HOSTS = re.compile(r"pypi[.]org|pythonhosted[.]org|--(?:extra-)?index[-]url")


def prose(text: str) -> str:
    """The document without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule: lower case, punctuation dropped, spaces to hyphens."""
    text = re.sub(r"```.*?```", "", read(path), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(path))):
        if target.startswith(("https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / path.parent / name).resolve() if name else ROOT / path
        assert file.exists(), f"{path} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file.relative_to(ROOT)), f"{path} links to {target}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_tests_that_a_document_names_exist(path: Path) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", read(path)):
        assert f"def {name}(" in read(Path(file)) if name else (ROOT / file).is_file(), f"no {file}::{name}"


def test_the_front_page_is_short_and_has_the_same_code_in_both_languages() -> None:
    english, chinese = (read(Path(name)) for name in ("README.md", "README.zh-CN.md"))
    assert len(english.splitlines()) <= 200
    assert len(chinese.splitlines()) <= 200
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(english) == code.findall(chinese)
    figures = re.compile(r"\d+(?:\.\d+)? %|± [\d.]+|\((?:\d{3})\)|\d+ MiB")
    assert set(figures.findall(chinese)) <= set(figures.findall(english)), "a figure of one page only"


def test_no_tracked_file_names_a_machine_or_a_package_host() -> None:
    for path in tracked():
        if path.suffix in {".jpg", ".png", ".parquet", ".tar"}:
            continue
        for number, line in enumerate(read(path).splitlines(), start=1):
            assert not MACHINE_PATHS.search(line), f"{path}:{number} holds a path of one machine"
            assert not PACKAGE_HOSTS.search(line), f"{path}:{number} names a package host"
