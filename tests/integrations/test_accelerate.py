"""`prepare_loader` with the real accelerate: one process and two, resumed in mid-epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator, skip_first_batches
from torch.utils.data import DataLoader

from mmlab.errors import OptionError
from mmlab.integrations import PlannedSampler, prepare_loader
from tests.integrations.tiny import LENGTHS, Pairs, budget, clip, collate, flat, sizes
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of accelerate and torch, about themselves

EVERYTHING = list(range(len(LENGTHS)))
STOP = 4  # batches into the second epoch


def _start() -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    sampler = PlannedSampler(sizes(), budget(), num_epochs=2)
    loader = prepare_loader(accelerator, DataLoader(Pairs(), batch_sampler=sampler, collate_fn=collate))
    model = clip()
    prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    return accelerator, model, *prepared[1:]


def _train(
    accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, epoch: int, first: int = 0
) -> Any:
    loader.set_epoch(epoch)
    seen = []
    for batch in skip_first_batches(loader, first) if first else loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(batch["rows"].tolist())
    return seen


def _on_rank() -> tuple[list[Any], list[Any], list[Any]]:
    accelerator, model, optimizer, loader = _start()
    first, second = (_train(accelerator, model, optimizer, loader, epoch) for epoch in range(2))
    return first, second, _train(*_start(), 1, STOP)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_processes_share_every_sample_once_and_resume(num_ranks: int) -> None:
    ranks = [_on_rank()] if num_ranks == 1 else run_ranks(_on_rank, num_ranks)
    assert len({len(batches) for rank in ranks for batches in rank[:2]}) == 1
    for epoch in range(2):
        assert flat(sum((rank[epoch] for rank in ranks), [])) == EVERYTHING  # noqa: RUF017
    for _, second, rest in ranks:
        assert rest == second[STOP:]


def test_a_state_of_the_accelerator_resumes_behind_the_batches_that_were_trained(tmp_path: Any) -> None:
    from accelerate.utils import DataLoaderConfiguration

    def loader() -> tuple[Accelerator, Any]:
        config = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        sampler = PlannedSampler(sizes(), budget(), num_epochs=2)
        return accelerator, prepare_loader(
            accelerator, DataLoader(Pairs(), batch_sampler=sampler, collate_fn=collate)
        )

    accelerator, first = loader()
    seen = []
    for number, batch in enumerate(first):
        seen.append(batch["rows"].tolist())
        if number == STOP:
            accelerator.save_state(str(tmp_path))
            break
    accelerator, second = loader()
    accelerator.load_state(str(tmp_path))
    seen += [batch["rows"].tolist() for batch in second]
    assert flat(seen) == EVERYTHING


def test_batches_are_not_shared_among_processes_twice() -> None:
    from accelerate.data_loader import prepare_data_loader

    sampler = PlannedSampler(sizes(), budget(), rank=0, world_size=2)
    loader = DataLoader(Pairs(), batch_sampler=sampler, collate_fn=collate)
    with pytest.raises(OptionError, match=r"prepare_loader\(accelerator, loader\)"):
        prepare_data_loader(loader, num_processes=2, process_index=0)
    with pytest.raises(OptionError, match=r"give DataLoader\(batch_sampler=PlannedSampler"):
        prepare_loader(Accelerator(cpu=True), DataLoader(Pairs()))
