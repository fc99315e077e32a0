"""Build the static site from the pages and the executed notebooks; a link that leads nowhere ends it.

    python docs/site/build_site.py build/site

Sphinx reads a copy of the tracked files in which the executed notebooks stand in the place of the stripped ones, so that
every link of the repository holds there too. The Chinese notebooks have the same code, and so the same outputs. Needs the
extra `docs`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PAGES = [
    "*.md",
    "docs/*.md",
    "docs/**/*.md",
    "notebooks/*.ipynb",
    "notebooks/zh/*.ipynb",
    "benchmarks/results/README.md",
    "data/README.md",
]
INDEX = """# mmlab

```{toctree}
:caption: Start
The front page <README>
中文 <README.zh-CN>
```
"""
PARTS = {  # caption: pages, in order of their names
    "Notebooks": "notebooks/*.ipynb",
    "中文 notebook": "notebooks/zh/*.ipynb",
    "The articles": "docs/articles*.md",
    "Guide": "docs/guide/*.md",
    "Internals": "docs/internals/*.md",
    "Decisions": "docs/decisions/*.md",
}
MORE = ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG", "benchmarks/results/README", "data/README")
# lines of code have up to 110 characters; texts stay as narrow as the theme has them
CSS = ".content { width: 62em } .content :is(p:not(:has(img)), li) { max-width: 42em }"
SETTINGS = {
    "project": "mmlab",
    "extensions": ["myst_nb"],
    "include_patterns": PAGES,
    "root_doc": "index",
    "html_theme": "furo",
    "html_title": "mmlab",
    "html_show_copyright": False,
    "html_static_path": ["_site"],
    "html_css_files": ["wide.css"],
    "nb_execution_mode": "off",
    "myst_heading_anchors": 4,
    # not about links: headings that skip a level, texts that Pygments cannot colour, what the page of a notebook leaves out
    "suppress_warnings": [
        "myst.header",
        "misc.highlighting_failure",
        "mystnb.unknown_mime_type",
        "toc.not_included",
    ],
}


def stage(folder: Path) -> None:
    """Copy what the site is made of into a folder, with an index of it."""
    command = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        is_copied = name.startswith("notebooks/") and (ROOT / "docs" / name).is_file()
        if (ROOT / name).is_file() and not is_copied:
            path = folder / name.replace("docs/notebooks/", "notebooks/")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path)
    for path in folder.glob("notebooks/*.ipynb"):
        path.write_text(path.read_text("utf-8").replace("](../../", "](../"), "utf-8")
    for path in folder.glob("notebooks/zh/*.ipynb"):
        path.write_text(with_outputs(path, folder / "notebooks" / path.name), "utf-8")
    for path in folder.glob("*.md"):
        path.write_text(path.read_text("utf-8").replace("](docs/notebooks/", "](notebooks/"), "utf-8")
    (folder / "_site").mkdir()
    (folder / "_site" / "wide.css").write_text(CSS, "utf-8")
    index = INDEX
    for caption, pattern in PARTS.items():
        pages = sorted(path.relative_to(folder).with_suffix("") for path in folder.glob(pattern))
        index += "\n".join(["", "```{toctree}", f":caption: {caption}", *map(str, pages), "```", ""])
    index += "\n".join(["", "```{toctree}", ":caption: More", *MORE, "```", ""])
    (folder / "index.md").write_text(index, "utf-8")


def with_outputs(translated: Path, executed: Path) -> str:
    """The translated notebook with the outputs of those cells whose code was executed as it is."""
    notebook, other = (json.loads(path.read_text("utf-8")) for path in (translated, executed))
    ran = {cell["id"]: cell for cell in other["cells"] if cell["cell_type"] == "code"}
    for cell in notebook["cells"]:
        if (same := ran.get(cell["id"])) is not None and same["source"] == cell["source"]:
            cell["outputs"], cell["execution_count"] = same["outputs"], same["execution_count"]
    return json.dumps(notebook, ensure_ascii=False)


def build(target: Path) -> int:
    """Build the site into a folder; returns Sphinx's exit code, not 0 where it warned."""
    from sphinx.application import Sphinx

    with TemporaryDirectory() as name:
        source = Path(name) / "source"
        stage(source)
        app = Sphinx(
            source,
            None,
            target,
            Path(name) / "doctrees",
            "html",
            confoverrides=SETTINGS,
            status=None,
            warningiserror=True,
            keep_going=True,
        )
        app.build()
        return app.statuscode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).resolve()))
