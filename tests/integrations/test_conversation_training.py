"""Conversations in mmlab's own trainer: exact batches and gradients, whole runs, comparisons, prices, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmlab import ConversationDataset, Lab, PlannedLoader, compare, make_scheduler, read_events, train
from mmlab.cli.main import main
from mmlab.comparison.preparation import packed_if_planned
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.errors import DataError, OptionError
from mmlab.model import ConversationModel
from mmlab.model.conversation_model import named_processor, named_vlm
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.named_model import conversation_model
from mmlab.pricing.probe_batches import ProbeBatches
from mmlab.pricing.step_prices import price_dataset
from mmlab.pricing.trace import StepTracer
from mmlab.runs.meters import LiveBytes
from mmlab.training.loop import FusionTrainer
from mmlab.types import BatchShape
from tests.integrations.test_conversations import ONE_ANSWER, conversations, folder, turns  # noqa: F401
from tests.integrations.vlm_families import CHATML, FAMILIES, build
from tests.ranks import fork_background_runs

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves
CONFIG = """
[data]
path = "{data}"
images = "{images}"
num_workers = 1
[model]
name = "{model}"
[scheduler]
name = "random"
batch_size = 4
[trainer]
num_epochs = 2
lr = 1e-3
device = "cpu"
[checkpoint]
every_steps = 1
keep_last = 50
"""


@pytest.fixture(scope="module")
def files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A model, conversations about six images, and a configuration."""
    files = tmp_path_factory.mktemp("files")
    for part in build("Qwen2-VL"):
        part.save_pretrained(files / "model")
    rows = [
        {
            "id": str(number),
            "image": f"{number % 6}.png",
            "conversations": turns(
                "<image>\nWhat is left?", "A blue square" + " is left" * (number % 11) + "."
            ),
        }
        for number in range(30)
    ]
    (files / "talks.json").write_text(json.dumps(rows))
    (files / "vlm.toml").write_text(
        CONFIG.format(data=files / "talks.json", images=folder, model=files / "model")
    )
    return files


def gradient(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    largest = max(float(tensor.abs().max()) for tensor in wanted.values())
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5 * largest, msg=name)


def step_values(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    events, _ = read_events(run / f"events-rank{rank}.jsonl")
    return [event.values for event in events if event.kind == "step"]


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_are_as_planned_and_their_parts_have_their_gradient(name: str, folder: Path) -> None:  # noqa: F811
    processor, network = build(name)
    talks = conversations(folder, one_answer=name in ONE_ANSWER)
    dataset = ConversationDataset(talks, processor, progress=False)
    model = ConversationModel(network.eval())
    with PlannedLoader(dataset, make_scheduler("random", batch_size=4), num_workers=1) as loader:
        batches = list(loader)
        assert [batch.shape for batch in batches] == list(loader.plan.shapes)
    batch = max(batches, key=len)
    (model(batch).loss * model.num_terms(batch)).backward()
    whole = gradient(model)
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, len(batch))):
        part = batch.part(rows)
        assert part.record_ids == batch.record_ids[rows]
        (model(part).loss * model.num_terms(part)).backward()
    assert_close(gradient(model), whole)


def test_packed_execution_has_the_loss_and_gradient_of_padded_batches(folder: Path) -> None:  # noqa: F811
    processor, network = build("Qwen2-VL")
    dataset = ConversationDataset(conversations(folder, one_answer=False), processor, progress=False)
    batch = dataset.collate([dataset[row] for row in range(len(dataset))])
    with pytest.raises(OptionError, match="what Qwen2VLProcessor makes; give it a LlavaProcessor"):
        ConversationModel(build("LLaVA")[1])(batch)
    padded = ConversationModel(network.eval())
    padded(batch).loss.backward()
    wanted = gradient(padded)
    padded.zero_grad()
    plan = make_scheduler("packed", budget=2000).plan(dataset.sizes)
    packed = packed_if_planned(padded, plan, dataset)
    assert packed.is_packed
    packed.eval()(batch).loss.backward()
    assert_close(gradient(packed), wanted)


@pytest.mark.parametrize(("name", "limit"), [("BLIP-2", 2048), ("Florence-2", 256)])
def test_a_conversation_longer_than_the_table_of_positions_is_refused(
    name: str,
    limit: int,
    folder: Path,  # noqa: F811
) -> None:
    processor, module = build(name)
    row = {
        "image": "0.png",
        "conversations": turns("<image>\nWhat is it?" + " A circle" * limit, "A circle."),
    }
    dataset = ConversationDataset(read_conversations([row], images=folder), processor, progress=False)
    trainer = FusionTrainer(ConversationModel(module), device="cpu")
    with pytest.raises(DataError, match=rf"a text has \d+ tokens, .* takes {limit}; shorten"):
        trainer.train_step([dataset.collate([dataset[0]])])


def test_workers_processes_give_the_batches_of_threads(folder: Path) -> None:  # noqa: F811
    processor, _ = build("LLaVA")
    dataset = ConversationDataset(conversations(folder, one_answer=False), processor, progress=False)
    found = []
    for options in ({"num_workers": 0}, {"num_workers": 1, "backend": "torch"}):
        with PlannedLoader(dataset, make_scheduler("sorted", batch_size=3), **options) as loader:
            found.append(list(loader))
    for one, other in zip(*found, strict=True):
        assert one.record_ids == other.record_ids
        assert one.inputs.keys() == other.inputs.keys()
        assert all(torch.equal(one.inputs[name], other.inputs[name]) for name in one.inputs)
        assert len(other.part(slice(0, 1))) == 1


def test_a_run_resumed_in_mid_epoch_ends_the_same_and_saves_what_from_pretrained_reads(
    files: Path, tmp_path: Path
) -> None:
    whole = train(files / "vlm.toml", runs=tmp_path / "whole", progress=False)
    third = sorted(Path(whole.folder, "checkpoints").iterdir())[2]
    resumed = train(files / "vlm.toml", runs=tmp_path / "resumed", resume=str(third), progress=False)
    assert (resumed.resumed_from, resumed.num_steps) == (str(third), whole.num_steps)
    assert (
        sum(values["num_samples"] for values in step_values(Path(whole.folder))) == 2 * 20
    )  # two of six images are held out
    saved = [Path(run.folder, "model") for run in (whole, resumed)]
    one, other = (AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in saved)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(
        torch.equal(weight, one[name])
        for name, weight in named_vlm(str(files / "model")).state_dict().items()
    )
    assert AutoProcessor.from_pretrained(saved[0]).chat_template
    assert whole.evaluation["loss"] == resumed.evaluation["loss"]


def test_a_saved_chat_template_is_found_where_the_processors_class_drops_it(tmp_path: Path) -> None:
    build("BLIP-2")[0].save_pretrained(tmp_path)
    assert AutoProcessor.from_pretrained(tmp_path).chat_template is None
    assert named_processor(str(tmp_path)).chat_template == CHATML.replace("IMAGE", "")


def test_every_token_of_a_window_counts_alike(folder: Path) -> None:  # noqa: F811
    """Whether its samples come in one batch or in two of different lengths."""
    processor, network = build("Idefics3")
    dataset = ConversationDataset(conversations(folder, one_answer=False), processor, progress=False)
    first, second = (dataset.collate([dataset[row] for row in rows]) for rows in ((0, 1, 2), (5,)))
    together = dataset.collate([dataset[row] for row in (0, 1, 2, 5)])
    trainer = FusionTrainer(ConversationModel(network), lr=0.0, device="cpu")
    one, two = trainer.train_step([together]), trainer.train_step([first, second])
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-3)
    assert one["text_waste"] > two["text_waste"]


def test_fastest_fills_the_memory_that_is_given_and_lora_trains_adapters_alone(
    files: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    config = (files / "vlm.toml").read_text()
    config = config.replace('name = "random"\nbatch_size = 4', 'name = "fastest"\nmemory_gb = 1.2')
    config = config.replace("[scheduler]", "lora_rank = 2\n[scheduler]")
    (tmp_path / "fast.toml").write_text(config)
    run = train(tmp_path / "fast.toml", runs=tmp_path, progress=False)
    assert all(values["predicted_bytes"] <= 0.2 * 2**30 for values in step_values(Path(run.folder)))
    assert {path.name for path in Path(run.folder).iterdir()} >= {"memory.json", "time_model.json", "model"}
    assert Path(run.folder, "model", "adapter_model.safetensors").exists()
    for lora_rank in (None, 2):  # with new adapters, or with nothing to train
        with pytest.raises(OptionError, match="model' holds adapters, which would not be trained on"):
            named_vlm(str(Path(run.folder, "model")), lora_rank=lora_rank)
    adapted = named_vlm(str(files / "model"), lora_rank=2)
    learns = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert learns
    assert all("lora" in name for name in learns)


@pytest.mark.parametrize("lora_rank", [None, 2])
def test_a_loaded_model_is_trained_in_training_mode_and_its_checkpoints_save_memory(
    lora_rank: int | None,
    files: Path,
    folder: Path,  # noqa: F811
) -> None:
    talks = read_conversations(str(files / "talks.json"), images=folder)
    dataset = ConversationDataset(talks, named_processor(str(files / "model")), progress=False)
    batches = ProbeBatches(dataset)
    shape = BatchShape(*batches.candidates()[1].tolist())
    model = ConversationModel(named_vlm(str(files / "model"), lora_rank=lora_rank))
    trace = StepTracer(model, batches=batches, device="cpu", checkpointing=True)(shape)
    trainer = FusionTrainer(model, lr=0.0, device="cpu", checkpointing=True)
    batch = batches(shape)
    trainer.train_step([batch])
    assert all(module.training for module in trainer.model.modules())
    with LiveBytes().add(trainer.model, trainer.optimizer, *batch.tensors()) as live:
        trainer.train_step([batch])
    assert trace.peak_bytes == pytest.approx(live.peak_bytes, rel=0.005)


def test_bytes_of_the_trainers_own_steps_are_foretold(folder: Path) -> None:  # noqa: F811
    processor, network = build("LLaVA")
    talks = conversations(folder, one_answer=True)
    many = talks.select([row % len(talks) for row in range(30)])
    dataset, model = ConversationDataset(many, processor, progress=False), ConversationModel(network)
    before = [weight.clone() for weight in model.parameters()]
    fresh = fingerprint(
        model
    )  # as a resumed run finds the model: it would be priced anew, and plan other batches
    memory, time = price_dataset(model, dataset)
    assert memory.fingerprint == time.fingerprint == fresh
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert time.data_s_per_sample > 0
    batch = dataset.collate([dataset[row] for row in range(12)])
    more = {"checkpointing": True, "accumulating": True}
    for priced, setting, batches in (memory, {}, [batch]), (None, more, [batch, batch]):
        priced = priced or price_dataset(model, dataset, **setting)[0]
        trainer = FusionTrainer(model, lr=0.0, device="cpu", checkpointing="checkpointing" in setting)
        trainer.train_step([batch])
        with LiveBytes().add(trainer.model, trainer.optimizer, *batch.tensors()) as live:
            trainer.train_step(batches)
        assert live.peak_bytes == pytest.approx(priced(batch.shape), rel=0.1)
        assert priced.conditions.items() >= setting.items()


def test_a_comparison_trains_every_scheduler_on_the_batches_that_it_planned(
    files: Path,
    folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    found = compare(
        files / "talks.json",
        ("random", "fastest", "packed"),
        images=str(folder),
        model=str(files / "model"),
        processor=str(files / "model"),
        batch_size=4,
        epochs=1,
        device="cpu",
        out=tmp_path / "compared",
        progress=False,
    )
    assert [arm.shape_mismatches for arm in found.arms] == [0, 0, 0]
    assert [arm.image_to_text_r1 for arm in found.arms] == [None] * 3
    assert [arm.combined_waste for arm in found.arms][2] == 0
    assert all(arm.peak_over_budget <= 1 for arm in found.arms), (
        "packs are within the limit of memory as well"
    )
    notes = " ".join(found.notes())
    assert "fastest whatever fits, packed whatever fits" in notes
    assert "tokens of the answers" in notes
    assert "captions" not in notes
    assert "R@1 image > text %" not in found.summary()
    assert json.loads((tmp_path / "compared" / "comparison.json").read_text())["processor"]


def test_lab_takes_conversations(
    files: Path,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fork_background_runs(monkeypatch)
    options: dict[str, Any] = {"model": str(files / "model"), "processor": str(files / "model"), "epochs": 1}
    lab = Lab(
        str(files / "talks.json"), images=str(folder), schedulers=("bucket",), equal="batch_size", batch_size=4,
        device="cpu", out=tmp_path / "lab", **options,
    )  # fmt: skip
    lab.start()
    assert lab.wait().arms[0].num_batches > 0


def test_memory_and_seconds_are_priced_for_a_device_that_is_not_here(
    files: Path,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    processor, network = build("LLaVA")
    for config in (network.config.text_config, network.config.vision_config):
        config.num_hidden_layers = 1
    for part in (processor, type(network)(network.config)):
        part.save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    options = ["--data", str(files / "talks.json"), "--images", str(folder), "--model", model]
    options += ["--processor", model]
    memory = ["memory", *options, "--memory-gb", "1.2"]
    assert main([*memory, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["conditions"]["device"] == "cuda"
    assert found["held_out"]["worst_under_ratio"] <= 0.0025
    assert found["held_out"]["p95_ratio"] <= 0.01
    assert set(found["plans"]) == {"fp32", "bf16", "fp32, checkpointing"}
    assert found["largest_shapes"][0]["num_patches"] > 0
    assert 0 < found["plans"]["fp32"]["max_use_ratio"] <= 1
    assert main([*memory, "--image", "square:64"]) == 2
    assert "leave --image, --tokenizer and --limit out" in capsys.readouterr().err
    assert main(["plan", *options, "--device-name", "A100", "--schedulers", "bucket", "--json"]) == 0
    for figures in json.loads(capsys.readouterr().out).values():
        assert figures["seconds"] == "predicted, not measured"
        assert figures["peak_bytes"] > sum(weight.nbytes for weight in network.parameters()) / 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ('data.image="square:64"', r"\[data\] image"),
        ('augment.name="crop"', r"\[augment\]"),
        ('sampling.adaptive="loss"', r"\[sampling\] adaptive"),
        ('trainer.objectives=["contrastive"]', r"\[trainer\] objectives"),
        ("model.lora_rank=0", "lora_rank must be at least 1"),
        ('model={preset="tiny"}', "give its \\[model\\] name"),
        ('model.name="tiny"', "name 'tiny' takes pairs; name the vision-language model"),
        ('model.name="/nowhere/at/all"', "no processor that transformers finds"),
    ],
)
def test_what_does_not_go_with_conversations_is_refused(
    change: str, why: str, files: Path, tmp_path: Path
) -> None:
    from mmlab.comparison.config import load_config

    with pytest.raises(OptionError, match=why):
        train(
            load_config(files / "vlm.toml", ['data.processor="/nowhere/at/all"', change]),
            runs=tmp_path,
            progress=False,
        )


def test_pairs_and_conversations_are_not_mistaken_for_each_other_in_a_comparison(files: Path) -> None:
    chosen = {"processor": str(files / "model")}
    with pytest.raises(OptionError, match="image, augment"):
        compare(files / "talks.json", **chosen, model=chosen["processor"], image="square:64", augment="crop")
    with pytest.raises(OptionError, match="name the vision-language model"):
        compare(files / "talks.json", **chosen)
    with pytest.raises(OptionError, match="'tiny' takes pairs; name the vision-language model"):
        conversation_model("tiny")  # as in mmlab plan and mmlab memory
    with pytest.raises(OptionError, match="processor 'tiny' takes pairs"):
        named_processor("tiny")  # asks no hub
    with pytest.raises(DataError, match="conversations are read with the --processor"):
        compare(files / "talks.json")


def test_the_image_that_is_gone_is_named_of_several(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    processor, _ = build("LLaVA")
    talks: Conversations = conversations(folder, one_answer=True)
    lost = tmp_path / "lost.png"
    lost.write_bytes(Path(str(talks.image_paths[2])).read_bytes())
    from mmlab.data.conversations import read_conversations

    shown = [str(talks.image_paths[2]), str(lost)]
    rows = [
        {"id": "gone", "images": shown, "conversations": turns("<image><image>\nWhat is left?", "It is.")}
    ] * 2
    dataset = ConversationDataset(read_conversations(rows), processor, progress=False)
    lost.unlink()
    with (
        PlannedLoader(dataset, make_scheduler("random", batch_size=2), num_workers=0) as loader,
        pytest.raises(DataError, match=r"conversation 'gone': cannot read image .*lost.png"),
    ):
        list(loader)
