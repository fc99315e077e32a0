"""The command line: `mmlab COMMAND ...`.

Exit codes: 0 done, 1 failed, 2 bad input or usage, with the reason on stderr. With `--json` stdout holds
one JSON document and nothing else; progress bars and notes go to stderr. Each command imports what it needs,
so `mmlab --help` is instant.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict

from mmlab.cli.parser import call, make_parser
from mmlab.errors import DataError, OptionError, printable, with_notes
from mmlab.machine import place_in_launch, share_cores

_WRONG_PATH = ("ENOENT", "EEXIST", "EISDIR", "ENOTDIR", "EACCES", "EPERM", "EROFS", "ENAMETOOLONG", "ELOOP")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (a caller closed it: `2>&-`)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job; children would inherit this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    options = make_parser().parse_args(arguments)
    share_cores()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name may hold what cannot be written
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        quiet = contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()
        with quiet, warnings.catch_warnings():
            warnings.showwarning = lambda text, *_, **__: _say(f"warning: {text}")
            found = call(options)
        if place_in_launch()[0] == 0:  # under torchrun only one process prints
            document = found.as_dict() if hasattr(found, "as_dict") else asdict(found)
            print(json.dumps(document, indent=2, allow_nan=False) if options.json else printable(found))
    except (DataError, OptionError) as error:
        _say(f"error: {with_notes(error)}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("MMLAB_DEBUG"):
            raise
        kind = errno.errorcode.get(getattr(error, "errno", 0))
        if isinstance(error, OSError) and kind in _WRONG_PATH and error.filename is not None:
            _say(f"error: {error.filename}: {error.strerror}")
            return 2
        more = "; no more may be started: raise ulimit -u" if "start new thread" in str(error) else ""
        _say(f"failed: {type(error).__name__}: {with_notes(error)}{more} (MMLAB_DEBUG=1 shows where)")
        return 1
    return 0 if getattr(found, "ok", True) else 1


def _say(text: str) -> None:
    print(printable(f"mmlab: {text}"), file=sys.stderr)
