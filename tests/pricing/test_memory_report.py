"""What a data set needs on a device: the figures belong to one plan, and the alternatives are in order."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import transformers

from mmlab.cli.main import main
from mmlab.data.readers import read_records
from mmlab.data.text import load_tokenizer
from mmlab.errors import OptionError
from mmlab.machine import CONTEXT_BYTES, GIB
from mmlab.pricing.breakdown import price
from mmlab.pricing.fingerprint import fingerprint
from mmlab.pricing.memory import MemoryModel
from mmlab.pricing.memory_report import MemoryReport, memory_report, plan_memory
from mmlab.pricing.named_model import named_model
from mmlab.runs.figures import save_figure
from mmlab.schedule.cost import max_batch_size
from mmlab.types import SampleSizes

MEMORY_GB = 0.693  # of which 600 MiB are the context and 64 MiB cuBLAS's: some 45 MiB for training


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the configuration of a small CLIP, and nothing else."""
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 2000, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**tower, "patch_size": 16, "image_size": 64},
        architectures=["CLIPModel"],
    )
    folder = tmp_path_factory.mktemp("clip")
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def printed(
    clip: str, scenes: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path, MemoryReport]:
    """What `mmlab memory` prints, where it has saved files, and the report that it made: fitted once for all tests."""
    folder, made = tmp_path_factory.mktemp("memory"), []
    command = (
        f"memory --model {clip} --data {scenes} --memory-gb {MEMORY_GB} --image aspect:64 --precision bf16"
    )
    command += f" --limit 40 --save {folder / 'memory.json'} --plot {folder / 'memory.svg'} --json"

    def kept(*arguments: Any, **options: Any) -> MemoryReport:
        made.append(memory_report(*arguments, **options))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr("mmlab.pricing.memory_report.memory_report", kept)
        with redirect_stderr(io.StringIO()):
            assert main(command.split()) == 0
    return json.loads(out.getvalue()), folder, made[0]


@pytest.fixture(scope="module")
def report(printed: tuple[dict[str, Any], Path, MemoryReport]) -> MemoryReport:
    return printed[-1]


def test_the_limit_is_what_was_given_less_the_context(report: MemoryReport) -> None:
    assert report.planned.limit_bytes == round(MEMORY_GB * GIB) - CONTEXT_BYTES["cuda"]
    assert report.planned.target_bytes < report.planned.limit_bytes


def test_no_planned_batch_needs_more_than_the_limit(report: MemoryReport) -> None:
    for planned in report.plans.values():
        assert planned.plan is not None
        assert planned.batch_bytes.max() <= planned.target_bytes
        assert sorted(row for batch in planned.plan for row in batch) == list(range(len(planned.sizes)))


def test_alternatives_are_the_other_precision_and_checkpointing(report: MemoryReport) -> None:
    assert list(report.plans) == ["bf16", "fp32", "bf16, checkpointing"]
    table = report.table
    assert table.loc["bf16, checkpointing", "fixed_batch_size"] > table.loc["bf16", "fixed_batch_size"]
    assert [plan.memory.conditions["precision"] for plan in report.plans.values()] == ["bf16", "fp32", "bf16"]


def test_the_best_batch_of_a_shape_fits_and_one_more_does_not(report: MemoryReport) -> None:
    for row in report.largest_shapes.itertuples():
        at = (row.num_tokens, row.height, row.width)
        needed = report.memory.rows.at(
            [row.best_batch_size, row.best_batch_size + 1], at[0], at[1] // 16 * (at[2] // 16)
        )
        assert needed[0] <= report.planned.target_bytes < needed[1]
    shapes = np.unique(report.planned.sizes.alone, axis=0)[:, 1:].tolist()
    least = min(max_batch_size(report.memory, *shape, report.planned.target_bytes) for shape in shapes)
    assert report.largest_shapes["best_batch_size"].min() == least


def test_it_prints_draws_and_is_json(report: MemoryReport, tmp_path: Path) -> None:
    text = str(report)
    for expected in ("for training", "bf16, checkpointing", "samples whose batches need most", "too low"):
        assert expected in text
    assert json.dumps(report.as_dict(), allow_nan=False)
    save_figure(report.figure(), tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert "<table" in report._repr_html_()


def test_a_sample_that_does_not_fit_leaves_no_plan_and_is_counted(report: MemoryReport) -> None:
    memory = report.memory
    sizes = SampleSizes(num_tokens=[8, 9, 8], height=[32, 9600, 32], width=[32, 9600, 32], group=np.arange(3))
    planned = plan_memory(memory, sizes, report.planned.limit_bytes)
    assert planned.plan is None
    assert planned.figures()["num_too_large"] == 1
    assert planned.figures()["num_batches"] is None
    full = MemoryReport(source="three", model="m", limit=report.limit, plans={"bf16": planned})
    assert "1 samples do not fit even alone" in str(full)
    assert report.ok
    assert not full.ok
    json.dumps(full.as_dict(), allow_nan=False)


def test_a_model_without_weights_takes_no_memory_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    model = named_model("base", vocab_size=1000)
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    with pytest.raises(OptionError, match="'no/such/model' is neither a preset"):
        named_model("no/such/model", vocab_size=1000)
    transformers.BertConfig().save_pretrained(tmp_path)
    with pytest.raises(OptionError, match="names no architecture"):
        named_model(str(tmp_path), vocab_size=1000)


def test_a_model_that_tells_hidden_tokens_is_priced_with_the_datas_tokenizer(
    tmp_path: Path, scenes: Path
) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertConfig(**sizes, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    tokenizer = load_tokenizer("builtin", records=read_records(scenes, limit=4))
    network = named_model(str(tmp_path), vocab_size=1000, tokenizer=tokenizer)
    assert price(network, (2, 8, 32, 32)).peak_bytes > 0
    assert fingerprint(network) == fingerprint(network.module)


def test_nothing_to_price_is_refused(clip: str, scenes: Path) -> None:
    for limit in (0, -5):
        with pytest.raises(OptionError, match=f"limit must be at least 1, found {limit}"):
            memory_report(clip, scenes, memory_gb=1, limit=limit)


def test_the_command_prints_one_document_and_saves_what_it_fitted(
    printed: tuple[dict[str, Any], Path, MemoryReport],
) -> None:
    document, folder, report = printed
    assert document == json.loads(json.dumps(report.as_dict()))
    assert document["num_samples"] == 40
    asked = {"precision": "bf16", "checkpointing": False}
    memory = MemoryModel.load(folder / "memory.json", fingerprint=document["fingerprint"], conditions=asked)
    assert memory.conditions == document["conditions"]
    assert (folder / "memory.svg").stat().st_size > 0


def test_the_command_refuses_what_it_cannot_price(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--model", "no/such/model", "--data", str(scenes), "--memory-gb", "8"]) == 2
    assert "'no/such/model' is neither a preset" in capsys.readouterr().err
    assert main(["memory", "--model", "tiny", "--data", str(scenes), "--memory-gb", "0.1"]) == 2
    assert "too little memory: cuda: 0 GiB for training (0.1 GiB" in capsys.readouterr().err
    arguments = ["memory", "--model", "tiny", "--data", str(scenes), "--memory-gb", "8"]
    assert main([*arguments, "--save", "no/such/folder/memory.json"]) == 2
    assert "there is no folder no/such/folder" in capsys.readouterr().err
    # before any pricing, which would be lost
    with patch("mmlab.pricing.memory_report.memory_report") as price:
        assert main([*arguments, "--save", str(scenes.parent)]) == 2
        assert "it is a folder" in capsys.readouterr().err
        assert main([*arguments, "--plot", "memory.xyz"]) == 2
        assert "cannot plot to memory.xyz: its name" in capsys.readouterr().err
    assert not price.called
