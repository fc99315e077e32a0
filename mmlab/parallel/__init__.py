"""More than one process or device: what ranks say to each other."""

from mmlab.parallel.ranks import Ranks
from mmlab.parallel.shared_work import SharedWork

__all__ = ["Ranks", "SharedWork"]
