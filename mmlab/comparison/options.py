"""The options of a comparison, and how options are read: by pydantic, from frozen dataclasses.

Each dataclass is the only list of its options. The command line makes its flags from it; `mmlab.Lab`,
`mmlab.compare` and TOML files of runs (`mmlab.comparison.config`) check their options against it. Needs
neither torch nor the data.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from os.path import abspath, basename
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args

from mmlab.errors import OptionError, check_numbers, listed, unknown_name

if TYPE_CHECKING:
    from pydantic import ValidationError

COMPARED = ("random", "sorted", "bucket", "budget", "fastest")  # schedulers, where none are named
Options = TypeVar("Options")
PrecisionName = Literal["fp32", "tf32", "bf16", "fp16"]
PRECISIONS: tuple[str, ...] = get_args(PrecisionName)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """Which samples an epoch has, and how much each counts; by default all once, with equal weight."""

    ratios: Annotated[
        Mapping[str, float] | tuple[tuple[int, Mapping[str, float]], ...] | None,
        "share of each modality, as in image-text=0.7,text-only=0.3 (from Python and in run files also points: "
        "an epoch and the shares there)",
    ] = None
    adaptive: Annotated[
        Literal["off", "sampling", "loss"],
        "difficult samples come more often, or have a greater weight in the loss",
    ] = "off"
    length: Annotated[
        Literal["keep", "undersample", "oversample"], "samples of an epoch under ratios, see mmlab.Mixed"
    ] = "keep"
    correct: Annotated[
        bool, "give samples that are drawn more often less weight: the expected loss is unchanged"
    ] = False

    def __post_init__(self) -> None:
        if self.ratios is not None and self.adaptive == "sampling":
            raise OptionError(
                "ratios and adaptive='sampling' both choose the samples of an epoch; use one of them, or "
                "adaptive='loss'"
            )
        if self.correct and self.adaptive != "sampling":
            raise OptionError(f"correct needs adaptive='sampling', found adaptive={self.adaptive!r}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonOptions(SamplingOptions):
    """Options of `mmlab.compare`, `mmlab.Lab` and `mmlab compare`, apart from the data and the schedulers."""

    equal: Annotated[
        Literal["memory", "batch_size"],
        "what is equal for all schedulers: the predicted memory of the largest batch, or the batch size (with a budget, too)",
    ] = "memory"
    budget: Annotated[float | None, "padded tokens and patches a batch (default: what memory allows)"] = None
    batch_size: Annotated[
        int, "samples of a fixed batch; at equal memory, of `random`, whose peak is the limit of all"
    ] = 32
    memory_gb: Annotated[float | None, "GiB to plan for (default: what `random` needs)"] = None
    epochs: Annotated[int, "turns of every scheduler; each is one repetition of the timing"] = 3
    limit: Annotated[int | None, "use N pairs, drawn by the seed from every split (default: all)"] = None
    images: Annotated[str | None, "folder of the images, where they are not beside the data"] = None
    skip_bad_rows: Annotated[bool, "leave out rows that cannot be used, with a warning"] = False
    image: Annotated[str, "pixels: square:SIDE, or aspect:SIDE[:MULTIPLE] (keeps shape)"] = "aspect:128"
    augment: Annotated[str, "random changes of images: none, crop, colour or randaugment"] = "none"
    model: Annotated[str, "tiny, small, base, resnet18, resnet50; with processor, its model"] = "tiny"
    processor: Annotated[str | None, "that of a vision-language model; for conversations"] = None
    tokenizer: Annotated[str, "builtin, or a Hugging Face name or path"] = "builtin"
    lr: Annotated[float, "highest learning rate"] = 1e-3
    device: Annotated[str, "auto, cpu, cuda, cuda:1, ..."] = "auto"
    precision: Annotated[PrecisionName, "of the training"] = "fp32"
    seed: Annotated[int, "of weights, plans and the held-out split"] = 0
    num_workers: Annotated[int | None, "threads that decode (default: one a core, at most 8)"] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The options of `PlannedLoader` that a TOML file can set."""

    backend: Literal["threads", "torch"] = "threads"
    num_workers: int | Literal["auto"] | None = None
    prefetch: int | None = None
    on_bad_sample: Literal["raise", "skip"] = "raise"
    max_bad_samples: int = 100
    max_ram_gb: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions(LoaderOptions):
    """Which samples to train on, how they are prepared and how they are loaded.

    With a processor they are conversations. Only pairs use `image`, `tokenizer`, `max_tokens` and `cache_limit_gib`.
    """

    path: str
    image: str = "aspect:128"  # image policy in short form, see `parse_image_policy`
    images: str | None = None  # folder of the images, where they are not beside the data
    skip_bad_rows: bool = False  # leave out rows that cannot be used, with a warning
    tokenizer: str = "builtin"
    processor: str | None = None  # name of the one that prepares conversations
    limit: int | None = None  # use so many samples, drawn by the seed from every split
    max_tokens: int = 512
    cache: str | None = None  # folder
    cache_limit_gib: float | None = None


def read_options(kind: type[Options], values: Mapping[str, Any], where: str) -> Options:
    """Options from plain values, such as a TOML table; "none" means None if None is allowed and text is not.

    >>> read_options(ComparisonOptions, {"epochs": 2}, "compare").epochs
    2
    >>> read_options(ComparisonOptions, {"epochs": "two"}, "compare")
    Traceback (most recent call last):
        ...
    mmlab.errors.OptionError: compare epochs: expected a valid integer, found 'two'

    Args:
        kind: a dataclass, or a pydantic model.
        where: where the values come from; messages begin with it.

    Raises:
        OptionError: an unknown name, a value of the wrong type, or one that the dataclass refuses.
    """
    from pydantic import ValidationError, create_model

    types = {name: str(option.type) for name, option in getattr(kind, "__dataclass_fields__", {}).items()}
    optional = {name for name, type_ in types.items() if type_.endswith("| None") and "str" not in type_}
    values = {name: None if value == "none" and name in optional else value for name, value in values.items()}
    # pydantic applies a model's configuration to the dataclasses in it as well
    reader = create_model("Reader", __config__={"extra": "forbid", "strict": True}, options=(kind, ...))
    try:  # via JSON, where pydantic accepts a list for a tuple, but no text for a number
        found = reader.model_validate_json(json.dumps({"options": dict(values)}, default=str))
    except ValidationError as error:
        raise _explained(error, kind, where) from None
    check_numbers(values, f"{where}: ")
    return found.options  # type: ignore[attr-defined]


def scheduler_names(schedulers: Sequence[str] | Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the schedulers to compare, each once; those of a mapping are free, but are names of folders, too.

    Raises:
        OptionError: no list, no name, a name given twice, an unknown name; or in a mapping a name that no folder inside the
            runs can have, or a value that is no scheduler.
    """
    names = listed(schedulers)
    if not names:
        raise OptionError("no schedulers to compare; give at least one name")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError(f"scheduler {twice[0]!r} is named twice; name each once")
    from mmlab.schedule.schedulers import Scheduler, scheduler_type

    for name in names:
        if not isinstance(schedulers, Mapping):
            scheduler_type(name)
        elif not isinstance(schedulers[name], Scheduler) or basename(abspath(str(name))) != name:
            raise OptionError(
                f"{name!r}: {schedulers[name]!r:.40}: expected a name that a folder can have, and a scheduler"
            )
    return names


def names_of(kind: type) -> list[str]:
    """Names of the options of a dataclass or of a pydantic model."""
    return list(getattr(kind, "model_fields", None) or kind.__dataclass_fields__)  # type: ignore[attr-defined]


def _explained(error: ValidationError, kind: type, where: str) -> OptionError:
    """Says what was expected, by each type of the option if it has several, and what was found."""
    # an option may only be missing because its name is misspelt
    first, *others = sorted(error.errors(), key=lambda problem: problem["type"] == "missing")
    if not first["loc"]:  # too deep, or text that no encoding has
        return OptionError(f"{where}: {first['msg']}")
    (_, *place), found = first["loc"], first["input"]
    if first["type"] == "value_error":  # raised by the dataclass itself
        return OptionError(f"{where}: {first['ctx']['error']}")
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_name(f"key in {where}", place[0], names_of(kind))
    if first["type"] == "missing" and len(place) == 1:
        return OptionError(f"{where} {place[0]} is missing")
    alike = [first, *(other for other in others if other["loc"][1] == place[0])]
    known = {"missing": "more items"}  # than the list has
    expected = dict.fromkeys(
        known.get(problem["type"], problem["msg"].removeprefix("Input should be ")) for problem in alike
    )
    return OptionError(f"{where} {place[0]}: expected {' or '.join(expected)}, found {found!r}")
