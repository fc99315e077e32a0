"""The loading panel measures a real load with each setting, and keeps every one as a row."""

from __future__ import annotations

from pathlib import Path

from mmlab.data.dataset import MultimodalDataset
from mmlab.data.records import Records
from mmlab.lab.loading_panel import LoadingPanel
from mmlab.types import square


def test_every_setting_is_measured_and_stays_as_a_row(records: Records, tmp_path: Path) -> None:
    dataset = MultimodalDataset(records, image_policy=square(64))
    panel = LoadingPanel(dataset, tmp_path / "cache", batch_size=8)
    panel._save()
    assert panel.picture.layout.display == "none", "a browser draws a broken image"
    assert "<img" not in panel._saved._bundle["text/html"]
    first = panel.measure()
    assert panel.picture.layout.display is None
    assert first.cache_hit_ratio == 0
    assert panel.progress.value == panel.progress.max
    panel.workers.value, panel.step_ms.value = 2, 20
    panel.measure()
    panel.cached.value = True
    picture = panel.picture.value
    assert panel.measure().cache_hit_ratio == 1
    names = ["no workers", "threads: 2, 4 ahead, 20 ms a step", "threads: 2, 4 ahead, cached, 20 ms a step"]
    assert list(panel.reports) == names
    assert all(name in panel.table.value and name in panel.text for name in names)
    assert panel.picture.value != picture
    assert dataset.cache is None, "the caller's data set is left as it was"


def test_a_failed_measurement_is_said_and_the_button_works_again(records: Records, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the cache would be")
    panel = LoadingPanel(MultimodalDataset(records, image_policy=square(64)), tmp_path / "cache")
    panel.cached.value = True
    panel._run()
    assert "Error" in panel.message.value
    assert not panel.button.disabled
    assert not panel.reports
