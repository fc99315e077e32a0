"""Two processes, one branch each: the loss and the gradient of one process, and failures told to both."""

from __future__ import annotations

import pytest
from test_branches import build
from test_out_of_memory import run_on_two_ranks

from mmlab.branches import BranchRanks
from mmlab.errors import OptionError


def test_two_ranks_have_the_gradient_of_one_process_and_fail_together():
    run_on_two_ranks("two_ranks_of_branches.py")


def test_one_process_is_refused():
    with pytest.raises(OptionError, match=r"branches take two ranks.*found 1; start with torchrun"):
        BranchRanks(build())
