"""How several devices share a step (data parallel, sharded, or image and text branches on a device each), and
what each of these would cost.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"launch": ["run_on_ranks"], "strategies": ["make_strategy"]}
)
