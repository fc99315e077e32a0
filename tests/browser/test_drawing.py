"""Runs that another process writes are drawn, chosen, zoomed, read and exported, in a real browser."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import expect

from mmlab.runs.control import Control
from mmlab.runs.events import RunLog, read_events
from mmlab.runs.figures import colours_of
from tests.browser.jupyter import BLUE, ORANGE, Notebook, Panel
from tests.browser.writing_runs import write_replay, write_run, write_turns

WRITER = Path(__file__).with_name("writing_runs.py")
STEPS = 300
_CLOSE_OTHER_TABS = """() => { for (const tab of [...jupyterapp.shell.widgets('main')])
  if (!tab.context) tab.close(); }"""

# of one panel: those of earlier tests are on the same page, and draw as well
_NOTE_TEXTS = """(el) => { window.drawnTexts = []; window.drawnAt = {}; const draw = CanvasRenderingContext2D.prototype.fillText;
  window.noted = el;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
    if (noted.contains(this.canvas)) { drawnTexts.push(text); drawnAt[text] = at[1]; }
    draw.call(this, text, ...at); }; }"""


@pytest.fixture(scope="module")
def runs(notebook: Notebook) -> Path:
    """Two finished runs of 300 steps."""
    folder = notebook.server.files / "pair" / "runs"
    for seed, name in enumerate(("budget", "random")):
        write_run(folder / name, STEPS, seed=seed)
    return folder


@pytest.fixture(scope="module")
def shown(notebook: Notebook, runs: Path) -> Panel:
    """A panel of the two runs."""
    panel = notebook.show("panel = LivePanel('pair')\npanel")
    panel.wait_points(2 * STEPS)
    panel.root.locator(".mmlp-axes").select_option("step")
    panel.root.locator("input[type=range]").fill("0")
    return panel


@pytest.fixture
def panel(shown: Panel) -> Iterator[Panel]:
    """The panel as it was at first."""
    shown.root.scroll_into_view_if_needed()
    yield shown
    shown.root.locator(".mmlp-axes").select_option("step")
    shown.root.locator("input[type=range]").fill("0")
    shown.root.locator(".mmlp-reset").click()
    for button in shown.root.locator(".mmlp-legend button[aria-pressed=false]").all():
        button.click()
    shown.frames()


@pytest.fixture
def writer(notebook: Notebook) -> Iterator[subprocess.Popen[bytes]]:
    """A run of 100,000 steps at 20 Hz in the folder `growing`, written by another process until the test ends."""
    shutil.rmtree(notebook.server.files / "growing", ignore_errors=True)
    command = [sys.executable, str(WRITER), str(notebook.server.files / "growing"), "100000", "20"]
    process = subprocess.Popen(command)
    yield process
    process.kill()
    process.wait()


def test_two_runs_are_overlaid_in_every_plot_that_has_their_numbers(panel: Panel) -> None:
    assert panel.wait_state("done") == "done"
    assert panel.root.locator(".mmlp-legend [data-line]").all_inner_texts() == ["budget", "random"]
    for name in ("samples", "batch", "memory", "use", "wait", "waste", "speed", "loss"):
        colours = panel.colours(name)
        # of a thin, flat line few pixels have its colour in full
        assert colours.get(ORANGE, 0) > 5, f"{name}: the first run is not drawn, {colours}"
        assert colours.get(BLUE, 0) > 5, f"{name}: the second run is not drawn, {colours}"
    caption = panel.plot("memory").locator("figcaption")
    expect(caption).to_contain_text("peak (live tensors)")
    expect(caption).to_contain_text("predicted")
    expect(caption).not_to_contain_text("process RSS")  # beside live tensors a few grey words in the corner


def test_memory_of_a_process_is_no_line_beside_bytes_that_another_run_was_predicted(
    notebook: Notebook,
) -> None:
    for name, predicted in (("usual", {}), ("planned", {"predicted_bytes": 90 * 2**20})):
        with RunLog(notebook.server.files / "process" / name) as log:
            log.write("start", 0, run_name=name, num_steps=3, device="cpu")
            for step in (1, 2, 3):
                memory = {"peak_bytes": 2**30, "memory_source": "process RSS"}
                log.write("step", step, num_samples=8, step_s=0.1, loss=1.0, **memory, **predicted)
            memory = {"memory_bytes": 2**30, "memory_total_bytes": 2**33, "memory_source": "process RSS"}
            log.write("device", -1, device="cpu", **memory)
            log.write("end", 3, status="done", num_steps=3)
    panel = notebook.show("LivePanel('process')")
    panel.wait_points(6)
    caption = panel.plot("memory").locator("figcaption")
    expect(caption).to_contain_text("predicted")
    expect(caption).not_to_contain_text("process RSS")
    panel.frames()
    assert float((panel.plot("memory").get_attribute("data-y") or "").split()[1]) < 2**28


def test_the_legend_hides_and_shows_a_run_and_a_measure(panel: Panel) -> None:
    first = panel.root.get_by_role("button", name="budget", exact=True)
    first.click()
    assert ORANGE not in panel.colours("loss")
    assert panel.data("lines") == "1"
    expect(first).to_have_attribute("aria-pressed", "false")
    first.click()
    assert panel.colours("loss").get(ORANGE, 0) > 20
    before = sum(panel.colours("loss").values())
    held_out = panel.plot("loss").locator("[data-measure='loss.held_out']")
    held_out.click()
    assert sum(panel.colours("loss").values()) < before
    held_out.click()


def test_the_x_axis_counts_steps_both_kinds_of_seconds_samples_and_padded_tokens(
    panel: Panel, runs: Path
) -> None:
    steps = [event.values for event in events(runs / "budget", "step")]
    wanted = {
        "step": STEPS,
        "training": max(
            sum(e.values["step_s"] for e in events(runs / name, "step")) for name in ("budget", "random")
        ),
        "second": STEPS / 10,
        "sample": max(samples_of(runs / name) for name in ("budget", "random")),
        "token": max(tokens_of(runs / name) for name in ("budget", "random")),
    }
    assert len(steps) == STEPS
    for axis, last in wanted.items():
        panel.root.locator(".mmlp-axes").select_option(axis)
        assert panel.x_range()[1] == pytest.approx(last, rel=1e-3), axis


def test_smoothing_keeps_the_raw_line_faint_behind_a_calmer_one(panel: Panel) -> None:
    raw = panel.colours("waste")
    panel.root.locator("input[type=range]").fill("0.95")
    smooth = panel.colours("waste")
    assert 0 < smooth[ORANGE] < raw[ORANGE] / 2


def test_dragging_zooms_every_plot_and_a_double_click_or_a_key_resets(panel: Panel) -> None:
    whole = panel.x_range()
    area = panel.plot("speed").locator(".mmlp-over")
    box = area.bounding_box()
    assert box
    middle = box["y"] + box["height"] / 2
    panel.page.mouse.move(box["x"] + box["width"] * 0.4, middle)
    panel.page.mouse.down()
    panel.page.mouse.move(box["x"] + box["width"] * 0.6, middle, steps=4)
    panel.page.mouse.up()
    low, high = panel.x_range()
    assert whole[0] < low < high < whole[1]
    assert high - low == pytest.approx(0.2 * box["width"] / (box["width"] - 60) * STEPS, rel=0.05)
    area.dblclick()
    assert panel.x_range() == whole
    panel.root.focus()
    panel.page.keyboard.press("+")
    low, high = panel.x_range()
    assert high - low == pytest.approx((whole[1] - whole[0]) / 2)
    panel.page.keyboard.press("0")
    assert panel.x_range() == whole


def test_the_wheel_a_window_and_a_log_scale_change_what_is_seen(panel: Panel) -> None:
    whole = panel.x_range()
    panel.root.focus()
    panel.plot("loss").locator(".mmlp-over").hover()
    panel.page.mouse.wheel(0, -100)
    panel.page.wait_for_function(
        "([el, x]) => el.dataset.x !== x", arg=[panel.root.element_handle(), "1 300"]
    )
    low, high = panel.x_range()
    assert high - low == pytest.approx(0.8 * (whole[1] - whole[0]), rel=0.01)
    panel.root.locator(".mmlp-last").select_option("50")
    assert panel.x_range() == (STEPS - 49, STEPS)
    panel.root.locator(".mmlp-reset").click()
    assert panel.x_range() == whole
    linear = panel.plot("loss").get_attribute("data-y")
    log = panel.plot("loss").get_by_role("button", name="log")
    log.click()
    panel.frames()
    expect(log).to_have_attribute("aria-pressed", "true")
    assert float((panel.plot("loss").get_attribute("data-y") or "").split()[0]) > 0
    assert panel.colours("loss").get(ORANGE, 0) > 20
    panel.root.focus()
    panel.page.keyboard.press("l")
    panel.frames()
    assert panel.plot("loss").get_attribute("data-y") == linear


def test_the_last_steps_of_a_run_that_ended_earlier_are_shown_and_a_long_title_is_whole(
    notebook: Notebook,
) -> None:
    folders = [f"a_long_name_of_a_folder/{name}" for name in ("budget", "random")]
    for folder, num_steps in zip(folders, (STEPS, 100), strict=True):
        write_run(notebook.server.files / folder, num_steps)
    panel = notebook.show(f"LivePanel({folders})")
    panel.wait_points(STEPS + 100)
    panel.root.locator(".mmlp-axes").select_option("step")
    panel.root.locator(".mmlp-last").select_option("50")
    panel.frames()
    assert panel.x_range() == (51, STEPS)
    assert panel.root.locator(".mmlp-title").evaluate("title => title.scrollWidth <= title.clientWidth")
    panel.root.evaluate(_NOTE_TEXTS)
    panel.root.locator(".mmlp-axes").select_option("token")
    panel.root.locator(".mmlp-reset").click()
    panel.frames()
    drawn = panel.page.evaluate("() => window.drawnTexts")
    assert "0" in drawn
    assert not {"0 k", "0 M"} & {*drawn}


@pytest.mark.parametrize(("first", "others"), [(40, 2), (2, 40)])
def test_a_limit_beyond_the_plot_is_written_where_no_line_is(
    notebook: Notebook, first: int, others: int
) -> None:
    folder = notebook.server.files / f"limit-{first}"
    with RunLog(folder) as log:
        for step in range(1, 31):
            peak = (first if step == 1 else others) * 2**20
            log.write("step", step, num_samples=8, peak_bytes=peak, limit_bytes=2**30)
    panel = notebook.show(f"LivePanel({folder.name!r})")
    panel.wait_points(30)
    panel.root.evaluate(_NOTE_TEXTS)
    panel.root.locator(".mmlp-axes").select_option("step")
    panel.frames()
    at, height = panel.page.evaluate("() => drawnAt['limit 1 GiB ↑']"), panel.plot("memory").locator("canvas")
    assert (at < height.first.bounding_box()["height"] / 2) == (first > others)
    measures = panel.plot("memory").locator("[data-measure]")
    assert [each.locator("line").count() for each in measures.all()] == [1, 0], (
        "a limit that is no line has no dashes"
    )


def test_the_cursor_reads_the_same_step_in_every_plot(panel: Panel, runs: Path) -> None:
    box = panel.plot("loss").locator(".mmlp-over").bounding_box()
    assert box
    panel.page.mouse.move(box["x"] + 52 + (box["width"] - 60) / 2, box["y"] + 50)
    panel.frames()
    at = float(panel.root.locator(".mmlp-where").inner_text().removeprefix("step "))
    assert at == pytest.approx(STEPS / 2, abs=2)
    step = events(runs / "budget", "step")[round(at) - 1].values
    for plot, text in {
        "samples": f"budget: {step['num_samples']}",
        "speed": f"budget: {step['samples_per_s']:.4g}",
        "waste": f"budget: {100 * step['combined_waste']:.1f} %",
        "loss": f"budget: training {step['loss']:.4g}",
    }.items():
        expect(panel.plot(plot).locator(".mmlp-read")).to_contain_text(text)
    assert panel.root.locator(".mmlp-read:visible").evaluate_all(_COVERED) == 0
    panel.page.mouse.move(2, 2)
    panel.frames()
    assert not panel.root.locator(".mmlp-read:visible").count()


_COVERED = """reads => { const boxes = reads.map(each => each.getBoundingClientRect());
  return boxes.filter((a, i) => boxes.some((b, k) => k > i && a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 1 && b.top < a.bottom - 1)).length; }"""


def test_the_csv_has_every_number_of_every_run(panel: Panel, runs: Path) -> None:
    panel.root.get_by_role(
        "button", name="budget", exact=True
    ).click()  # hidden and zoomed: in the file all the same
    panel.root.focus()
    panel.page.keyboard.press("+")
    with panel.page.expect_download() as download:
        panel.root.locator(".mmlp-csv").click()
    assert download.value.suggested_filename == "pair.csv"
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    for name in ("budget", "random"):
        for kind, keys in {
            "step": ("num_samples", "loss", "combined_waste", "peak_bytes", "samples_per_s"),
            "device": ("memory_bytes", "utilization_ratio"),
            "eval": ("loss",),
        }.items():
            rows = [row for row in table if (row["run"], row["kind"]) == (name, kind)]
            written = events(runs / name, kind)
            assert len(rows) == len(written)
            for key in keys:
                found = [float(row[key]) for row in rows]
                assert found == pytest.approx([event.values[key] for event in written], rel=1e-6), key
        last = [row for row in table if (row["run"], row["kind"]) == (name, "step")][-1]
        assert float(last["samples_seen"]) == samples_of(runs / name)
        assert float(last["padded_tokens_seen"]) == tokens_of(runs / name)


def test_the_png_shows_the_plots(panel: Panel) -> None:
    with panel.page.expect_download() as download:
        panel.root.locator(".mmlp-png").click()
    with Image.open(download.value.path()) as picture:
        assert picture.width > 1000
        colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
    for name in (ORANGE, BLUE):
        assert colours.get(tuple(bytes.fromhex(name[1:])), 0) > 500, name
    assert len(colours) > 20


def test_a_second_view_shows_the_same_without_the_kernel_sending_anew(
    notebook: Notebook, panel: Panel
) -> None:
    second = notebook.panel(notebook.run("panel"))
    assert second.wait_points(2 * STEPS) == 2 * STEPS
    assert second.colours("loss").get(ORANGE, 0) > 20
    second.root.get_by_role("button", name="budget", exact=True).click()
    assert ORANGE not in second.colours("loss")
    assert panel.colours("loss").get(ORANGE, 0) > 20, "what is hidden in one view is shown in the other"
    notebook.do("notebook:create-output-view")
    beside = notebook.page.locator(".jp-LinkedOutputView")
    third = Panel(beside.locator(".mmlp"))
    assert third.wait_points(2 * STEPS) == 2 * STEPS
    assert third.colours("loss").get(ORANGE, 0) > 20
    notebook.page.evaluate(_CLOSE_OTHER_TABS)
    expect(beside).to_have_count(0)
    second.root.scroll_into_view_if_needed()
    assert second.colours("loss").get(BLUE, 0) > 20, "the views that stay go on"


def test_the_dark_theme_is_followed(notebook: Notebook, panel: Panel) -> None:
    light = panel.root.evaluate("el => getComputedStyle(el).backgroundColor")
    notebook.do("apputils:change-theme", theme="JupyterLab Dark")
    panel.page.wait_for_function(
        "([el, light]) => getComputedStyle(el).backgroundColor !== light",
        arg=[panel.root.element_handle(), light],
    )
    panel.page.wait_for_function(
        """el => { const c = el.querySelector("[data-plot='loss'] canvas"), g = c.getContext('2d');
            const d = g.getImageData(0, 0, c.width, c.height).data;
            for (let i = 0; i < d.length; i += 4) if (d[i] === 76 && d[i+1] === 155 && d[i+2] === 232) return true;
            return false }""",
        arg=panel.root.element_handle(),
    )  # the dark theme's blue
    notebook.do("apputils:change-theme", theme="JupyterLab Light")
    panel.page.wait_for_function(
        "([el, light]) => getComputedStyle(el).backgroundColor === light",
        arg=[panel.root.element_handle(), light],
    )
    panel.page.wait_for_function("() => document.body.dataset.jpThemeLight === 'true'")


def test_keys_on_the_panel_leave_the_notebooks_cells_alone(notebook: Notebook, panel: Panel) -> None:
    before = notebook.num_cells
    for target in (panel.root, panel.root.locator(".mmlp-csv"), panel.root.locator(".mmlp-axes")):
        target.focus()
        for key in ("b", "a", "d", "d", "x", "m", "Shift+M", "z"):
            panel.page.keyboard.press(key)
    panel.frames()
    assert notebook.num_cells == before
    assert panel.root.evaluate("el => el.contains(document.activeElement)"), "the panel lost the focus"


def test_the_keyboard_reaches_runs_axes_cursor_and_help(panel: Panel) -> None:
    panel.root.focus()
    press = panel.page.keyboard.press
    press("1")
    assert ORANGE not in panel.colours("loss")
    press("1")
    press("a")
    press("a")
    assert panel.x_range()[1] == pytest.approx(STEPS / 10, rel=1e-3)
    press("ArrowRight")
    expect(panel.root.locator(".mmlp-where")).to_contain_text("second")
    press("?")
    expect(panel.root.locator(".mmlp-help")).to_be_visible()
    press("?")
    expect(panel.root.locator(".mmlp-help")).to_be_hidden()


def test_legend_and_zoom_answer_while_a_cell_blocks_the_kernel(
    notebook: Notebook, writer: subprocess.Popen[bytes]
) -> None:
    panel = notebook.show("LivePanel('growing')")
    panel.wait_points(5)
    blocking = notebook.run(
        "import os, time\nwhile not os.path.exists('go_on'): time.sleep(0.05)", wait=False
    )
    expect(blocking.locator(".jp-InputPrompt")).to_have_text("[*]:")
    panel.root.scroll_into_view_if_needed()
    panel.root.get_by_role("button", name="growing", exact=True).click()
    assert ORANGE not in panel.colours("loss")
    panel.root.get_by_role("button", name="growing", exact=True).click()
    panel.root.focus()
    whole = panel.x_range()
    panel.page.keyboard.press("+")
    assert panel.x_range()[0] > whole[0]
    panel.page.keyboard.press("0")
    reached = int(panel.data("points"))
    panel.wait_points(
        reached + 30
    )  # and data come on: the kernel cannot take the page's answers, and sends all the same
    panel.wait_state("running")
    (notebook.server.files / "go_on").touch()
    notebook.ready()


def test_a_page_that_is_loaded_anew_shows_the_run_from_its_beginning(
    notebook: Notebook, writer: subprocess.Popen[bytes]
) -> None:
    reached = notebook.show("LivePanel('growing')").wait_points(10)
    number = notebook.num_cells - 1
    notebook.reload()
    panel = notebook.panel(notebook.cell(number))
    panel.wait_points(reached + 10)
    assert panel.wait_state("running") == "running"
    assert panel.x_range()[0] <= 1
    with panel.page.expect_download() as download:
        panel.root.locator(".mmlp-csv").click()
    table = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    steps = [int(row["step"]) for row in table if row["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing, or comes twice"
    assert len(steps) >= reached + 10


def test_no_step_is_lost_of_those_that_come_60_times_a_second(notebook: Notebook) -> None:
    folder = notebook.server.files / "fast"
    process = subprocess.Popen([sys.executable, str(WRITER), str(folder), "180", "60", "1"])
    panel = notebook.show("LivePanel('fast')")
    panel.wait_state("done")
    assert process.wait() == 0
    assert panel.wait_points(180) == 180
    with panel.page.expect_download() as download:
        panel.root.locator(".mmlp-csv").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text())))
    losses = [float(row["loss"]) for row in rows if row["kind"] == "step"]
    assert losses == pytest.approx([event.values["loss"] for event in events(folder, "step")], rel=1e-6)


def test_rates_are_samples_over_time_and_pauses_are_in_no_figure(notebook: Notebook) -> None:
    write_turns(notebook.server.files / "turns", {"random": 20.0, "fastest": 25.0})
    panel = notebook.show("LivePanel('turns')")
    panel.wait_points(66)
    expect(panel.root.locator(".mmlp-verdict")).to_have_text(
        "fastest: +25 % samples/s over random (+25 to +25 % in 3 paired epochs); "
        "an epoch of 11 steps is too short to judge speed; padding 50 → 40 %"
    )
    expect(panel.root.locator(".mmlp-axes")).to_have_value("sample")
    expect(panel.root.locator("input[type=range]")).to_have_value("0.9")
    names = panel.root.locator(".mmlp-plot").evaluate_all("plots => plots.map(plot => plot.dataset.plot)")
    assert names[:2] == ["loss", "speed"]
    box = panel.root.bounding_box()
    assert box
    assert box["height"] <= 600
    panel.root.locator(".mmlp-axes").select_option("step")
    for name, speed in (("random", 20), ("fastest", 25)):
        tile = panel.root.locator(f"[data-tile={name}]")
        rate = (8 * speed + 1) / (8 + 0.001)  # of each epoch, without its first two steps
        expect(tile).to_contain_text(f"samples/s{rate:.4g}waste")
        expect(tile).to_contain_text("CPU busy80 %")
    assert float((panel.plot("speed").get_attribute("data-y") or "").split()[1]) < 30, "1000 is of one sample"
    expect(panel.plot("speed")).to_contain_text("nothing to learn")
    low, high = panel.x_range()
    ends = [panel.shade("waste", (step - low) / (high - low))[3] > 0 for step in (6, 11, 22, 27)]
    assert ends == [False, True, True, False], "the end of each epoch of 11 steps is marked"
    panel.root.locator("input[type=range]").fill("0.9")
    area = panel.plot("speed").locator(".mmlp-over")
    box = area.bounding_box()
    assert box
    area.hover(position={"x": box["width"] - 9, "y": 40})
    weights = 0.9 ** np.arange(18)  # of the steps since the pause
    samples, seconds = (np.tile([last, *[each] * 10], 3)[:18] for last, each in ((1, 20), (0.001, 1)))
    rate = (weights @ samples) / (weights @ seconds)
    expect(panel.plot("speed").locator(".mmlp-read")).to_contain_text(f"random: {rate:.4g}, nothing to learn")
    panel.root.locator("input[type=range]").fill("0")
    panel.root.locator(".mmlp-axes").select_option("second")
    low, high = panel.x_range()
    for plot in ("waste", "use"):
        for start, end in (
            (41, 44),
            (47, 48.5),
        ):  # of random: paused from 45 to 50 s, its next turn begins at 80 s
            part = ((start - low) / (high - low), (end - low) / (high - low))
            assert (panel.colours(plot, part=part).get(BLUE, 0) > 0) == (start == 41), (plot, start)
        part = ((60 - low) / (high - low), (75 - low) / (high - low))
        assert not panel.colours(plot, part=part).get(BLUE, 0), "a line crosses the other scheduler's turn"
        shades = [panel.shade(plot, (second - low) / (high - low)) for second in (35, 43, 47, 63)]
        assert shades[0][3] == 0, "nobody trains from 30 to 40 s"
        assert shades[1][2] > shades[1][0], "random's turn is shaded in its blue"
        assert max(shades[2][:3]) - min(shades[2][:3]) < 20 < shades[2][3], "the pause is grey"
        assert shades[3][1] > shades[3][0], "the other scheduler's turn is shaded in its green"


def test_before_the_first_step_the_panel_says_what_the_run_does(notebook: Notebook) -> None:
    folder = notebook.server.files / "phases"
    with RunLog(folder / "runs" / "random") as log:
        log.write("start", 0, run_name="random", num_steps=4)
        Control(folder).report_phase("planning")
        panel = notebook.show("LivePanel('phases')")
        expect(panel.root.locator(".mmlp-phase")).to_have_text("planning …")
        expect(panel.root.locator(".mmlp-grid")).to_be_hidden()
        write_run(folder / "earlier" / "previous-1" / "runs" / "random", 1)
        panel = notebook.show("LivePanel(['phases', 'phases/earlier/previous-1'])")
        expect(panel.root.locator(".mmlp-grid")).to_be_visible()
        expect(panel.root.locator(".mmlp-phase")).to_have_text("planning …")
        for step in (1, 2, 3, 2):  # a resumed run repeats the second step
            log.write("step", step, loss=1.0, num_samples=100, step_s=0.1)
        panel.wait_points(4)
        expect(panel.root.locator(".mmlp-phase")).to_be_hidden()
        assert panel.x_range()[1] == 300


def test_of_an_earlier_run_no_step_counts(notebook: Notebook) -> None:
    folder = notebook.server.files / "again"
    for name in ("previous-1", "."):
        write_run(folder / name / "runs" / "random", 30, seed=len(name))
    panel = notebook.show("LivePanel(['again', 'again/previous-1'])")
    names = panel.root.locator(".mmlp-legend [data-line]")
    expect(names).to_have_text(["previous-1/random", "random"])
    expect(panel.root.locator("[data-tile=random]")).to_contain_text("over previous-1")
    assert panel.wait_points(30) == 30


def test_every_gpu_has_gauges_and_lines_of_its_own(notebook: Notebook) -> None:
    write_replay(notebook.server.files / "replay")
    panel = notebook.show("LivePanel('replay')")
    panel.wait_points(24)
    gauges = panel.root.locator(".mmlp-gauge")
    expect(gauges).to_have_count(2)
    expect(gauges.nth(0)).to_contain_text("rank 0")
    expect(gauges.nth(1)).to_contain_text("75.0 % busy")
    expect(gauges.nth(1)).to_contain_text("61 GiB of 80 GiB")
    expect(panel.plot("use").locator("figcaption")).to_contain_text("NVML")
    for measure in ("in use (NVML)", "peak (torch allocator)", "reserved", "allocated", "predicted", "limit"):
        expect(panel.plot("memory").locator("figcaption")).to_contain_text(measure)


def test_a_long_name_stays_in_its_place(notebook: Notebook) -> None:
    for name in ("n" * 200, "random"):
        write_run(notebook.server.files / "long" / name, 60)
    panel = notebook.show("LivePanel('long')")
    panel.wait_points(120)
    expect(panel.root.locator(".mmlp-verdict")).to_contain_text("random")
    cut = "(el) => el.getBoundingClientRect().right <= el.closest('.mmlp').getBoundingClientRect().right"
    for part in (".mmlp-clear", ".mmlp-tile > b", ".mmlp-verdict"):
        assert all(found.evaluate(cut) for found in panel.root.locator(part).all())
    wide = "(el) => el.scrollWidth > el.clientWidth"
    assert not panel.root.locator(".mmlp-verdict").evaluate(wide)
    assert not panel.root.locator(".mmlp-tile").first.evaluate(wide)


def test_a_saved_notebook_keeps_table_and_picture_of_what_has_ended(notebook: Notebook, runs: Path) -> None:
    panel = notebook.show(f"kept = LivePanel({str(runs)!r})\nkept")
    number = notebook.num_cells - 1
    panel.wait_points(2 * STEPS)
    saved = notebook.cell(number).locator(".mmlab-saved")
    expect(saved.locator("img")).to_have_count(1)
    expect(saved).to_be_hidden()
    notebook.run("kept.close()")
    expect(saved).to_be_visible()  # as where the notebook is opened later
    expect(saved.locator("table")).to_contain_text("samples/s")
    for name in ("random", "budget"):
        expect(saved.get_by_role("cell", name=name)).to_be_visible()
    notebook.do("docmanager:save")
    notebook.page.wait_for_function("() => !jupyterapp.shell.currentWidget.context.model.dirty")
    import nbformat

    written = nbformat.read(notebook.server.files / notebook.name, as_version=4).cells[number].outputs
    assert any("data:image/png" in output.data.get("text/html", "") for output in written)
    gone = "bundle = {'application/vnd.jupyter.widget-view+json': {'model_id': 'gone', 'version_major': 2, 'version_minor': 0}}"
    shown = "from IPython.display import display\nfrom mmlab.lab.saved import SavedView\nsaved = SavedView()"
    cell = notebook.run(
        f"{gone}\n{shown}\nsaved.take_place()\nsaved.show('a table')\ndisplay(bundle, raw=True)"
    )
    expect(cell.locator(".mmlab-saved")).to_have_text("a table")
    expect(cell.get_by_text("Error displaying widget")).to_be_hidden()


def test_a_run_is_cleared_and_comes_again_when_it_is_written_anew(notebook: Notebook) -> None:
    folder = notebook.server.files / "cleared" / "runs"
    write_run(folder / "fastest", 20)
    write_run(folder / "mine", 20)
    panel = notebook.show("LivePanel('cleared')")
    panel.wait_points(40)
    drawn = panel.root.locator(".mmlp-legend line").evaluate_all(
        "lines => lines.map(line => line.getAttribute('stroke'))"
    )
    assert drawn == [*colours_of(["fastest", "mine"]).values()]
    panel.root.get_by_role("button", name="clear mine").click()
    expect(panel.root.locator(".mmlp-legend [data-line]")).to_have_count(1)
    expect(panel.root).to_have_attribute("data-points", "20")
    assert (folder / "mine" / "events-rank0.jsonl").exists()
    (folder / "mine" / "events-rank0.jsonl").unlink()
    write_run(folder / "mine", 30)
    assert panel.wait_points(50) == 50
    expect(panel.root.locator(".mmlp-legend [data-line]")).to_have_count(2)


def test_a_file_that_cannot_be_read_is_said_with_a_traceback_to_copy(notebook: Notebook) -> None:
    folder = notebook.server.files / "damaged"
    write_run(folder, 10)
    with (folder / "events-rank0.jsonl").open("a") as file:
        file.write("this is no event\n")
    panel = notebook.show("LivePanel('damaged')")
    error = panel.root.locator(".mmlp-error[data-where=reading]")
    expect(error).to_contain_text("is not an event")
    error.locator(".mmlp-copy").click()
    expect(error.locator(".mmlp-copy")).to_have_text("Copied")
    copied = panel.page.evaluate("() => navigator.clipboard.readText()")
    assert copied.startswith("Traceback")
    assert "DataError" in copied


def events(folder: Path, kind: str) -> list:
    found, _ = read_events(folder / "events-rank0.jsonl")
    return [event for event in found if event.kind == kind]


def samples_of(folder: Path) -> int:
    return sum(event.values["num_samples"] for event in events(folder, "step"))


def tokens_of(folder: Path) -> int:
    return sum(
        event.values["padded_tokens"] + event.values["padded_patches"] for event in events(folder, "step")
    )
