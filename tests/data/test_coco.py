"""COCO captions: the file, the folder layouts in which it comes, and a sample of the real data."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmlab.data.readers import read_records
from mmlab.errors import DataError

SAMPLE = Path(__file__).parents[2].parent / "shared/data/coco-sample"


def captions(names: list[str], per_image: int = 2, first_id: int = 0) -> dict:
    images = [{"id": first_id + number, "file_name": name} for number, name in enumerate(names)]
    annotations = [
        {
            "id": 100 * image["id"] + number,
            "image_id": image["id"],
            "caption": f"caption {number} of {image['file_name']}",
        }
        for image in images
        for number in range(per_image)
    ]
    return {"info": {}, "images": images, "annotations": annotations}


def test_each_caption_is_a_record_of_its_image(folder):
    folder.image("images/a.jpg", 64, 48)
    folder.image("images/b.jpg", 48, 64)
    records = read_records(folder.json("captions.json", captions(["a.jpg", "b.jpg"])))
    assert records.ids == ["0", "1", "100", "101"]
    assert records.group.tolist() == [0, 0, 1, 1]
    assert records.height.tolist() == [48, 48, 64, 64]
    assert records.texts[3] == "caption 1 of b.jpg"


@pytest.mark.parametrize("place", ["images", "val2017", "train2017", "images/val2017", "."])
def test_the_image_folder_is_found_beside_the_file(folder, place):
    folder.image(f"{place}/a.jpg")
    assert len(read_records(folder.json("captions.json", captions(["a.jpg"])))) == 2


def test_the_official_layout_is_read_whole_with_its_splits(folder):
    folder.image("train2017/1.jpg", 10, 10)
    folder.image("val2017/1.jpg", 20, 20)
    folder.json("annotations/captions_train2017.json", captions(["1.jpg"]))
    path = folder.json("annotations/captions_val2017.json", captions(["1.jpg"], first_id=7))
    folder.json("annotations/instances_val2017.json", {"images": [], "annotations": [{"bbox": []}]})
    records = read_records(folder.path)
    assert records.splits == ["train", "train", "val", "val"]
    assert records.height.tolist() == [10, 10, 20, 20]
    assert records.group.tolist() == [0, 0, 1, 1]
    assert read_records(folder.path, split="val").ids == ["700", "701"]
    assert read_records(path, images=folder.path / "val2017").ids == ["700", "701"]


def test_an_annotation_without_its_image_and_an_image_without_caption_are_reported(folder):
    folder.image("images/a.jpg")
    folder.image("images/b.jpg")
    content = captions(["a.jpg", "b.jpg"], per_image=1)
    content["annotations"][1]["image_id"] = 99
    with pytest.raises(DataError) as error:
        read_records(folder.json("captions.json", content))
    found = [(row.row, row.reason) for row in error.value.bad_rows]
    assert found[0] == ("annotation 1", "image_id 99 is not among the images")
    assert found[1][0] == "image 1"
    assert found[1][1].startswith("no text")


@pytest.mark.parametrize(
    "content", [{"images": 3, "annotations": []}, {"images": [1], "annotations": [{"caption": 1}]}]
)
def test_other_contents_are_refused(folder, content):
    path = folder.json("captions.json", content | {"caption": ""})
    with pytest.raises(DataError, match="COCO captions have a list of objects named 'images'"):
        read_records(path)


def test_a_file_name_that_is_no_path_is_reported(folder):
    folder.image("images/a.jpg")
    content = captions(["a.jpg", "b.jpg"], per_image=1)
    content["images"][1]["file_name"] = 5
    with pytest.raises(DataError, match="annotation 1: file_name must be a path, found 5"):
        read_records(folder.json("captions.json", content))


@pytest.mark.parametrize("split", [3, ["val"], {"name": "val"}])
def test_a_split_that_is_no_text_is_reported(folder, split):
    folder.image("images/a.jpg")
    folder.image("images/b.jpg")
    content = captions(["a.jpg", "b.jpg"], per_image=1)
    content["images"][1]["split"] = split
    with pytest.raises(DataError, match=r"1 of 2 rows cannot be used(.|\n)*split must be a string, found"):
        read_records(folder.json("captions.json", content))


def test_an_image_id_that_stands_for_two_files_is_reported(folder):
    folder.image("images/a.jpg")
    folder.image("images/b.jpg")
    content = captions(["a.jpg", "b.jpg"], per_image=1)
    again = content | {"images": [*content["images"], content["images"][0]]}
    assert len(read_records(folder.json("captions.json", again))) == 2
    content["images"] += [{"id": 0, "file_name": "b.jpg"}, {"id": 2, "file_name": "a.jpg"}]
    content["images"] += [{"id": 2, "file_name": "b.jpg"}]
    with pytest.raises(DataError) as error:
        read_records(folder.json("captions.json", content))
    found = {row.row: row.reason for row in error.value.bad_rows}
    assert found == {
        "annotation 0": "image id 0 stands for 'a.jpg' and 'b.jpg'; give each image an id of its own",
        "image 2": "image id 2 stands for 'a.jpg' and 'b.jpg'; give each image an id of its own",
    }


@pytest.mark.parametrize("stated", [{}, {"image_id": None}])
def test_an_annotation_without_image_is_not_paired_with_an_image_without_id(folder, stated):
    folder.image("a.jpg")
    content = {"images": [{"file_name": "a.jpg"}], "annotations": [{"caption": "x"} | stated]}
    with pytest.raises(DataError) as error:
        read_records(folder.json("captions.json", content))
    found = [(row.row, row.reason.partition(" (")[0]) for row in error.value.bad_rows]
    assert found == [("annotation 0", "image_id None is not among the images"), ("image None", "no text")]


def test_object_annotations_are_not_captions(folder):
    path = folder.json("instances.json", {"images": [], "annotations": [{"bbox": []}]})
    with pytest.raises(DataError, match='as COCO captions: has no "caption"'):
        read_records(path)


def test_a_file_cut_short_is_refused(folder):
    content = folder.json("captions.json", captions(["a.jpg"])).read_text()
    with pytest.raises(DataError, match=r"captions.json: not JSON"):
        read_records(folder.text("captions.json", content[:-20]))


@pytest.mark.skipif(not SAMPLE.is_dir(), reason="no COCO sample beside the checkout")
def test_real_coco_captions():
    records = read_records(SAMPLE / "captions.json")
    assert len(records) == 250
    assert len(set(records.group.tolist())) == 50
    assert records.height.min() > 100
    assert read_records(SAMPLE).texts == records.texts
