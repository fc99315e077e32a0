"""Documents do not lie: links lead somewhere, named tests exist, nothing names a machine."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

import mmlab
from mmlab.cli.parser import make_parser
from tests.project.checkout import ROOT, read, tracked

DOCUMENTS = tracked("*.md")
NOTEBOOKS = tracked("notebooks/*.ipynb", "docs/notebooks/*.ipynb")
MOST_GUIDE_LINES = 150
# Written so that the patterns do not match themselves.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home|work|root|Users|farm|tmp)/")
PACKAGE_HOSTS = re.compile(r"pypi[.]org|pythonhosted[.]org|--(?:extra-)?index[-]url")


def prose(text: str) -> str:
    """The document without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def text_of(path: Path) -> str:
    """The text of a document; of a notebook, its prose."""
    if path.suffix == ".md":
        return read(path)
    return "\n".join(
        "".join(cell["source"]) for cell in json.loads(read(path))["cells"] if cell["cell_type"] == "markdown"
    )


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, by GitHub's rule: lower case, punctuation dropped, spaces to hyphens."""
    text = re.sub(r"```.*?```", "", text_of(path), flags=re.DOTALL)
    titles = re.findall(r"^#+ +(.+?) *$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS + NOTEBOOKS, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text_of(path))):
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


def code_of(path: Path) -> str:
    """What stands in a document's fenced code."""
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", read(path), re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize("path", DOCUMENTS, ids=str)
def test_commands_that_a_document_shows_parse(path: Path) -> None:
    for line in re.findall(r"^(?:torchrun .* -m )?(mmlab .+)$", code_of(path), re.MULTILINE):
        words = shlex.split(re.split(r"  +", line.replace("|", " "))[0], comments=True)
        if words[1:] and "..." not in line:
            make_parser().parse_args([word for word in words[1:] if word != "[NOTEBOOK]"])


@pytest.mark.parametrize("path", tracked("docs/guide/*.md", "README*.md"), ids=str)
def test_names_of_mmlab_that_the_guide_uses_exist(path: Path) -> None:
    for name in set(re.findall(r"\bmmlab\.([A-Za-z_]\w*)", code_of(path))):
        assert hasattr(mmlab, name) or find_spec(f"mmlab.{name}"), (
            f"{path} uses mmlab.{name}, which does not exist"
        )


def test_the_front_page_is_short_and_has_the_same_code_in_both_languages() -> None:
    english, chinese = (read(Path(name)) for name in ("README.md", "README.zh-CN.md"))
    assert len(english.splitlines()) <= 200
    assert len(chinese.splitlines()) <= 200
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(english) == code.findall(chinese)
    figures = re.compile(r"\d+(?:\.\d+)? %|± [\d.]+|\((?:\d{3})\)|\d+ MiB")
    assert set(figures.findall(chinese)) <= set(figures.findall(english)), "a figure of one page only"


def test_the_articles_have_the_same_code_links_and_figures_in_both_languages() -> None:
    english, chinese = (read(Path(f"docs/articles{name}.md")) for name in ("", ".zh-CN"))
    code = re.compile(r"```.*?```", re.DOTALL)
    assert code.findall(english) == code.findall(chinese)  # so it is run once, in the English page
    files = re.compile(r"\]\((\.\./[^)]+|internals/[^)]+)\)")
    assert sorted(files.findall(english)) == sorted(files.findall(chinese))
    figures = re.compile(r"[-+]?\d+(?:\.\d+)?(?: → \d+)?(?: \([^)]*\d\))? %")
    assert sorted(figures.findall(english)) == sorted(figures.findall(chinese))


def test_the_guide_is_short_asks_and_is_linked_from_the_front_page() -> None:
    pages = tracked("docs/guide/*.md")
    assert len(pages) >= 7
    for page in pages:
        assert len(read(page).splitlines()) <= MOST_GUIDE_LINES, (
            f"{page} is long: move the why to docs/internals"
        )
        assert re.search(r"^#.*\?$", prose(read(page)), re.MULTILINE), f"{page} answers no question"
        for front in ("README.md", "README.zh-CN.md"):
            assert f"]({page.as_posix()})" in read(Path(front)), f"{front} does not link {page}"


def test_no_tracked_file_names_a_machine_or_a_package_host() -> None:
    for path in tracked():
        if path.suffix in {".jpg", ".png", ".gif", ".parquet", ".tar"}:
            continue
        for number, line in enumerate(read(path).splitlines(), start=1):
            assert not MACHINE_PATHS.search(line), f"{path}:{number} holds a path of one machine"
            assert not PACKAGE_HOSTS.search(line), f"{path}:{number} names a package host"
