"""Lines of code per room of the package, without docstrings, comments and blank lines.

python tests/project/count_code.py            a line per room, and the sum
python tests/project/count_code.py --files    a line per file too
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "mmlab"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def docstring_lines(tree: ast.AST) -> set[int]:
    """The lines of all docstrings."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def count_code(source: str) -> int:
    """Lines that hold code.

    >>> count_code('def f():\\n    "What f does."\\n\\n    # a comment\\n    return 1\\n')
    2
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def code_per_file() -> dict[Path, int]:
    """Every file of the package, relative to it, with its lines of code."""
    return {
        path.relative_to(PACKAGE): count_code(path.read_text("utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def main() -> None:
    """Print the table."""
    files = code_per_file()
    rooms: Counter[str] = Counter()
    for path, lines in files.items():
        rooms[path.parts[0].removesuffix(".py")] += lines
    for room, lines in rooms.most_common():
        print(f"{lines:6,}  {room}")
        if "--files" in sys.argv:
            for path, own in files.items():
                if path.parts[0].removesuffix(".py") == room and len(path.parts) > 1:
                    print(f"        {own:6,}  {path}")
    print(f"{sum(files.values()):6,}  in {len(files)} files")


if __name__ == "__main__":
    main()
