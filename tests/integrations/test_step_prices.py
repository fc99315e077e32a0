"""Prices of a step in a loop of one's own: bytes that hold, seconds that a scheduler plans with, weights left as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.errors import OptionError
from mmlab.integrations import ConversationCollator, conversation_sizes, price_model, price_steps
from mmlab.runs.meters import LiveBytes
from mmlab.schedule import make_scheduler
from tests.integrations.test_conversations import conversations, folder  # noqa: F401
from tests.integrations.vlm_families import build

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, and of a busy machine


def test_bytes_of_real_steps_are_foretold_and_a_plan_follows_them(folder: Path) -> None:  # noqa: F811
    processor, model = build("Qwen2-VL")
    talks = conversations(folder, one_answer=False)
    items = [talks[row % len(talks)] for row in range(40)]
    sizes = conversation_sizes(talks, processor, progress=False).sizes().take(np.arange(40) % len(talks))
    collate, optimizer = ConversationCollator(processor), torch.optim.AdamW(model.parameters(), lr=0.0)

    def train_step(rows: list[int]) -> None:
        model(**collate([items[row] for row in rows])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def peak(rows: list[int]) -> int:
        with LiveBytes().add(model, optimizer) as live:
            train_step(rows)
        return live.peak_bytes

    before = [weight.clone() for weight in model.parameters()]
    prices = price_model(model, items, collate, sizes, budget=2500, repeats=1, progress=False)
    assert all((old == new).all() for old, new in zip(before, model.parameters(), strict=True))
    assert (prices.seconds.unit, prices.bytes.unit) == ("seconds", "bytes")
    assert prices.bytes_held_out["p50_ratio"] < 0.05
    limit = 1.5 * prices.bytes.at(2, sizes.num_tokens.max(), (sizes.height * sizes.width).max() / 256)
    scheduler = make_scheduler("fastest", cost=prices.bytes, budget=float(limit), time=prices.seconds)
    plan = scheduler.plan(sizes)
    batches = list(plan)
    assert sorted(row for rows in batches for row in rows) == list(range(40))
    used = [peak(rows) / cost for rows, cost in zip(batches, plan.costs(), strict=True)]
    assert max(used) <= 1.05  # a plan follows measured seconds, so that its batches differ from run to run
    plan = make_scheduler("budget", cost=prices.bytes, budget=float(limit)).plan(sizes)
    assert 0.7 < peak(list(plan)[int(plan.costs().argmax())]) / plan.costs().max() <= 1.05


def test_what_cannot_be_priced_is_refused(folder: Path) -> None:  # noqa: F811
    processor, _ = build("LLaVA")
    sizes = conversation_sizes(conversations(folder, one_answer=False), processor, progress=False).sizes()
    with pytest.raises(OptionError, match="a budget of 50 padded tokens does not hold two"):
        price_steps(lambda rows: None, sizes, holds=(), budget=50, progress=False)
    with pytest.raises(OptionError, match="num_probes must be at least 8, found 3"):
        price_steps(lambda rows: None, sizes, holds=(), budget=500, num_probes=3, progress=False)
