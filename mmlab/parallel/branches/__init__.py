"""Branch parallelism: the image branch and the text branch of a `FusionModel` at the same time.

placement        `BranchPlacement`: which branch lives where
branch_parallel  `BranchParallel`: both in one process, by threads (CPU) or queues of kernels (CUDA)
branch_ranks     `BranchRanks`: in several processes, features and gradients over a wire
wire             tensors of any shape between two ranks
plan             `plan_branches`: which device computes what, and what a step would take
measure          `measure_branches`: what each branch costs
pipelining       the two stages by torch.distributed.pipelining, to compare
side_by_side     two functions in two threads
draws            dropout in branches that run at once
timeline         `Timeline`, `overlap`: when each branch computed
"""

from mmlab.parallel.branches.branch_parallel import BranchParallel
from mmlab.parallel.branches.branch_ranks import BranchRanks
from mmlab.parallel.branches.measure import BranchCost, BranchCosts, measure_branches
from mmlab.parallel.branches.pipelining import PipelinedBranches
from mmlab.parallel.branches.placement import BranchPlacement
from mmlab.parallel.branches.plan import BranchOption, BranchPlan, plan_branches
from mmlab.parallel.branches.timeline import Span, Timeline, busy_s, overlap

__all__ = [
    "BranchCost",
    "BranchCosts",
    "BranchOption",
    "BranchParallel",
    "BranchPlacement",
    "BranchPlan",
    "BranchRanks",
    "PipelinedBranches",
    "Span",
    "Timeline",
    "busy_s",
    "measure_branches",
    "overlap",
    "plan_branches",
]
