"""One TOML file describes one training run; every key is checked before anything is loaded.

A section's keys are the options of the function or class that it configures, under the same names and with the same
defaults, but `image` is `aspect:128`. `examples/train.toml` shows them at work.

    [data]        path, images, image, skip_bad_rows, tokenizer, limit, max_tokens, and the loader's options
                  (`PlannedLoader`); cache, the folder of a cache, which is filled before training, and cache_limit_gib
                  (see docs/internals/cache.md)
    [augment]     name, and options of `mmlab.Augment` that override those of that name
    [sampling]    ratios, length, adaptive, correct (`mmlab.comparison.options.SamplingOptions`)
    [model]       preset, image_encoder, text_encoder, and the sizes of `mmlab.model.presets.ModelConfig`; or name,
                  that of a vision-language model of transformers, and lora_rank: then `path` holds
                  conversations, and [data] has processor (default: the model's own) instead of image,
                  tokenizer, max_tokens and augmentation
    [scheduler]   name, and the options of that scheduler; for `memory` and `fastest` also memory_gb, the GiB
                  to plan for (default: ask the device), and for `memory` follow, whether the plan is
                  corrected from the memory that steps use (default: true)
    [trainer]     num_epochs, and the options of `FusionTrainer`
    [parallel]    the options of `ParallelOptions`, for runs on several ranks
    [checkpoint]  the options of `Checkpoints`
"""

from __future__ import annotations

import builtins
import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import ndiff
from inspect import formatannotation
from pathlib import Path
from typing import Any

from pydantic import create_model

from mmlab.comparison.options import DataOptions, SamplingOptions, read_options
from mmlab.comparison.preparation import augmentation
from mmlab.data.augment import Augment
from mmlab.errors import DataError, OptionError, check_is, check_name
from mmlab.machine import regular
from mmlab.model.conversation_model import refuse_preset
from mmlab.model.presets import PRESETS, ModelConfig
from mmlab.parallel.reduce import ParallelOptions
from mmlab.schedule.schedulers import SCHEDULERS
from mmlab.training.checkpoint.keeping import CheckpointOptions
from mmlab.training.options import TrainOptions

Section = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions(TrainOptions):
    """How to train, and how long."""

    num_epochs: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A checked configuration. Sections whose keys depend on a name hold the keys that were given."""

    name: str  # of the run
    data: DataOptions
    augment: Augment | None
    sampling: SamplingOptions
    model: Section
    scheduler: Section
    trainer: TrainerOptions
    parallel: ParallelOptions
    checkpoint: CheckpointOptions

    @property
    def processor(self) -> str | None:
        """Name of the processor that makes batches of conversations; None where the data are pairs."""
        return self.data.processor or self.model.get("name")

    def toml(self) -> str:
        """What differs from the defaults, as TOML."""
        lines = [f"name = {_toml(self.name)}"]
        for section in dataclasses.fields(self)[1:]:
            if values := _chosen(getattr(self, section.name)):
                lines += ["", f"[{section.name}]"]
                lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        return "\n".join(lines) + "\n"


def changed_options(path: Path, config: RunConfig) -> str:
    """The lines of a run's configuration that are no more (`- lr = 0.1`) or are new (`+ lr = 0.2`); empty without the file."""
    new = config.toml()
    old = path.read_text("utf-8", errors="replace") if path.is_file() else new
    lines = ndiff(old.splitlines(), new.splitlines())
    return "; ".join(line for line in lines if line[0] in "+-" and line[2:])


_OF_PAIRS = ("image", "tokenizer", "max_tokens", "cache_limit_gib")


def load_config(path: str | Path, changes: Iterable[str] = ()) -> RunConfig:
    """Read and check a configuration file.

    Args:
        changes: `section.key=value` each, applied before checking; a value is TOML, or else text.

    Raises:
        DataError: no such file, or not TOML.
        OptionError: an unknown section, key, preset or scheduler, or a value of the wrong kind.
    """
    check_is("config", path, str | Path, "the path of a run's TOML file")
    path = Path(path)
    try:
        with open(path, encoding="utf-8-sig", opener=regular) as file:
            sections = tomllib.loads(file.read())
    except OSError as error:
        what = " is a folder" if path.is_dir() else f": {error.strerror}"
        raise DataError(f"{path}{what}; give the TOML file of a run") from error
    except (ValueError, RecursionError) as error:  # also 5,000 digits, or as many brackets
        raise DataError(f"{path} is not TOML: {error}") from error
    for change in changes:
        _apply(change, sections)
    name = sections.pop("name", path.stem)
    folder = Path(name).parts if isinstance(name, str) and "\0" not in name else ()
    if not folder or Path(name).is_absolute() or ".." in folder:
        raise OptionError(f"{path}: name must be that of a folder inside the runs, found {name!r}")
    known = [section.name for section in dataclasses.fields(RunConfig)]
    for section, values in sections.items():
        check_name(f"section in {path}", section, known)
        check_is(f"{path}: {section}", values, dict, f"a section, [{section}] and its keys below")

    def read(section: str, kind: Any) -> Any:
        return read_options(kind, sections.get(section, {}), f"[{section}] of {path}")

    config = RunConfig(
        name=name,
        data=read("data", DataOptions),
        augment=_augment(sections.get("augment", {}), f"[augment] of {path}"),
        sampling=read("sampling", SamplingOptions),
        model=_given(read("model", _model_options(sections.get("model", {})))),
        scheduler=_given(read("scheduler", _scheduler_options(sections.get("scheduler", {})))),
        trainer=read("trainer", TrainerOptions),
        parallel=read("parallel", ParallelOptions),
        checkpoint=read("checkpoint", CheckpointOptions),
    )
    if config.processor is not None:
        _check_conversations(config, sections, path)
    return config


def _check_conversations(config: RunConfig, sections: Mapping[str, Section], path: Path) -> None:
    """Raise OptionError for options that apply to image-text pairs only."""
    if "name" not in config.model:
        raise OptionError(f"{path}: processor is of a vision-language model; give its [model] name too")
    refuse_preset(config.model["name"], f"{path}: [model] name")
    given = [f"[data] {key}" for key in _OF_PAIRS if key in sections["data"]]
    given += ["[augment]"] if config.augment is not None else []
    given += ["[sampling] adaptive"] if config.sampling.adaptive != "off" else []
    given += ["[trainer] objectives"] if "objectives" in sections["trainer"] else []
    if given:
        raise OptionError(
            f"{path}: {', '.join(given)}: a vision-language model's own processor makes its batches, and its loss is of "
            "its answers; leave that out"
        )


def _model_options(values: Mapping[str, Any]) -> type:
    """A preset, encoders, and sizes, where the preset gives the defaults; or the name of a model."""
    if "name" in values:
        return _reader(name=(str, ...), lora_rank=(int, None))
    preset = values.get("preset", "small")
    check_name("[model] preset", preset, PRESETS)
    encoders = {"preset": (str, preset), "image_encoder": (str, None), "text_encoder": (str, None)}
    return _reader(**encoders, **_plain_options(ModelConfig))


def _scheduler_options(values: Mapping[str, Any]) -> type:
    """Options of the named scheduler; `memory` and `fastest` ask the device for their budget."""
    name = values.get("name", "budget")
    check_name("[scheduler] name", name, SCHEDULERS)
    options = _plain_options(SCHEDULERS[name])
    del options["world_size"]
    if name in ("memory", "fastest"):
        del options["budget"]
        options["memory_gb"] = (float, None)
    if name == "memory":
        options["follow"] = (bool, True)
    return _reader(name=(str, name), **options)


def _reader(**options: tuple[Any, Any]) -> type:
    return create_model("Options", __config__={"extra": "forbid", "strict": True}, **options)  # type: ignore[call-overload]


def _plain_options(kind: type) -> dict[str, tuple[Any, Any]]:
    """Type and default of each field of a dataclass whose type consists of plain values, as TOML has them."""
    found = {}
    for option in dataclasses.fields(kind):
        with suppress(NameError):  # a type of ours, which TOML cannot express
            written = option.type if isinstance(option.type, str) else formatannotation(option.type)
            found[option.name] = (eval(written, dict(vars(builtins))), None)
    return found


def _augment(values: Mapping[str, Any], where: str) -> Augment | None:
    """The named augmentation (default: `crop`) with the given options changed; without any, `none` is None."""
    options = dict(values)
    base = augmentation(options.pop("name", "crop" if options else "none"))
    if not options:
        return base
    return read_options(Augment, {**dataclasses.asdict(base or Augment(crop_scale=None)), **options}, where)


def _given(options: Any) -> Section:
    """The options that were given, in order."""
    return options.model_dump(exclude_unset=True)


def _apply(change: str, sections: dict[str, Any]) -> None:
    """Put one `section.key=value` into the sections."""
    place, equals, text = change.partition("=")
    *outer, key = [part.strip() for part in place.split(".")]
    if not equals or not key or len(outer) > 1:
        raise OptionError(f"--set takes section.key=value, found {change!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise OptionError(f"--set {place}: config.toml keeps UTF-8 only, found {text!r}; rename it")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()
    target = sections.setdefault(outer[0], {}) if outer else sections
    if not isinstance(target, dict):
        raise OptionError(f"--set {change!r}: {outer[0]} is no section")
    target[key] = value


def _chosen(section: Any) -> Section:
    """The keys of a section that differ from their defaults."""
    if not dataclasses.is_dataclass(section):
        return {key: value for key, value in (section or {}).items() if value is not None}
    named = {"name": "crop"} if isinstance(section, Augment) else {}  # "crop" has the defaults of Augment
    return named | {
        option.name: getattr(section, option.name)
        for option in dataclasses.fields(section)
        if getattr(section, option.name) != option.default
    }


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps("none" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")
