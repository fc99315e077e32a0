"""The table of all kinds of event and of all keys that an event may carry, with units.

The table is `event_keys.toml`. `RunLog` refuses keys that are not in it, so no view has to guess a unit.
`python tests/project/print_event_keys.py` prints the tables of docs/internals/event_keys.md.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import NamedTuple


class Key(NamedTuple):
    """One row of the key table."""

    kinds: str  # kinds of event that carry the key, separated by spaces
    unit: str
    meaning: str


_TABLE = tomllib.loads(resources.files(__package__).joinpath("event_keys.toml").read_text("utf-8"))
EVENT_KINDS: dict[str, str] = _TABLE["kinds"]
EVENT_KEYS = {name: Key(*row) for name, row in _TABLE["keys"].items()}
USER_PREFIX = "user_"  # keys with this prefix are the user's own and need no row in the table
