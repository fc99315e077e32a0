"""Conversations planned, collated and trained for small models of every family, by their real processors."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.normalizers import Replace
from torch.utils.data import DataLoader
from transformers import (
    AutoProcessor,
    Pix2StructImageProcessor,
    Pix2StructProcessor,
    Trainer,
    TrainingArguments,
)

from mmlab import ConversationDataset, PlannedLoader
from mmlab.comparison.preparation import make_model
from mmlab.data import ConversationCollator, conversation_sizes
from mmlab.data.conversation_dataset import ConversationBatch
from mmlab.data.conversations import Conversations, read_conversations
from mmlab.errors import DataError, OptionError
from mmlab.integrations import PlannedBatches, PlannedSampler
from mmlab.model import ConversationModel
from mmlab.model.conversation_model import named_processor, named_vlm
from mmlab.model.huggingface import LossModel
from mmlab.schedule import make_scheduler
from tests.batches import make_batch
from tests.integrations.vlm_families import CHATML, FAMILIES, build, llama_4, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch, about themselves
SIZES = ((40, 50), (100, 60), (64, 64), (30, 150), (200, 210), (90, 33))
# exactly how many tokens each of several images becomes
SAYS_NOT = {"SmolVLM", "LLaVA-OneVision", "BLIP-2", "Ovis2", "LFM2-VL"}
ONE_ANSWER = {"PaliGemma", "BLIP-2", "Florence-2"}  # or one image a sample
ENCODER_DECODERS = {"Florence-2"}
REFUSED = {
    "PaliGemma": "both directions",
    "Gemma 3": "both directions",
    "BLIP-2": "off by",
    "LFM2-VL": "off by",
    "Florence-2": "it is an encoder-decoder",
}  # by packed batches
PADS_LEFT = {"InternVL"}  # whatever its tokenizer says


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(texts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for number, (high, wide) in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 255, (high, wide, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    return folder


def conversations(folder: Path, *, one_answer: bool) -> Conversations:
    rows: list[dict[str, Any]] = []
    for number in range(len(SIZES)):
        more = ("Count them.", "There are two, I think.") if number % 2 and not one_answer else ()
        asked = turns(
            "<image>\nWhat is left of the red circle?", "A blue square" + " is left" * number + ".", *more
        )
        rows.append({"image": f"{number}.png", "conversations": asked})
    if not one_answer:
        rows += [
            {"image": ["0.png", "3.png"], "conversations": turns("<image> and <image>\nCount.", "Two.")},
            {"conversations": turns("What is left?", "It is left of it.")},
            {
                "image": ["1.png", "2.png"],
                "conversations": turns("<image>\nWhat?", "Two.", "And <image>?", "Two. I think."),
            },
        ]
    return read_conversations(rows, images=folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_sized_collated_and_trained(name: str, folder: Path) -> None:
    processor, model = build(name)
    talks = conversations(folder, one_answer=name in ONE_ANSWER)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = conversation_sizes(talks, processor, progress=False)
    said = [str(warning.message) for warning in warned]
    assert any("does not state exact sequence lengths" in text for text in said) == (name in SAYS_NOT)
    collate = ConversationCollator(processor)
    for side in ("left", "right"):
        processor.tokenizer.padding_side = side
        batch = collate(list(talks))
        lengths, longest = batch["attention_mask"].sum(1), batch["input_ids"].shape[1]
        if name in ENCODER_DECODERS:
            lengths, longest = longest + (batch["labels"] >= 0).sum(1), longest + batch["labels"].shape[1]
        assert lengths.tolist() == found.num_tokens.tolist()
        assert longest == found.num_tokens.max()
        assert batch["attention_mask"][0, -1 if side == "left" or name in PADS_LEFT else 0] == 1
        for messages, ids, labels in zip(talks.messages, batch["input_ids"], batch["labels"], strict=True):
            answers = [
                part["text"]
                for message in messages
                if message["role"] == "assistant"
                for part in message["content"]
            ]
            learnt = processor.tokenizer.decode(labels[labels >= 0])
            assert [answer for answer in answers if answer in learnt] == answers
            for mark in ("<|im_end|>\n", "<eos>", "<|im_end|>", " \n"):
                learnt = learnt.replace(mark, "")
            assert learnt.strip() == "".join(answers)
            if name not in ENCODER_DECODERS:
                assert (ids[labels >= 0] == labels[labels >= 0]).all()
    assert (found.num_image_tokens[: len(SIZES)] > 0).all()
    loss = model.train()(**batch).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_a_rule_that_fails_on_an_image_gives_way_to_real_calls(folder: Path) -> None:
    processor, _ = build("LLaVA")
    talks = conversations(folder, one_answer=True)
    expected = conversation_sizes(talks, processor, progress=False)

    def fails(image_sizes: Any) -> None:
        raise RuntimeError("maximum size for tensor at dimension 3 is 0 but size is 8")

    processor._get_num_multimodal_tokens = fails
    found = conversation_sizes(talks, processor, progress=False)
    assert found.num_tokens.tolist() == expected.num_tokens.tolist()


def test_a_batch_of_one_sample_is_as_long_as_planned(folder: Path) -> None:
    processor, _ = build("Qwen2-VL")
    talks = conversations(folder, one_answer=False)
    planned = conversation_sizes(talks, processor, progress=False).num_tokens
    collate = ConversationCollator(processor)
    assert [collate([talk])["input_ids"].shape[1] for talk in talks] == planned.tolist()


def test_sizes_are_remembered_until_conversations_or_processor_change(folder: Path, tmp_path: Path) -> None:
    processor, _ = build("InternVL")
    talks = conversations(folder, one_answer=False)
    first = conversation_sizes(talks, processor, cache=tmp_path, progress=False)
    again = conversation_sizes(talks, processor, cache=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 1
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    processor.chat_template = processor.chat_template.replace("<|im_start|>", "<|im_start|>the ")
    longer = conversation_sizes(talks, processor, cache=tmp_path, progress=False)
    assert (longer.num_tokens > first.num_tokens).all()
    conversation_sizes(talks[:3], processor, cache=tmp_path, progress=False)
    assert len(list(tmp_path.iterdir())) == 3
    processor.tokenizer.backend_tokenizer.normalizer = Replace("left", "to the left side")
    assert (
        conversation_sizes(talks, processor, cache=tmp_path, progress=False).num_tokens > longer.num_tokens
    ).any()


class PlannedTrainer(PlannedBatches, Trainer):
    """Keeps the shape of every batch, and how many labels each window's loss is divided by."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        labels = inputs["labels"] if model.config.is_encoder_decoder else inputs["labels"][:, 1:]
        asked = int(labels.ne(-100).sum())
        seen = (tuple(inputs["input_ids"].shape), inputs["labels"].shape[1], asked, int(num_items_in_batch))
        self.__dict__.setdefault("seen", []).append(seen)
        return super().training_step(model, inputs, num_items_in_batch)


def test_a_trainer_trains_planned_conversations_with_workers(folder: Path, tmp_path: Path) -> None:
    """A processor saved and loaded by its path, sizes from the trainer's processing_class."""
    processor, model = build("Qwen2-VL")
    processor.save_pretrained(tmp_path / "processor")
    processor = AutoProcessor.from_pretrained(tmp_path / "processor")
    talks = conversations(folder, one_answer=False)
    args = TrainingArguments(
        str(tmp_path / "run"), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=2, save_strategy="no",
        remove_unused_columns=False, dataloader_num_workers=1,
    )  # fmt: skip
    trainer = PlannedTrainer(
        model, args, train_dataset=talks, data_collator=ConversationCollator(processor), processing_class=processor,
        scheduler=make_scheduler("budget", budget=700),
    )  # fmt: skip
    trainer.args.remove_unused_columns = True
    with pytest.raises(OptionError, match="remove_unused_columns=False"):
        trainer.train()
    trainer.args.remove_unused_columns = False
    result = trainer.train()
    assert np.isfinite(result.training_loss)
    assert trainer.planned is not None
    planned = [(shape.batch_size, shape.num_tokens) for shape in trainer.planned.plan.shapes]
    seen = [shape for shape, *_ in trainer.seen]
    assert seen[-len(planned) :] == planned
    assert all(rows * (tokens + 1) <= 700 for rows, tokens in seen)
    assert all(asked == divided for *_, asked, divided in trainer.seen)


def asked(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [
        {"image": f"{number % 6}.png", "conversations": turns(f"<image>\n{question}", answer)}
        for number, (question, answer) in enumerate(pairs)
    ]


PAIRS = [
    ("What?", "A blue square is left of it."),
    ("<OCR>", "Two."),  # a task, which Florence-2's processor turns into a question
    ("What is left of the red circle?", "It."),
    ("Count them.", "There are two, I think. A blue square is left of it, I think."),
    ("<OPEN_VOCABULARY_DETECTION> blue square", "One."),
] * 3


def test_no_batch_of_an_encoder_decoder_is_longer_than_planned(folder: Path, tmp_path: Path) -> None:
    processor, model = build("Florence-2")
    talks = read_conversations(asked(*PAIRS), images=folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = ConversationDataset(talks, processor, progress=False)
    with PlannedLoader(dataset, make_scheduler("random", batch_size=4), num_workers=0) as loader:
        batches = list(loader)
        assert [batch.shape for batch in batches] == list(loader.plan.shapes)
    own = ConversationModel(model)
    for batch in batches:  # questions are padded alike, so that every batch has exactly the planned shape
        assert isinstance(batch, ConversationBatch)
        questions, answers = batch.inputs["input_ids"], batch.inputs["labels"]
        assert questions.shape[1] + answers.shape[1] == batch.shape.num_tokens
        assert own.num_terms(batch) == int((answers >= 0).sum()) == sum(
            len(processor.tokenizer(talks.messages[row][1]["content"][0]["text"])["input_ids"]) + 1
            for row in batch.rows
        )  # fmt: skip
        assert batch.columns is not None
        assert batch.columns.num_tokens == batch.inputs["attention_mask"].sum() + (answers >= 0).sum()
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=1, save_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = PlannedTrainer(
        model, args, train_dataset=talks, data_collator=ConversationCollator(processor), processing_class=processor,
        scheduler=make_scheduler("budget", budget=300),
    )  # fmt: skip
    trainer.train()
    assert trainer.planned is not None
    planned = list(trainer.planned.plan.shapes)
    assert [rows for (rows, _), *_ in trainer.seen] == [shape.batch_size for shape in planned]
    for ((_, question), longest, asked_for, divided), shape in zip(trainer.seen, planned, strict=True):
        assert question + longest <= shape.num_tokens
        assert asked_for == divided


def test_what_a_model_is_decides_how_its_processor_is_called(folder: Path, tmp_path: Path) -> None:
    """T5Gemma 2 has the processor of Gemma 3, which is a decoder."""
    processor, gemma = build("Gemma 3")
    talks = conversations(folder, one_answer=True)
    batches = []
    for is_encoder_decoder in (False, True):
        processor.is_encoder_decoder = is_encoder_decoder
        dataset = ConversationDataset(talks, processor, progress=False)
        batches.append(dataset.collate([dataset[0], dataset[5]]))
    florence = build("Florence-2")[1]
    assert ConversationModel(gemma)(batches[0]).loss > 0
    with pytest.raises(OptionError, match=r"^Gemma3.* takes batches of a ConversationDataset alone"):
        ConversationModel(gemma)(make_batch([(3, 32, 32)]))
    with pytest.raises(
        OptionError, match=r"^Gemma3.* no encoder-decoder; set processor.is_encoder_decoder = F"
    ):
        ConversationModel(gemma)(batches[1])
    with pytest.raises(
        OptionError, match=r"^Florence2.* an encoder-decoder; set .*is_encoder_decoder = True"
    ):
        ConversationModel(florence)(batches[0])
    answers = batches[1].inputs["labels"]
    assert processor.tokenizer.decode(answers[0][answers[0] >= 0]) == "A blue square.<eos>"
    asked = processor.tokenizer.decode(batches[1].inputs["input_ids"][0])
    assert asked.endswith("red circle?<|im_end|>\n<|im_start|>assistant\n")
    for folder_of, model in (("gemma", gemma), ("florence", florence)):
        processor.save_pretrained(tmp_path / folder_of)
        model.config.save_pretrained(tmp_path / folder_of)
        assert named_processor(str(tmp_path / folder_of)).is_encoder_decoder == (model is florence)


def test_what_is_trained_is_kept_in_fp32_whatever_the_file_has(folder: Path, tmp_path: Path) -> None:
    _, model = build("Qwen2-VL")
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert {weight.dtype for weight in named_vlm(str(tmp_path)).parameters()} == {torch.float32}
    dataset = ConversationDataset(
        conversations(folder, one_answer=False), build("Qwen2-VL")[0], progress=False
    )
    first, second = (make_model({"name": str(tmp_path), "lora_rank": 2}, dataset, seed=3) for _ in range(2))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other), f"{name} depends on more than the seed"
        assert one.dtype == (torch.float32 if one.requires_grad else torch.bfloat16)


def test_pixels_have_the_precision_of_the_model(folder: Path) -> None:
    processor, model = llama_4()
    dataset = ConversationDataset(conversations(folder, one_answer=True), processor, progress=False)
    batch = dataset.collate([dataset[0], dataset[1]])
    assert batch.inputs["pixel_values"].dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        model(**batch.inputs)
    assert torch.isfinite(ConversationModel(model)(batch).loss)


def test_a_plain_loader_with_a_plan_gives_every_sample_once(folder: Path) -> None:
    processor, _ = build("LLaVA")
    talks = conversations(folder, one_answer=False)
    sampler = PlannedSampler(
        conversation_sizes(talks, processor, progress=False).sizes(), make_scheduler("budget", budget=300)
    )
    loader = DataLoader(talks, batch_sampler=sampler, collate_fn=ConversationCollator(processor))
    assert sum(len(batch["labels"]) for batch in loader) == len(talks)


def test_answers_that_are_context_are_not_learnt(folder: Path) -> None:
    processor, _ = build("Qwen2-VL")
    shots = [{"role": "user", "content": "Count them."}, {"role": "assistant", "content": "There are two."}]
    rows = [{"prompt": [*shots, shots[0]], "completion": "I think two."}]
    batch = ConversationCollator(processor)(list(read_conversations(rows)))
    assert processor.tokenizer.decode(batch["labels"][batch["labels"] >= 0]) == "I think two.<|im_end|>\n"


def test_an_answer_that_is_context_is_not_taken_for_the_same_answer_before_it(folder: Path) -> None:
    """Also where a later image has more tokens than lie between the two."""
    processor, _ = build("Qwen2-VL")
    rows = [
        {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "What?"}, {"role": "assistant", "content": "Two.", "weight": 0},
        {"role": "user", "content": "<image>" * 4}, {"role": "assistant", "content": "I think."},
    ]  # fmt: skip
    talks = read_conversations([{"messages": rows, "images": ["4.png"] * 4}], images=folder)
    labels = ConversationCollator(processor)([talks[0]])["labels"][0]
    alone = read_conversations([{"messages": rows[:2]}])
    (first,) = ConversationCollator(processor)([alone[0]])["labels"].tolist()
    assert labels[: len(first)].tolist() == first
    assert (labels == first[-1]).sum() == 2


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\3\4cut"])
def test_damaged_sizes_are_found_again(content: bytes, folder: Path, tmp_path: Path) -> None:
    processor, _ = build("LLaVA")
    talks = conversations(folder, one_answer=True)
    first = conversation_sizes(talks, processor, cache=tmp_path, progress=False)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    again = conversation_sizes(talks, processor, cache=tmp_path, progress=False)
    assert again.num_tokens.tolist() == first.num_tokens.tolist()


def test_a_text_that_holds_the_image_token_is_named_before_training(folder: Path) -> None:
    processor, _ = build("Qwen2-VL")
    talks = read_conversations([{"id": "odd", "conversations": turns(processor.image_token, "Two.")}])
    with pytest.raises(OptionError, match=r"conversation odd: .* in a text stands for an image"):
        conversation_sizes(talks, processor, progress=False)


def test_a_template_that_rewrites_earlier_turns_is_refused_before_training(folder: Path) -> None:
    processor, _ = build("Qwen2-VL")
    processor.chat_template = "{% if messages|length > 2 %}Again. {% endif %}" + processor.chat_template
    talks = conversations(folder, one_answer=False)
    with pytest.raises(
        DataError, match=r"^conversation .*, with the roles user, assistant, user, assistant: the chat"
    ):
        ConversationDataset(talks, processor, progress=False)


def test_several_threads_share_a_collator(folder: Path) -> None:
    """A fast tokenizer keeps its padding as state, which calls without padding reset."""
    processor, _ = build("Qwen2-VL")
    collate, rows = ConversationCollator(processor), list(conversations(folder, one_answer=False))
    with ThreadPoolExecutor(4) as pool:
        for batch in pool.map(lambda first: collate(rows[first : first + 3]), [0, 3, 5, 6] * 30):
            assert len(batch["input_ids"]) == 3


def test_what_cannot_be_used_is_said_in_a_line(folder: Path) -> None:
    talks = conversations(folder, one_answer=False)
    paligemma, _ = build("PaliGemma")
    with pytest.raises(
        OptionError, match="learns one answer at the end of a sample; give conversations of one"
    ):
        conversation_sizes(talks, paligemma, progress=False)
    llava, _ = build("LLaVA")
    llava.chat_template = None
    with pytest.raises(
        OptionError, match=r"LlavaProcessor has no chat template.*set processor.chat_template"
    ):
        conversation_sizes(talks, llava, progress=False)
    llava.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(OptionError, match="the chat template refuses a conversation: no system"):
        conversation_sizes(talks, llava, progress=False)
    llava.chat_template = CHATML.replace("IMAGE", "")
    with pytest.raises(DataError, match=r"^LlavaProcessor cannot make a batch of 9 conversations: .*\S$"):
        ConversationCollator(llava)(list(talks))
    rendered = Pix2StructProcessor(Pix2StructImageProcessor(max_patches=32), tokenizer())
    with pytest.raises(OptionError, match="Pix2StructProcessor makes no input_ids, but flatt"):
        conversation_sizes(conversations(folder, one_answer=True), rendered, progress=False)
    with pytest.raises(
        OptionError, match=r"expected the processor of a vision-language model.*found TokenizersBackend"
    ):
        ConversationCollator(tokenizer())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_with_image_tokens_is_refused_where_batches_have_none(name: str) -> None:
    with pytest.raises(OptionError, match=r"reads an image as tokens in the text.*ConversationModel"):
        LossModel(build(name)[1])


def test_the_table_of_families_names_those_that_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/models.md").read_text()
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if "| yes |" in line}
    assert rows.keys() == FAMILIES.keys()
    for name, row in rows.items():
        assert row.count("| yes ") == 5 - (name in REFUSED)
        assert ("| refused |" in row) == (name in REFUSED)
        assert ("by real calls" in row) == (name in SAYS_NOT)
        assert ("one answer" in row) == (name in ("PaliGemma", "Florence-2"))
