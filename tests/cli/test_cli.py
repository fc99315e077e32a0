"""The command line: exit codes, one JSON document on stdout, one clear line for what is wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import CLIPConfig, CLIPVisionConfig

from mmlab.cli.main import main
from mmlab.cli.parser import make_parser
from mmlab.comparison.options import ComparisonOptions
from mmlab.comparison.overview import SHOWN_SCHEDULERS
from mmlab.model import PRESETS
from mmlab.pricing.plan_prices import side_of_patch
from tests.prices import priced_once
from tests.prices import speck as small_preset


def test_help_lists_the_commands_and_loads_nothing_for_it() -> None:
    code = "import sys; from mmlab.cli.main import main; main(['--help'])"
    code = f"import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr)); {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("compare", "data", "doctor", "Begin with: plan"):
        assert command in done.stdout
    assert not {"torch", "numpy", "pandas", "pydantic"} & set(done.stderr.split())


@pytest.mark.parametrize(
    "words", [["compare"], ["memory"], ["bench", "io"], ["bench", "parallel"]], ids=" ".join
)
def test_help_names_every_preset(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args([*words, "--help"])
    shown = capsys.readouterr().out
    assert not [name for name in PRESETS if name not in shown]


@pytest.mark.parametrize(
    ("handler", "exit_code"),
    [("signal.default_int_handler", -signal.SIGINT), ("lambda number, _: sys.exit(128 + number)", 143)],
)
def test_a_request_to_end_is_not_lost_in_a_finalizer(handler: str, exit_code: int) -> None:
    code = f"""if True:
        import os, signal, sys, time
        from mmlab.cli.commands import _end_by

        class Ended:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)  # the exception is raised here, where Python drops it

        _end_by({handler})
        Ended()
        print("goes on", flush=True)
        time.sleep(50)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (exit_code, "goes on\n")
    assert "ignored in" not in done.stderr


def test_a_command_is_a_module_too_and_exits_as_it_says() -> None:
    command = [sys.executable, "-m", "mmlab", "data", "inspect", "no/such/place"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "no/such/place" in done.stderr


def test_without_stderr_it_works_and_stdout_has_no_message(scenes: Path, tmp_path: Path) -> None:
    # headers are read, with a bar: there is no sidecar yet
    copy = shutil.copytree(scenes.parent / "images", tmp_path / "images")
    (copy / "texts.csv").write_text("image,text\n" + "".join(f"{p.name},a\n" for p in copy.glob("*.jpg")))
    for data, code, out in ((copy / "texts.csv", 0, "24 records"), ("nowhere", 2, "")):
        words = [sys.executable, "-m", "mmlab", "data", "inspect", str(data)]
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code
        assert out in done.stdout if out else not done.stdout


def test_compare_takes_every_option_of_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "--data", "x", "--ratios", "image-text=0.7,text-only=0.3", "--adaptive", "loss"]
    words += ["--memory-gb", "2.5", "--augment", "colour", "--correct", "--num-workers", "1"]
    found = make_parser().parse_args(words)
    assert found.ratios == {"image-text": 0.7, "text-only": 0.3}
    assert (found.adaptive, found.memory_gb, found.augment) == ("loss", 2.5, "colour")
    assert (found.correct, found.num_workers, found.budget, found.epochs) == (True, 1, None, 3)
    for option in fields(ComparisonOptions):
        assert hasattr(found, option.name)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["compare", "--data", "x", "--ratios", "all"])
    assert "argument --ratios: invalid shares value: 'all'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        make_parser().parse_args(["compare", "--help"])
    assert "held-out split (default: 0)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["compare"], "--data"),
        (["plan"], "mmlab plan takes one of --data and --lengths"),
        (["compare", "--data", "x", "--epochs", "two"], "invalid int value: 'two'"),
        (["compare", "--data", "no/such/place"], "no/such/place"),
        (["data", "inspect", ""], "argument path: it is empty"),
        (["compare", "--data", ""], "argument --data: it is empty"),
        (["data", "inspect", "no/such/place"], "no/such/place"),
        (["plan", "--lengths", "no/such.csv"], "no/such.csv"),
        (["plan", "--lengths", "x.csv", "--device-name", "A100"], "add --model NAME"),
        (["plan", "--lengths", "x.csv", "--images", "folder"], "leave --images out"),
        (["plan", "--data", "x", "--processor", "y", "--image", "square:64"], "leave --image out"),
    ],
)
def test_bad_usage_exits_with_2_and_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert message in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_compare_prints_one_json_document(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        *(
            "compare",
            "--data",
            str(scenes),
            "--schedulers",
            "sorted,budget",
            "--epochs",
            "1",
            "--limit",
            "60",
        ),
        *("--batch-size", "8", "--image", "aspect:48", "--out", str(tmp_path / "out"), "--json"),
        *("--equal", "batch_size"),
    )
    assert main(words) == 0
    document = json.loads(capsys.readouterr().out)
    assert [arm["scheduler"] for arm in document["arms"]] == ["sorted", "budget"]
    assert document == json.loads((tmp_path / "out" / "comparison.json").read_text())
    for name in ("table.csv", "figure.png", "report.html"):
        assert (tmp_path / "out" / name).stat().st_size > 0


def test_plan_maps_each_scheduler_to_its_figures(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--data", str(scenes), "--schedulers", "random,budget", "--ranks", "2", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["random", "budget"]
    expected = "num_batches text_waste image_waste combined_waste peak_over_budget straggler randomness"
    expected += " collision_ratio coverage num_duplicates"
    assert set(expected.split()) == set(document["budget"])
    assert document["budget"]["coverage"] == 1
    assert document["budget"]["peak_over_budget"] <= 1
    assert main(arguments[:-1]) == 0
    page = capsys.readouterr().out
    assert page.startswith("images: aspect:224:16; budget: ")
    assert "ranks: 2; epochs: 2\n" in page
    table, notes = page.split("\n", 1)[1].strip().split("\nall have ")
    assert "straggler" in table
    assert "coverage" not in table
    assert notes.startswith("collision_ratio 0.00%, coverage 100.00%, num_duplicates 0; waste: share of")
    assert "peak_over_budget: " in notes
    assert "epoch_s: " not in notes


def test_plan_and_inspect_say_the_same_of_the_same_data(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wastes, settings = [], []
    for words in (["plan", "--data", str(scenes)], ["data", "inspect", str(scenes)]):
        assert main([*words, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        wastes.append({name: found.get("waste", found)[name]["combined_waste"] for name in SHOWN_SCHEDULERS})
        assert main(words) == 0
        settings.append(re.findall("^images: .*ranks: 1.*$", capsys.readouterr().out, re.MULTILINE))
    assert wastes[0] == wastes[1]
    assert settings[0] == settings[1] != []


def test_plan_reads_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "lengths.csv"
    rows = [f"{index % 7},{480},{320 + 16 * (index % 20)},{8 + index % 30}" for index in range(500)]
    table.write_text("image_id,height,width,num_tokens\n" + "\n".join(rows) + "\n")
    assert main(["plan", "--lengths", str(table), "--schedulers", "sorted,bucket", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == ["sorted", "bucket"]


@pytest.fixture
def speck() -> Iterator[str]:
    """The name of a model of few operations that is priced once; it is wide, so that an image can be too large for it."""
    with small_preset(image_dim=1024) as name, priced_once("mmlab.pricing.plan_prices.fit_memory"):
        yield name


def test_plan_predicts_seconds_and_money_on_a_named_device(
    speck: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, wide = tmp_path / "lengths.csv", tmp_path / "wide.csv"
    rows = [f"{96 + 16 * (index % 3)},{96 + 16 * (index % 2)},{8 + index % 9}" for index in range(400)]
    table.write_text("height,width,num_tokens\n" + "\n".join(rows) + "\n")
    words = ["plan", "--lengths", str(table), "--model", speck, "--schedulers", "random,budget,packed"]
    asked = [
        *words,
        *["--device-name", "t4", "--price-per-hour", "0.5", "--precision", "fp16", "--ranks", "8"],
    ]
    assert main([*asked, "--json"]) == 0
    said = capsys.readouterr()
    document = json.loads(said.out)
    for name, figures in document.items():
        assert figures["seconds"] == "predicted, not measured"
        assert 0 < figures["epoch_s"] < 60
        assert figures["epoch_price"] == pytest.approx(figures["epoch_s"] * 8 * 0.5 / 3600)  # eight ranks
        assert (figures["peak_bytes"] is None) == (name == "packed")
    assert main([*words, "--device-name", "K9"]) == 2
    assert "unknown device 'K9'. Known: A100 80GB" in capsys.readouterr().err
    assert main([*words, "--device-name", "T4", "--precision", "bf16"]) == 2
    assert "T4 does not support bf16" in capsys.readouterr().err
    assert main([*words, "--device-name", "T4", "--memory-gb", "0.3"]) == 2
    assert "too little memory: T4: 0 GiB for training (0.3 GiB, less" in capsys.readouterr().err
    wide.write_text("height,width,num_tokens\n96,96,8\n16000,16000,8\n")
    too_large = ["plan", "--lengths", str(wide), "--image", "aspect:16000", *asked[3:]]
    assert main(too_large) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "sample 1 alone (8 tokens, 16000 x 16000 pixels) costs" in said
    assert said.endswith("make images smaller, or take more memory")


def test_plan_counts_patches_as_the_model_makes_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=64, patch_size=32, **small)
    configs = {"vision_config": vision.to_dict(), "text_config": {"vocab_size": 8192, **small}}
    CLIPConfig(**configs, projection_dim=32, architectures=["CLIPModel"]).save_pretrained(tmp_path)
    assert side_of_patch(str(tmp_path)) == 32
    (tmp_path / "lengths.csv").write_text("height,width,num_tokens\n64,64,8\n64,64,9\n")
    words = [
        "plan",
        "--lengths",
        str(tmp_path / "lengths.csv"),
        "--model",
        str(tmp_path),
        "--device-name",
        "A100",
    ]
    assert main([*words, "--image", "aspect:64", "--schedulers", "random"]) == 0
    assert "images: aspect:64:32; " in capsys.readouterr().out


def test_make_then_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "made")
    assert main(["data", "make", out, "--num-images", "6", "--max-side", "64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_images"] == 6
    assert main(["data", "make", out, "--num-images", "6"]) == 2
    assert "made" in capsys.readouterr().err
    picture = tmp_path / "look.png"
    assert main(["data", "inspect", out, "--plot", str(picture), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["num_images"] == 6
    assert set(document["distributions"]) == {"height", "width", "aspect", "num_tokens"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["data", "inspect", out, "--plot", "look.xyz"]) == 2
    assert "must end in one of" in capsys.readouterr().err


def test_doctor_reports_and_judges(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"]


def test_a_folder_that_cannot_be_made_is_named(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    out = tmp_path / "file" / "below"
    assert main(["compare", "--data", str(scenes), "--epochs", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"mmlab: error: {out}")
    assert "Not a directory" in error


@pytest.mark.parametrize("kind", [ZeroDivisionError, FileNotFoundError])  # the second without a path to name
def test_an_unforeseen_failure_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def fail(_: object) -> None:
        raise kind("nobody thought of that")

    monkeypatch.setattr(sys.modules["mmlab.cli.main"], "call", fail)
    assert main(["watch", str(tmp_path)]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"mmlab: failed: {kind.__name__}: nobody thought of that")
