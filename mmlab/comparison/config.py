"""One TOML file describes one training run; every key is checked before anything is loaded.

A section's keys are the options of the function or class that it configures, under the same names and with the same
defaults, so there is no second list to keep. `examples/train.toml` shows them at work.

    [data]        path, image, tokenizer, limit, max_tokens, and the loader's options (`PlannedLoader`); cache, the
                  folder of a cache, which is filled before training, and cache_limit_gib (see docs/cache.md)
    [model]       preset, image_encoder, text_encoder, and the sizes of `mmlab.model.ModelConfig`
    [scheduler]   name, and the options of that scheduler; for `memory` also memory_gb, the GiB to plan for (default:
                  ask the device), and follow, whether the plan is corrected by what steps need (default: true)
    [trainer]     num_epochs, and the options of `FusionTrainer`
    [parallel]    the options of `ParallelOptions`, for runs on several ranks, and timeout_s, for which one may
                  keep the others waiting
    [checkpoint]  the options of `Checkpoints`
    [events]      device_interval_s

Does not: name anything that TOML cannot express, such as a cost model or an augmentation; use the classes for those.
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mmlab.errors import DataError, OptionError, unknown_name
from mmlab.loading.loader import PlannedLoader
from mmlab.model.presets import PRESETS, ModelConfig
from mmlab.parallel.strategies import ParallelOptions
from mmlab.schedule.schedulers import SCHEDULERS
from mmlab.training.checkpoint.keeping import Checkpoints
from mmlab.training.options import TrainOptions

Section = dict[str, Any]

LOADER_OPTIONS = ("backend", "num_workers", "prefetch", "on_bad_sample", "max_bad_samples", "max_ram_gb")
CACHE_OPTIONS = ("cache", "cache_limit_gib")
_DATA = {
    "path": "str",
    "image": "str",
    "tokenizer": "str",
    "limit": "int",
    "max_tokens": "int",
    "cache": "str",
    "cache_limit_gib": "float",
}
_MODEL = {"preset": "str", "image_encoder": "str", "text_encoder": "str"}
_HARMLESS = (  # to change in a resume
    "checkpoint",
    "events",
    *(
        f"parallel.{name}"
        for name in ("bucket_mb", "overlap", "ahead", "image_layers", "image_device", "timeout_s")
    ),
    *(f"data.{name}" for name in (*LOADER_OPTIONS, *CACHE_OPTIONS)),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[
    str, tuple[str, Callable[[Any], bool]]
] = {  # a part of an annotation: what to call it, what fits it
    "str": ("text", lambda value: isinstance(value, str)),
    "Literal['auto']": ("'auto'", lambda value: value == "auto"),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    "float": ("a number", _is_number),
    "tuple[str, ...]": (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    ),
    "Mapping[str, float]": (
        "a table of numbers",
        lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A checked configuration: for each section, the keys that were given."""

    name: str  # of the run
    data: Section
    model: Section
    scheduler: Section
    trainer: Section
    parallel: Section
    checkpoint: Section
    events: Section

    def as_dict(self) -> dict[str, Any]:
        """The sections by name, as in the file."""
        return {section.name: getattr(self, section.name) for section in fields(self)}

    def save(self, path: str | Path) -> None:
        """Write it as TOML."""
        lines = [f"name = {_toml(self.name)}"]
        for section, values in self.as_dict().items():
            if section != "name" and values:
                lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
        Path(path).write_text("\n".join(lines) + "\n", "utf-8")

    def changes(self, other: RunConfig) -> list[str]:
        """What differs in another configuration and bears on the result, as `section.key: old -> new`."""
        old, new = _flat(self), _flat(other)
        return [
            f"{key}: {old.get(key, 'default')} -> {new.get(key, 'default')}"
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and key not in _HARMLESS and key.split(".")[0] not in _HARMLESS
        ]


def load_config(path: str | Path, changes: Iterable[str] = ()) -> RunConfig:
    """Read and check a configuration file.

    Args:
        changes: `section.key=value` each, applied before checking; a value is TOML, or else text.

    Raises:
        DataError: no such file, or not TOML.
        OptionError: an unknown section, key, preset or scheduler, or a value of the wrong kind.
    """
    path = Path(path)
    try:
        sections = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; give the TOML file of a run") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not TOML: {error}") from error
    for change in changes:
        _apply(change, sections)
    known = _known(sections)
    for section, values in sections.items():
        if section not in known and section != "name":
            raise unknown_name(f"section in {path}", section, [*known, "name"])
        if section == "name":
            _check(f"{path}: name", values, "str")
            if not values or Path(values).is_absolute() or ".." in Path(values).parts or values == ".":
                raise OptionError(f"{path}: name must be that of a folder inside the runs, found {values!r}")
            continue
        if not isinstance(values, dict):
            raise OptionError(f"{path}: {section} is a section: write [{section}] and its keys below")
        for key, value in values.items():
            if key not in known[section]:
                raise unknown_name(f"key in [{section}] of {path}", key, known[section])
            _check(f"{path}: [{section}] {key}", value, known[section][key])
    for section, key in (("data", "path"), ("trainer", "num_epochs")):
        if key not in sections.get(section, {}):
            raise OptionError(f"{path}: [{section}] {key} is missing")
    if sections["trainer"]["num_epochs"] < 1:
        raise OptionError(
            f"{path}: [trainer] num_epochs must be at least 1, found {sections['trainer']['num_epochs']}"
        )
    return RunConfig(**{"name": path.stem, **{section: {} for section in known}, **sections})


def _known(sections: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Section -> key -> annotation; the scheduler that is named decides on its section's keys."""
    scheduler = _named(sections, "scheduler", "name", SCHEDULERS, "budget")
    _named(sections, "model", "preset", PRESETS, "small")
    loader = _options(PlannedLoader)
    return {
        "data": {**_DATA, **{name: loader[name] for name in LOADER_OPTIONS}},
        "model": {**_MODEL, **{item.name: str(item.type) for item in fields(ModelConfig)}},
        "scheduler": {"name": "str", **_of_scheduler(scheduler)},
        "trainer": {"num_epochs": "int", **{item.name: str(item.type) for item in fields(TrainOptions)}},
        "parallel": {
            **{item.name: str(item.type) for item in fields(ParallelOptions)},
            "timeout_s": "float",
        },
        "checkpoint": _options(Checkpoints),
        "events": {"device_interval_s": "float"},
    }


def _of_scheduler(name: str) -> dict[str, str]:
    """Options of a scheduler; `memory` is told the device's memory, and works its budget out."""
    options = _options(SCHEDULERS[name], but="world_size")
    if name == "memory":
        options = {**options, "memory_gb": "float | None", "follow": "bool"}
        del options["budget"]
    return options


def _named(sections: Mapping[str, Any], section: str, key: str, table: Mapping[str, Any], usual: str) -> str:
    values = sections.get(section, {})
    name = values.get(key, usual) if isinstance(values, dict) else usual
    if name not in table:
        raise unknown_name(f"[{section}] {key}", name, table)
    return name


def _options(configured: Callable[..., Any], but: str = "") -> dict[str, str]:
    """Keyword options that TOML can express, with their annotations."""
    parameters = inspect.signature(configured).parameters.values()
    return {
        option.name: option.annotation
        for option in parameters
        if option.kind is option.KEYWORD_ONLY and option.name != but and _kinds(option.annotation)
    }


def _kinds(annotation: str) -> list[str]:
    return [part for part in annotation.split(" | ") if part in _KINDS]


def _check(where: str, value: Any, annotation: str) -> None:
    kinds = [_KINDS[kind] for kind in _kinds(annotation)]
    if not any(fits(value) for _, fits in kinds):
        raise OptionError(f"{where}: expected {' or '.join(name for name, _ in kinds)}, found {value!r}")


def _apply(change: str, sections: dict[str, Any]) -> None:
    """Put one `section.key=value` into the sections."""
    place, equals, text = change.partition("=")
    *outer, key = [part.strip() for part in place.split(".")]
    if not equals or not key or len(outer) > 1:
        raise OptionError(f"--set takes section.key=value, found {change!r}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target = sections.setdefault(outer[0], {}) if outer else sections
    if not isinstance(target, dict):
        raise OptionError(f"--set {change!r}: {outer[0]} is no section")
    target[key] = value


def _flat(config: RunConfig) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, values in config.as_dict().items()
        if section != "name"
        for key, value in values.items()
    }


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
