"""Every exception that mmlab raises on purpose.

::

    MmlabError
    ├── DataError(ValueError)       the user's data: bad rows, unreadable files, unknown format
    ├── OptionError(ValueError)     the user's options: unknown name, impossible budget, wrong range
    └── RunError(RuntimeError)      something failed while running: a worker died, a loss is not finite

`DataError` and `OptionError` are also `ValueError`, so code that does not know mmlab can still catch them. The
command line turns those two into exit code 2 and every other failure into exit code 1.
"""

from __future__ import annotations


class MmlabError(Exception):
    """The root of the tree above."""


class DataError(MmlabError, ValueError):
    """The input data are wrong; the message names the item, what was expected and what to do.

    Where rows are at fault, `bad_rows` has every one (`mmlab.data.records.BadRow`); the message lists the first few.
    """

    def __init__(self, message: str, *, bad_rows: tuple = ()) -> None:
        super().__init__(message)
        self.bad_rows = bad_rows


class OptionError(MmlabError, ValueError):
    """An option is wrong; the message names the value, the limit and the remedy."""


class RunError(MmlabError, RuntimeError):
    """A run failed for a reason that is not the user's input."""


def unknown_name(kind: str, name: object, known: object) -> OptionError:
    """Build the error for a name that is not in a table of names.

    >>> str(unknown_name("scheduler", "rndom", ["random", "sorted"]))
    "unknown scheduler 'rndom'; did you mean 'random'? Known: random, sorted"
    """
    import difflib

    names = sorted(str(item) for item in known)  # type: ignore[attr-defined]
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return OptionError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")
