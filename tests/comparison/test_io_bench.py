"""The stages' rates are those of the data given, and the sentence follows from them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from mmlab.cli.main import main
from mmlab.comparison.io_bench import IoBench, bench_io
from mmlab.errors import DataError, OptionError
from mmlab.loading.speeds import MIB, read_rates


@pytest.fixture(scope="module")
def found(scenes: Path) -> IoBench:
    return bench_io(scenes, image="square:32", batch_size=8, device="cpu", progress=False)


def test_every_stage_is_measured_on_the_images_of_the_data(found: IoBench, scenes: Path) -> None:
    files = sorted((scenes.parent / "images").glob("*.jpg"))
    num_bytes = sum(file.stat().st_size for file in files)
    assert (found.reading.num_files, found.reading.num_bytes) == (len(files), num_bytes)
    assert found.image_bytes == pytest.approx(
        num_bytes / len(files), rel=0.3
    )  # each as often as it has captions
    stages = [row["stage"] for row in found.rows]
    assert stages[-4:] == ["decode", "tokenise", "collate", "train"]  # nothing is copied to a CPU
    assert all(row["samples_per_s"] > 0 for row in found.rows)
    decode = found.rows[-4]
    assert decode["samples_per_s"] == found.num_cores * found.decode_per_core
    assert decode["mib_per_s"] == pytest.approx(decode["samples_per_s"] * found.image_bytes / MIB)


def test_the_stage_that_is_slower_than_training_is_named_with_a_remedy(found: IoBench) -> None:
    at_rest = replace(
        found, num_cores=2, decode_per_core=500.0, collate_per_core=9e3, copy_per_s=5e4, device="cuda"
    )
    idle = replace(at_rest, reading=replace(found.reading, cold_s=None, warm_s=1e-3))
    trains = replace(idle, train_per_s=300.0)
    assert trains.bottleneck == "train"
    assert "Training is the bottleneck: its steps take 300 samples/s; decode, the slowest" in trains.sentence
    assert "on the same cores" not in trains.sentence
    decodes = replace(idle, train_per_s=2600.0)
    assert decodes.bottleneck == "decode"
    assert "it gives 1,000 of the 2,600 samples/s" in decodes.sentence
    assert "6 cores instead of 2" in decodes.sentence
    reads = replace(decodes, reading=replace(found.reading, cold_s=9.0, warm_s=1.0))
    assert reads.bottleneck == "read"
    assert "in files read at random" in reads.sentence
    copies = replace(decodes, decode_per_core=1e5, copy_per_s=2e3)
    assert copies.bottleneck == "copy"


def test_the_command_prints_a_table_and_one_document(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "bench",
        "io",
        "--data",
        str(scenes),
        "--image",
        "square:32",
        "--batch-size",
        "4",
        "--device",
        "cpu",
    ]
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sentence"].startswith(document["bottleneck"].capitalize()[:5])
    assert {"stage", "samples_per_s", "mib_per_s", "how"} == set(document["rows"][0])


def test_it_shows_itself(found: IoBench) -> None:
    assert str(found).endswith(found.sentence)
    assert "<td>decode</td>" in found._repr_html_()


def test_bad_input_is_told(scenes: Path) -> None:
    with pytest.raises(OptionError, match="batch_size must be at least 2"):
        bench_io(scenes, batch_size=1)
    with pytest.raises(OptionError, match="batch_size must be a whole number, found '8'"):
        bench_io(scenes, batch_size="8")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="found 1 images in 3 records, at least 2 are needed"):
        bench_io(scenes, limit=3, progress=False)


def test_an_image_that_cannot_be_decoded_is_named(scenes: Path, tmp_path: Path) -> None:
    shutil.copytree(scenes.parent, tmp_path / "scenes")
    images = sorted((tmp_path / "scenes" / "images").glob("*.jpg"))
    images[0].write_bytes(images[0].read_bytes()[:-300])
    with pytest.raises(DataError, match=f"cannot read image .*{images[0].name}: JPEG is damaged or cut off"):
        bench_io(tmp_path / "scenes" / scenes.name, progress=False)


def test_random_pieces_cover_a_file_once(tmp_path: Path) -> None:
    (tmp_path / "shard.tar").write_bytes(bytes(300_000))
    (tmp_path / "small.tar").write_bytes(bytes(1000))
    rates = read_rates([tmp_path / "shard.tar", tmp_path / "small.tar"])
    assert (rates.num_files, rates.num_bytes) == (2, 301_000)
