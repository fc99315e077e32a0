"""More than one process or device: what ranks say to each other, and how they share a step.

ranks        `Ranks`: sums of counts, one verdict, the sum of the gradients
engines      `ParallelOptions`, and the engine that the others improve on
overlapped   gradients summed during the backward pass
faults       `RankWatch`: who ended, hangs or gives no sign of life
launches     joining at each start, and knowing a launch of `torchrun` again
shared_work  `SharedWork`: work that ranks hand out among themselves
"""

from mmlab.parallel.engines import Engine, ParallelOptions, make_engine
from mmlab.parallel.faults import RankWatch
from mmlab.parallel.ranks import Ranks
from mmlab.parallel.shared_work import SharedWork

__all__ = ["Engine", "ParallelOptions", "RankWatch", "Ranks", "SharedWork", "make_engine"]
