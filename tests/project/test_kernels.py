"""A kernel that dies while it starts does not fail a notebook, and one that never starts does."""

from __future__ import annotations

import pytest

from tests import kernels


@pytest.mark.parametrize(("num_deaths", "starts"), [(0, True), (2, True), (3, False)])
def test_a_kernel_that_dies_while_it_starts_is_started_again(
    num_deaths: int, starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [num_deaths]

    def start(kernel_name: str) -> str:
        left[0] -= 1
        if left[0] >= 0:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return kernel_name

    monkeypatch.setattr(kernels, "_start", start)
    if starts:
        assert kernels.start_new_kernel(kernel_name="python") == "python"
    else:
        with pytest.raises(RuntimeError, match="Kernel died"):
            kernels.start_new_kernel(kernel_name="python")
