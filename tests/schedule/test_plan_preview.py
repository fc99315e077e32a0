"""Schedulers side by side: exactly the promised figures, quickly, and clear words for a bad file."""

import json

import pandas as pd
import pytest

from mmlab.errors import DataError, OptionError
from mmlab.schedule.preview import preview, read_lengths
from mmlab.schedule.schedulers import make_scheduler
from tests.schedule.planning import make_sizes

NAMES = ["random", "sorted", "bucket", "length_grouped", "aspect_bucket", "budget", "packed"]
FIGURES = {
    "num_batches", "text_waste", "image_waste", "combined_waste", "peak_over_budget", "straggler", "randomness",
    "collision_ratio", "coverage", "num_duplicates",
}  # fmt: skip


def test_every_scheduler_has_exactly_the_promised_figures():
    found = preview(make_sizes(2000), NAMES, ranks=4)
    document = json.loads(json.dumps(found.as_dict()))
    assert list(document) == NAMES
    for figures in document.values():
        assert set(figures) == FIGURES
        assert figures["coverage"] == 1
        assert figures["num_duplicates"] == 0
        assert figures["num_batches"] % 4 == 0
        for name in ("text_waste", "image_waste", "combined_waste", "straggler", "collision_ratio"):
            assert 0 <= figures[name] < 1
    assert document["budget"]["combined_waste"] < document["bucket"]["combined_waste"]
    assert document["budget"]["peak_over_budget"] <= 1 < document["random"]["peak_over_budget"]
    assert "budget:" in repr(found) == str(found)
    assert "<table" in found._repr_html_()
    assert list(found.table.index) == NAMES
    one = preview(make_sizes(1), ["random", "budget", "packed"], patch=8).table  # counted in the same patches
    assert (one["peak_over_budget"] == 1 / 32).all()


def test_names_of_a_users_own_schedulers_are_no_html():
    plain = make_scheduler("random", batch_size=8)
    found = preview(make_sizes(300), {"random": plain, "<b>": make_scheduler("sorted", batch_size=8)})
    assert "under &lt;b&gt;." in found._repr_html_()
    assert "<b>" not in found._repr_html_()


def test_schedulers_that_do_not_differ_at_all_are_still_a_table():
    plain = make_scheduler("random", batch_size=8)
    found = preview(make_sizes(64), {"one": plain, "other": plain})
    assert [line.split() for line in str(found).splitlines()[1:4]] == [
        ["num_batches"],
        ["one", "8"],
        ["other", "8"],
    ]
    assert "all have text_waste" in str(found)


def test_one_epoch_has_no_randomness():
    figures = preview(make_sizes(300), ["random"], epochs=1).as_dict()["random"]
    assert figures["randomness"] is None


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(OptionError, match="unknown scheduler 'budge'; did you mean 'budget'"):
        preview(make_sizes(10), ["budge"])
    with pytest.raises(OptionError, match="ranks must be at least 1, found 0"):
        preview(make_sizes(10), ["random"], ranks=0)
    with pytest.raises(OptionError, match="above the budget of 10"):
        preview(make_sizes(100), ["budget"], budget=10)


@pytest.mark.parametrize("options", [{"ranks": 1}, {"ranks": 2, "budget": 500}, {"ranks": 2, "window": 64}])
def test_options_that_a_users_own_schedulers_would_ignore_are_refused(options):
    own = {"mine": make_scheduler("random", batch_size=8, world_size=2)}
    assert "ranks: 2" in preview(make_sizes(100), own, ranks=2).setting
    with pytest.raises(OptionError, match="options of their own, and plan for 2 ranks: give that as ranks"):
        preview(make_sizes(100), own, **options)


def test_lengths_are_read_with_and_without_images(tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text("image_id,num_tokens,width,height\nb,5,20,10\na,6,20,10\nb,7,30,40\n")
    sizes = read_lengths(path)
    assert sizes.num_tokens.tolist() == [5, 6, 7]
    assert sizes.height.tolist() == [10, 10, 40]
    assert sizes.width.tolist() == [20, 20, 30]
    assert sizes.group[0] == sizes.group[2] != sizes.group[1]
    path.write_text("height,width,num_tokens\n10,20,5\n10,20,5\n")
    assert read_lengths(path).group.tolist() == [0, 1]
    frame = pd.DataFrame({"image_id": [7, 7], "height": [10, 10], "width": [20, 20], "num_tokens": [5, 6]})
    frame.to_parquet(tmp_path / "lengths.parquet")
    sizes = read_lengths(tmp_path / "lengths.parquet")
    assert (sizes.group.tolist(), sizes.num_tokens.tolist()) == ([0, 0], [5, 6])
    path.write_text("height,width,num_tokens,image_id\n10,20,5,\n10,20,5,a\n10,20,5,\n10,20,5,a\n")
    assert read_lengths(path).group.tolist() == [-1, 0, -1, 0]
    frame = pd.DataFrame(
        {"image_id": [None, "a", "a"], "height": [10] * 3, "width": [20] * 3, "num_tokens": [5] * 3}
    )
    frame.index += 7
    frame.to_parquet(tmp_path / "gaps.parquet")
    assert read_lengths(tmp_path / "gaps.parquet").group.tolist() == [-1, 0, 0]
    frame["height"] = [10, -1, 10]
    frame.to_parquet(tmp_path / "gaps.parquet")
    with pytest.raises(DataError, match=r"line 3, column height: .* found '-1'"):
        read_lengths(tmp_path / "gaps.parquet")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("height,width\n1,2\n", "no column num_tokens; found height, width"),
        ("", "found an empty file; expected height,width,num_tokens"),
        (
            "height,width,num_tokens\n1,2,3\n1,x,3\n",
            "line 3, column width: expected a whole number, 0 for no image or text, found 'x'",
        ),
        (
            "height,width,num_tokens\n1.0,2.0,3\n,,3\n",
            "line 3, column height: .* 0 for no image or text, found ''",
        ),
        ("height,width,num_tokens\n1,2,-3\n", "line 2, column num_tokens: .* found '-3'"),
        ("height,width,num_tokens\n1,2\n", "line 2, column num_tokens: .* found ''"),
        ("height,width,num_tokens\n0,0,3\n0,30,3\n", "line 3: height or width is 0; without an image, both"),
        ("height,width,num_tokens\n1,2,99999999999\n", "line 2, column num_tokens: .* found '99999999999'"),
        ("height,width,num_tokens\n1,2,3\n\n1,2,3\n", "line 3, column height: .* found ''"),
        (
            "height,width,num_tokens\n1,2,3,4\n1,2,3,4\n",
            "cannot be read as a table: Length of header or names",
        ),
    ],
)
def test_a_bad_file_is_refused_with_row_and_column(text, named, tmp_path):
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=named):
        read_lengths(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no file .*nowhere\.csv"):
        read_lengths(tmp_path / "nowhere.csv")


def test_prices_of_a_plan_are_further_figures():
    def prices(plan, num_ranks):
        return {"epoch_s": float(len(plan)), "peak_bytes": None if num_ranks == 3 else 2.0**30}

    found = preview(make_sizes(300), ["random", "budget"], ranks=2, prices=prices)
    figures = found.as_dict()["budget"]
    assert figures["epoch_s"] > 0
    assert figures["peak_bytes"] == 2**30
    assert "1.00 GiB" in str(found)
    assert "seconds include" in str(preview(make_sizes(300), ["packed"], prices=prices))
    assert "seconds include" not in str(preview(make_sizes(300), ["packed"]))
    without = preview(make_sizes(300), ["random"], ranks=3, prices=prices)
    assert without.as_dict()["random"]["peak_bytes"] is None
    assert str(without).splitlines()[2].endswith(" -")
