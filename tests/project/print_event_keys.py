"""The tables of docs/internals/event_keys.md, from `mmlab/runs/event_keys.toml`.

python tests/project/print_event_keys.py      prints them, to be pasted there
"""

from __future__ import annotations

from mmlab.runs.event_keys import EVENT_KEYS, EVENT_KINDS


def keys_table() -> str:
    """The tables of kinds and keys in Markdown."""
    lines = ["| kind | when |", "|---|---|"]
    lines += [f"| `{kind}` | {when} |" for kind, when in EVENT_KINDS.items()]
    lines += ["", "| key | in | unit | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {', '.join(key.kinds.split())} | {key.unit} | {key.meaning} |"
        for name, key in EVENT_KEYS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(keys_table())
