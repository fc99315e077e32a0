"""More than one process or device: what ranks say to each other."""

from mmlab.parallel.ranks import Ranks

__all__ = ["Ranks"]
