"""The command line: `mmlab COMMAND ...`.

Exit codes: 0 done, 1 failed, 2 bad input or usage with one clear line on stderr. With `--json` stdout holds one JSON
document and nothing else.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"doctor": ["diagnose"], "main": ["main"]}
)
