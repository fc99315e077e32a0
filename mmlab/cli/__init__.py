"""The command line: `mmlab COMMAND ...`; `main` says what it prints and how it exits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"doctor": ["diagnose"], "main": ["main"]}
)
