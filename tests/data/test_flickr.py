"""Flickr token files: `name.jpg#0<TAB>caption`."""

from __future__ import annotations

import pytest

from mmlab.data.readers import read_records
from mmlab.errors import DataError

LINES = 'a b.jpg#0\tA dog , running .\na b.jpg#1\tThe same dog\nc.JPG#0\t"Quoted" text\twith a tab\n'


@pytest.mark.parametrize("place", ["flickr30k-images", "flickr30k_images", "Images", "."])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_each_line_is_a_record_of_its_image(folder, place, newline):
    folder.image(f"{place}/a b.jpg")
    folder.image(f"{place}/c.JPG")
    records = read_records(folder.text("results_20130124.token", LINES.replace("\n", newline)))
    assert records.ids == ["a b.jpg#0", "a b.jpg#1", "c.JPG#0"]
    assert records.texts == ["A dog , running .", "The same dog", '"Quoted" text\twith a tab']
    assert records.group.tolist() == [0, 0, 1]


def test_a_folder_with_a_token_file_is_recognised(folder):
    folder.image("Images/a b.jpg")
    folder.image("Images/c.JPG")
    folder.text("captions.token", LINES)
    folder.text("README.txt", "About these data")
    assert len(read_records(folder.path)) == 3


def test_other_lines_are_bad_rows(folder):
    folder.image("a.jpg")
    with pytest.raises(DataError, match=r"line 2: expected name.jpg#0<TAB>caption, found a.jpg no tab"):
        read_records(folder.text("captions.token", "a.jpg#0\tx\na.jpg no tab\n"))
