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

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

_ABOVE_0, _BELOW_1 = 5e-324, 1 - 2**-53  # the next floats
_COUNTS = """accumulation_steps classes_per_octave embed_dim eval_batches eval_every every_steps fusion_heads
    fusion_levels head_dim hidden_dim image_depth image_dim image_layers interval keep_last limit limit_bytes lora_rank max_batch_size
    mega_batch micro_batches multiple num_devices num_epochs num_negatives num_processes num_samples num_threads patch prefetch ranks
    repeats rounds side steps text_depth text_dim text_step threads total_steps vocab_size window world_size"""
_AMOUNTS = "budget every_minutes interval_s max_memory_gb price_per_hour timeout_s"
_GIB = "cache_limit_gib limit_gib max_ram_gb memory_gb"
# Least and greatest value of every numeric option; where the least is an int, the option is a whole number.
BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(_COUNTS.split(), (1, 2**63 - 1)),
    **dict.fromkeys(_AMOUNTS.split(), (_ABOVE_0, 10**15)),
    **dict.fromkeys(_GIB.split(), (_ABOVE_0, 9 * 10**5)),  # as many bytes as an amount
    **dict.fromkeys(("ahead", "keep_best", "max_bad_samples", "num_held_out", "num_workers"), (0, math.inf)),
    **dict.fromkeys(("fusion_layers", "mask_id", "num"), (0, math.inf)),
    **dict.fromkeys(("lr", "weight_decay"), (0.0, math.inf)),
    **dict.fromkeys(("flip_probability", "val_fraction", "warmup_ratio"), (0.0, 1.0)),
    **dict.fromkeys(("mask_ratio", "smoothing", "target_ratio"), (_ABOVE_0, 1.0)),
    **dict.fromkeys(("brightness", "contrast", "saturation"), (0.0, 1e6)),
    **{"captions_per_image": (1, 1000), "epochs": (1, 10**4)},
    **{"num_images": (1, 10**9), "port": (0, 2**16 - 1)},
    **{"dropout": (0.0, _BELOW_1), "fraction": (_ABOVE_0, _BELOW_1)},
    **{"hue": (0.0, 0.5), "magnitude": (0, 30), "num_operations": (0, 100)},  # of images
    "num_probes": (7, math.inf),  # as many as `mmlab.pricing.time_model.TIME_EXPONENTS`
    "batch_size": (1, 2**16),  # twice that of CLIP
    **dict.fromkeys(("image_side", "max_side"), (16, 2**14)),  # pixels
    "max_tokens": (2, math.inf),  # the special tokens
    "num_tokens": (2, 512),  # what the presets take
    "seed": (0, 2**63 - 1),  # what torch and NumPy both take
}


class MmlabError(Exception):
    """The base of the exceptions above."""


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


# by name, as another process tells them
USER_ERRORS: dict[str, type[MmlabError]] = {"DataError": DataError, "OptionError": OptionError}


@contextmanager
def loading_by_name(problem: str) -> Iterator[None]:
    """Turn whatever transformers raises while it loads something by a user's name into an `OptionError`.

    Raises:
        OptionError: it could not be loaded; a damaged configuration makes transformers raise nearly anything.
    """
    try:
        yield
    except Exception as error:
        hint = "; offline, name a local folder or set HF_HUB_OFFLINE=1" if "connect to" in str(error) else ""
        raise OptionError(f"{problem}: {' '.join(str(error).split())}{hint}") from error


def first_line(error: object) -> str:
    """The type of an error or a warning and the first line of its message.

    >>> first_line(ValueError("\\nno driver\\nsee the log"))
    'ValueError: no driver'
    """
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


def with_notes(error: BaseException) -> str:
    """The message of an error, with the notes that say where it was raised.

    >>> error = ValueError("no such kernel")
    >>> error.add_note("while scheduler random trained")
    >>> with_notes(error)
    'no such kernel (while scheduler random trained)'
    """
    return str(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def printable(text: object) -> str:
    r"""A text for a terminal: control characters from data, which could move its cursor, are spelled out.

    >>> print(printable("a\x1b[2Jb"))
    a\x1b[2Jb
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: ascii(found[0])[1:-1], str(text))


def unknown_name(kind: str, name: object, known: Iterable[object]) -> OptionError:
    """Build the error for a name that is not in a table of names.

    >>> str(unknown_name("scheduler", "rndom", ["random", "sorted"]))
    "unknown scheduler 'rndom'; did you mean 'random'? Known: random, sorted"
    """
    import difflib

    names = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else "."
    return OptionError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")


def listed(names: Any, wanted: str = "schedulers must be a list of names") -> tuple[Any, ...]:
    """Names as a tuple; a text is one name. Raises OptionError for anything that is not a list."""
    if not isinstance(names, Iterable):
        raise OptionError(f"{wanted}, found {names!r}")
    return (names,) if isinstance(names, str) else tuple(names)


def check_name(kind: str, name: object, known: Collection[object]) -> None:
    """Raise OptionError if a name is not among the known ones."""
    if name not in list(known):  # it need not be hashable
        raise unknown_name(kind, name, known)


def check_is(name: str, value: object, kind: Any, wanted: str, *, optional: bool = False) -> None:
    """Raise OptionError if a value is not of a kind: a type, or the name of an attribute that it must have.

    >>> check_is("scheduler", "random", "plan", "a scheduler, as make_scheduler() gives")
    Traceback (most recent call last):
        ...
    mmlab.errors.OptionError: scheduler must be a scheduler, as make_scheduler() gives, found 'random'

    Args:
        optional: None stands for a default.
    """
    fits = hasattr(value, kind) if isinstance(kind, str) else isinstance(value, kind)
    if isinstance(value, type) or not (fits or (optional and value is None)):
        raise OptionError(f"{name} must be {wanted}, found {value!r:.80}")


def check_state(what: str, state: object, *keys: str) -> None:
    """Raise DataError unless this is the `state_dict()` of a loader or a trainer."""
    if not isinstance(state, Mapping) or not state.keys() >= {*keys}:
        raise DataError(f"this is not a {what}'s state_dict(): found {state!r:.80}")


def check_numbers(options: Any, prefix: str = "") -> None:
    """Raise OptionError for a number outside its bounds in `BOUNDS`; other names are not checked.

    >>> check_numbers({"batch_size": 1.5})
    Traceback (most recent call last):
        ...
    mmlab.errors.OptionError: batch_size must be a whole number, found 1.5

    Args:
        options: values by name, or a dataclass that has them. None and "auto" stand for a default, in a dataclass only
            where the option's type has None or a text.
        prefix: text before the name in the message; "--" makes it an option of the command line.
    """
    types: dict[str, str] = {}
    if not isinstance(options, Mapping):
        fields = options.__dataclass_fields__.items()
        # without the help of an Annotated type
        types = {name: re.split("['\"]", str(field.type))[0] for name, field in fields}
        options = {name: getattr(options, name) for name in types}
    for name in options.keys() & BOUNDS.keys():
        (least, most), value = BOUNDS[name], options[name]
        whole = isinstance(least, int)
        is_number = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        kind = types.get(name, "str | None")
        is_default = (value is None and "None" in kind) or (value == "auto" and "str" in kind)
        if is_default or (is_number and least <= value <= most and value < math.inf):
            continue
        bounds = "above 0" if least == _ABOVE_0 else f"at least {least:g}"
        if not is_number:
            bounds = "a whole number" if whole else "a number"
        elif value > least:
            bounds = "finite" if value == math.inf else "below 1" if most == _BELOW_1 else f"at most {most:,}"
        shown = name.replace("_", "-") if prefix == "--" else name
        raise OptionError(f"{prefix}{shown} must be {bounds}, found {value!r}")
