"""Bad input to any command: exit code 2, one clear line on stderr, nothing on stdout, nothing dropped in silence."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from mmlab.cli.main import main
from mmlab.errors import OptionError, loading_by_name
from mmlab.runs.events import RunLog


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command that is given something wrong says."""
    try:
        code: object = main(arguments)
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert (code, said.out) == (2, ""), said
    return said.err.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --data D --batch-size 1.5", "--batch-size: invalid int value: '1.5'"),
        ("compare --data D --batch-size 100000", "--batch-size must be at most 65,536, found 100000"),
        ("compare --data D --lr nan", "--lr must be at least 0, found nan"),
        ("compare --data D --memory-gb inf", "--memory-gb must be finite, found inf"),
        ("compare --data D --limit 0", "--limit must be at least 1, found 0"),
        ("plan --data D --image aspect:8", "max_area 64 cannot hold one cell of 16 x 16 pixels"),
        ("plan --data D --precision bf61", "add --model NAME, for --device-name, --price-per-hour"),
        ("plan --data D --seed -1", "--seed must be at least 0, found -1"),
        ("memory --model tiny --data D --limit -5", "--limit must be at least 1, found -5"),
        ("data make OUT --num-images 0", "--num-images must be at least 1, found 0"),
        ("data make OUT --val-fraction 1.5", "--val-fraction must be at most 1.0, found 1.5"),
        ("data make OUT --seed -1", "--seed must be at least 0, found -1"),
        ("cache build OUT --data D --threads 0", "--threads must be at least 1, found 0"),
        ("cache build OUT --data D --limit-gib -1", "--limit-gib must be above 0, found -1.0"),
        ("bench io --data D --batch-size 100000", "--batch-size must be at most 65,536, found 100000"),
        ("plan --data D --epochs 1000000000", "--epochs must be at most 10,000, found 1000000000"),
        ("memory --model tiny --data D --memory-gb 1e15", "--memory-gb must be at most 900,000, found"),
        ("bench parallel --steps 0", "--steps must be at least 1, found 0"),
        ("app --port 99999", "--port must be at most 65,535, found 99999"),
        ("plan --data D --max-side 96", "unrecognized arguments: --max-side 96"),
        ("app --json", "unrecognized arguments: --json"),
    ],
)
def test_numbers_out_of_bounds_are_named(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / word) if word in ("D", "OUT") else word for word in arguments.split()]
    said = refused(words, capsys)
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["compare", "plan", "bench io"])
def test_ranks_of_one_machine_do_not_measure_at_once(
    command: str, scenes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    said = refused([*command.split(), "--data", str(scenes)], capsys)
    assert said.endswith("start it once, without torchrun")


def test_no_scheduler_is_no_known_scheduler(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["plan", "--data", str(scenes), "--schedulers", "random,random"], capsys)
    assert "'random' is named twice" in said
    said = refused(["plan", "--data", str(scenes), "--schedulers", ","], capsys)
    assert "unknown scheduler ','. Known: " in said


@pytest.mark.parametrize(
    "content", ["null", '{"model_type": "clip", "text_config": {"hidden_size": "wide"}}']
)
def test_a_damaged_configuration_of_a_model_is_told_in_one_line(
    content: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(content)
    said = refused(["memory", "--model", str(tmp_path), "--data", str(scenes), "--memory-gb", "4"], capsys)
    assert f"{str(tmp_path)!r} is neither a preset" in said
    assert len(said.splitlines()) == 1


def test_a_model_that_cannot_be_downloaded_says_how_to_work_offline() -> None:
    told = r"no model: could not connect to x; offline, name a local folder or set HF_HUB_OFFLINE=1$"
    with pytest.raises(OptionError, match=told), loading_by_name("no model"):
        raise OSError("could not\nconnect to x")
    with pytest.raises(OptionError, match=r"no model: damaged$"), loading_by_name("no model"):
        raise OSError("damaged")


def test_code_beside_a_model_is_not_run(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *words: "y")
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    said = refused(["memory", "--model", str(tmp_path), "--data", str(scenes), "--memory-gb", "4"], capsys)
    assert "trust_remote_code" in said
    assert len(said.splitlines()) == 1


def test_a_name_that_is_too_long_is_a_wrong_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in refused(["data", "make", str(tmp_path / ("x" * 300))], capsys)


@pytest.mark.parametrize(
    ("words", "later"),
    [
        ("plan --schedulers random", ""),
        ("cache build CACHE --image square:32", ""),
        ("memory --model FOLDER --memory-gb 4", "is neither a preset"),  # refused once the rows are read
        ("bench io", "found 1 images in 1 records"),
    ],
)
@pytest.mark.filterwarnings("always:.*cannot be used")
def test_every_command_that_reads_can_leave_out_rows_that_cannot_be_used(
    words: str, later: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = min((scenes.parent / "images").glob("*.jpg"))
    (tmp_path / "pairs.csv").write_text(f"image,text\n{image.name},a text\ngone.jpg,another text\n")
    command = words.replace("CACHE", str(tmp_path / "cache")).replace("FOLDER", str(tmp_path)).split()
    command += ["--data", str(tmp_path / "pairs.csv"), "--images", str(image.parent)]
    assert "1 of 2 rows cannot be used" in refused(command, capsys)
    assert main([*command, "--skip-bad-rows"]) == (2 if later else 0)
    said = capsys.readouterr().err
    assert "warning: " in said
    assert "1 of 2 rows cannot be used and are left out" in said
    assert later in said


def test_a_folder_of_images_elsewhere_is_given_to_every_command_that_reads(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs, home = tmp_path / "pairs.csv", scenes.parent
    rows = [f"{path.relative_to(home)},text {path.stem}" for path in sorted(home.glob("images/*.jpg"))]
    pairs.write_text("\n".join(["image,text", *rows]))
    (tmp_path / "images").symlink_to(home / "images")
    data, images = ["--data", str(pairs)], ["--images", str(home)]
    small = ["--image", "square:32"]
    commands = [
        ["plan", *data, "--schedulers", "random"],
        ["data", "inspect", str(pairs)],
        ["cache", "build", str(tmp_path / "cache"), *data, *small],
    ]
    for words in commands:
        said = refused(words, capsys)
        assert f"is a symlink to {os.path.realpath(home / 'images')}" in said
        assert "give it by the option images" in said
        assert main([*words, *images, "--json"]) == 0
        json.loads(capsys.readouterr().out)
    options = ["--equal", "batch_size", "--epochs", "1", "--batch-size", "8", "--image", "aspect:48"]
    words = ["compare", *data, "--schedulers", "random", "--out", str(tmp_path / "out"), *options]
    assert main([*words, *images, "--num-workers", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == images[1]


@pytest.mark.filterwarnings("default:cannot write to the cache")
def test_a_file_is_no_folder_for_a_cache(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    said = refused(["cache", "build", str(tmp_path / "file"), "--data", str(scenes)], capsys)
    assert said.splitlines()[-1].endswith("file; name another folder")


def test_what_a_data_file_says_cannot_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (data := tmp_path / "data.jsonl").write_text(json.dumps({"image": "a\x1b[2J.jpg", "text": "x"}))
    assert main(["data", "inspect", str(data)]) == 2
    assert r"line 1: a\x1b[2J.jpg: file not found" in capsys.readouterr().err
    assert main(["data", "make", str(tmp_path / ("a\x1b[2J" + 300 * "b"))]) == 2
    assert r"a\x1b[2Jb" in capsys.readouterr().err


def test_a_limit_of_processes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(sys.modules["mmlab.cli.main"], "call", start)
    assert main(["doctor"]) == 1
    assert "raise ulimit -u" in capsys.readouterr().err


def test_an_export_gives_the_run_that_was_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The argument `run` once took the place of the function to run."""
    with RunLog(tmp_path / "run") as log:
        for step in range(3):
            log.write("step", step, loss=1.0)
    words = ["export", str(tmp_path / "run"), str(tmp_path / "board"), "--to", "tensorboard", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["num_points"] == 3
    assert list((tmp_path / "board").rglob("events.out*"))
    assert "no events-rank*.jsonl in it" in refused(["export", str(tmp_path), "x", "--to", "wandb"], capsys)


def test_paths_that_cannot_be_used_are_the_inputs_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, ragged = tmp_path / "saved", tmp_path / "ragged.csv"
    broken.mkdir()
    for name in ("state.json", "dataset_info.json"):
        (broken / name).write_text("{")
    ragged.write_text("image,text\na.jpg,one,two\nb.jpg\n")
    (tmp_path / "shard.tar").write_bytes(b"no archive")
    (tmp_path / "file").write_text("")
    said = refused(["data", "inspect", str(broken)], capsys)
    assert "this saved dataset is damaged" in said
    said = refused(["data", "inspect", str(ragged)], capsys)
    assert "line 2: expected 2 fields as in the header, found 3" in said
    assert "cannot be read as a table" in refused(["plan", "--lengths", str(tmp_path)], capsys)
    assert "cannot be read as a table" in refused(["plan", "--lengths", str(tmp_path / "shard.tar")], capsys)
    said = refused(["data", "make", str(tmp_path / "file" / "in"), "--num-images", "2"], capsys)
    assert said == f"mmlab: error: {tmp_path / 'file'}: File exists"


@pytest.mark.parametrize(
    ("flag", "name", "content"),
    [
        ("--lengths", "lengths.csv", "height,width,num_tokens\n"),
        ("--data", "pairs.tsv", "image\ttext\n"),
        ("--data", "list.json", "\ufeff[\n]\n"),
        ("--data", "lines.jsonl", "\n\n"),
        ("--data", "nothing.csv", ""),
        ("--data", "coco.json", '{"images": [], "annotations": [], "caption": 1}'),
    ],
)
def test_a_file_without_rows_is_told_in_one_line(
    flag: str, name: str, content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(content)
    assert refused(["plan", flag, str(tmp_path / name)], capsys) == (
        f"mmlab: error: {tmp_path / name}: no rows found"
    )


@pytest.mark.parametrize("words", ["plan --lengths", "train", "export"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_and_not_waited_for(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "events-rank0.jsonl"
    os.mkfifo(pipe)
    arguments = [*words.split(), str(pipe)]
    if words == "export":
        arguments = ["export", str(tmp_path), "board", "--to", "tensorboard"]
    said = refused(arguments, capsys)
    assert str(pipe) in said
    assert "not a regular file" in said
    assert len(said.splitlines()) == 1


def test_a_link_to_itself_is_a_wrong_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (loop := tmp_path / "loop").symlink_to(loop)
    assert f"{loop / 'new'}: Too many levels of symbolic links" in refused(
        ["tour", str(loop / "new")], capsys
    )
