"""Prices of a step in a loop of one's own: bytes that hold, seconds that a scheduler plans with, weights left as they are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mmlab.cli.main import main
from mmlab.data import ConversationCollator, conversation_sizes
from mmlab.data.conversation_dataset import ConversationDataset
from mmlab.errors import OptionError
from mmlab.model import ConversationModel
from mmlab.pricing import fit_memory, price_model, price_steps
from mmlab.pricing.probe_batches import ProbeBatches
from mmlab.pricing.trace import StepTracer
from mmlab.runs.meters import LiveBytes
from mmlab.schedule import make_scheduler
from mmlab.schedule.plan import BatchPlan
from mmlab.training.loop import FusionTrainer
from mmlab.types import BatchShape
from tests.integrations.test_conversations import conversations, folder  # noqa: F401
from tests.integrations.vlm_families import FAMILIES, build

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, and of a busy machine


def test_packs_are_priced_as_packs_and_none_needs_more_than_it_may(folder: Path) -> None:  # noqa: F811
    processor, model = build("Qwen2-VL")
    talks = conversations(folder, one_answer=False)
    items = [talks[row % len(talks)] for row in range(40)]
    sizes = conversation_sizes(talks, processor, progress=False).sizes().take(np.arange(40) % len(talks))
    sizes = replace(sizes, group=np.arange(40))
    collate, optimizer = (
        ConversationCollator(processor, packed_for=model),
        torch.optim.AdamW(model.parameters()),
    )
    prices = price_model(model, items, collate, sizes, budget=2500, repeats=1, progress=False)
    assert prices.bytes_held_out["p50_ratio"] < 0.05
    plan = make_scheduler("packed", cost=prices.bytes, budget=float(prices.bytes.at(1, 600, 600))).plan(sizes)
    assert len(plan) > 1
    costliest = list(plan)[int(plan.costs().argmax())]
    for _ in range(2):  # the first step makes the optimizer's state
        with LiveBytes().add(model, optimizer) as live:
            model(**collate([items[row] for row in costliest])).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0.85 < live.peak_bytes / plan.costs().max() <= 1.05


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


def test_weights_around_adapters_have_no_moments_and_cost_none(folder: Path) -> None:  # noqa: F811
    peft = pytest.importorskip("peft")
    processor, model = build("LLaVA")
    talks = conversations(folder, one_answer=True)
    items = [talks[row % len(talks)] for row in range(24)]
    sizes = conversation_sizes(talks, processor, progress=False).sizes().take(np.arange(24) % len(talks))
    collate = ConversationCollator(processor)
    whole = price_model(model, items, collate, sizes, budget=1500, repeats=1, progress=False)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    prices = price_model(adapted, items, collate, sizes, budget=1500, repeats=1, progress=False)
    frozen = sum(weight.nbytes for weight in adapted.parameters() if not weight.requires_grad)
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    batch, shape = collate(items[:6]), sizes.take(np.arange(6)).alone[:, 1:].max(0)
    for _ in range(2):  # the first step makes the moments
        with LiveBytes().add(adapted, optimizer) as live:
            adapted(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    patches = shape[1] * shape[2] / 256
    assert live.peak_bytes / prices.bytes.at(6, shape[0], patches) == pytest.approx(1, abs=0.05)
    saved = whole.bytes.at(6, shape[0], patches) - prices.bytes.at(6, shape[0], patches)
    assert saved > 2 * frozen  # their moments, and more: their gradients


@pytest.mark.parametrize("name", FAMILIES)
def test_the_bytes_of_a_step_are_known_without_taking_it(name: str, folder: Path) -> None:  # noqa: F811
    processor, network = build(name)
    talks = conversations(folder, one_answer=True)
    dataset, model = ConversationDataset(talks, processor, progress=False), ConversationModel(network)
    batches = ProbeBatches(dataset)
    shape = BatchShape(*batches.candidates()[1].tolist())
    trace = StepTracer(model, batches=batches, device="cpu")(shape)
    trainer = FusionTrainer(model, lr=0.0, device="cpu")
    batch = batches(shape)
    assert batch.shape == shape
    trainer.train_step([batch])
    with LiveBytes().add(trainer.model, trainer.optimizer, *batch.tensors()) as live:
        trainer.train_step([batch])
    assert trace.peak_bytes == pytest.approx(live.peak_bytes, rel=0.005)


@pytest.mark.parametrize(("attention", "most"), [("sdpa", 1.01), ("eager", 1.2)])
def test_images_that_are_not_padded_are_priced_by_the_patches_that_a_batch_has(
    attention: str,
    most: float,
    folder: Path,  # noqa: F811
) -> None:
    processor, network = build("Qwen2-VL")
    network.config.text_config.num_hidden_layers = network.config.vision_config.depth = 1
    network = type(network)(network.config)
    network.set_attn_implementation(attention)
    dataset = ConversationDataset(conversations(folder, one_answer=False), processor, progress=False)
    model, sizes = ConversationModel(network), dataset.sizes
    memory = fit_memory(model, dataset=dataset, device="cpu", num_held_out=0, progress=False)
    by_size = np.argsort(sizes.height)
    unlike = [*by_size[1:5].tolist(), int(by_size[-1])]  # one large image among small ones
    batch = dataset.collate([dataset[row] for row in unlike])
    trainer = FusionTrainer(model, lr=0.0, device="cpu")
    assert trainer.train_step([batch])["image_waste"] == 0
    with LiveBytes().add(trainer.model, trainer.optimizer, *batch.tensors()) as live:
        trainer.train_step([batch])
    plan = BatchPlan.from_batches([unlike], sizes)
    assert plan.shapes == [batch.shape]
    assert plan.report().image_waste == 0
    assert 0.999 < plan.costs(memory)[0] / live.peak_bytes < most
    padded = BatchPlan.from_batches([unlike], replace(sizes, pads_images=True))
    assert padded.costs(memory)[0] > 1.2 * live.peak_bytes
    assert padded.report().image_waste > 0.4


def test_what_cannot_be_priced_is_refused(folder: Path) -> None:  # noqa: F811
    processor, _ = build("LLaVA")
    sizes = conversation_sizes(conversations(folder, one_answer=False), processor, progress=False).sizes()
    with pytest.raises(OptionError, match="a budget of 50 padded tokens does not hold two"):
        price_steps(lambda rows: None, sizes, holds=(), budget=50, progress=False)
    with pytest.raises(OptionError, match="num_probes must be at least 7, found 3"):
        price_steps(lambda rows: None, sizes, holds=(), budget=500, num_probes=3, progress=False)


def test_the_command_line_prices_a_named_model_on_conversations(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processor, model = build("Qwen2-VL")
    for saved in (processor, model):
        saved.save_pretrained(tmp_path / "model")
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "It is left of it."}]
    rows = [{"image": f"{number % 6}.png", "conversations": turns} for number in range(24)]
    (tmp_path / "talks.json").write_text(json.dumps(rows))
    command = [
        "plan",
        "--data",
        str(tmp_path / "talks.json"),
        "--images",
        str(folder),
        "--json",
        "--ranks",
        "1",
    ]
    command += ["--processor", str(tmp_path / "model"), "--schedulers", "random,fastest"]
    assert main([*command, "--model", str(tmp_path / "model"), "--price-per-hour", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    for figures in found.values():
        assert figures["seconds"] == "measured"
        assert figures["epoch_price"] == pytest.approx(2 * figures["epoch_s"] / 3600)
        assert figures["peak_bytes"] > sum(weight.nbytes for weight in model.parameters())
    for wrong, why in (
        (["--model", str(folder)], "no vision-language model"),
        (["--processor", str(folder)], "no processor that transformers finds"),
        (["--device-name", "A1000", "--model", str(tmp_path / "model")], "A1000"),
    ):
        assert main([*command, *wrong]) == 2
        assert why in capsys.readouterr().err
