"""A data set at a glance: image sizes, aspects, text lengths, and the padding that each scheduler would
cause.

Reads metadata only; planning a hundred thousand pairs takes about a second.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mmlab.comparison.charts import WASTES, draw_waste
from mmlab.errors import DataError
from mmlab.schedule.preview import Preview, preview
from mmlab.types import ImagePolicy

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from mmlab.data.records import Records

SHOWN_SCHEDULERS = ("random", "sorted", "bucket", "budget")
_LABELS = "labels: {} values; kept, and used by models that take labels, not by mmlab's own objectives"
_QUANTILES = {"min": 0.0, "p5": 0.05, "median": 0.5, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """What `overview` found."""

    records: Records
    policy: ImagePolicy
    preview: Preview

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """The distributions shown: sides in pixels, aspect (width / height), tokens; samples without them left out."""
        images = self.records.height > 0
        height, width = self.records.height[images], self.records.width[images]
        columns: dict[str, NDArray[Any]] = {
            "height": height,
            "width": width,
            "aspect": width / np.maximum(height, 1),
            "num_tokens": self.records.num_tokens[self.records.num_tokens > 0],
        }
        return {name: column for name, column in columns.items() if len(column)}

    @property
    def table(self) -> pd.DataFrame:
        """Quantiles of every distribution."""
        import pandas as pd

        rows = {name: np.quantile(column, [*_QUANTILES.values()]) for name, column in self.columns.items()}
        return pd.DataFrame.from_dict(rows, orient="index", columns=[*_QUANTILES]).round(2)

    def as_dict(self) -> dict[str, Any]:
        """What `mmlab data inspect --json` prints."""
        records = self.records
        splits = Counter(filter(None, records.splits or ()))
        return {
            "source": records.source,
            "num_records": len(records),
            "num_images": len(np.unique(records.group[records.height > 0])),
            "splits": dict(sorted(splits.items())),
            "num_labels": 0 if records.labels is None else len(np.unique(records.labels)),
            "image_policy": str(self.policy),
            "distributions": self.table.to_dict(orient="index"),
            "waste": self.preview.as_dict(),
            "bad_rows": [str(row) for row in records.bad_rows],
        }

    def figure(self) -> Figure:
        """Four panels: sizes, aspects, text lengths, waste."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(12, 3.4), layout="constrained")
        sizes, aspects, lengths, waste = figure.subplots(1, 4)
        columns = self.columns
        if "width" in columns:
            sizes.plot(columns["width"], columns["height"], ".", ms=3, alpha=0.3, color="#0072B2")
            aspects.hist(np.log2(columns["aspect"]), bins=40, color="#009E73")
        sizes.set(title="Image sizes", xlabel="width, pixels", ylabel="height, pixels")
        aspects.set(title="Aspect", xlabel="log2(width / height)", ylabel="records")
        if "num_tokens" in columns:
            lengths.hist(columns["num_tokens"], bins=40, color="#E69F00")
        lengths.set(title="Text lengths", xlabel="tokens", ylabel="records")
        draw_waste(waste, self.preview.table[[*WASTES]])
        waste.set(title=f"Padding waste, {self.policy}", ylabel="%")
        return figure

    def __str__(self) -> str:
        found, records, bad_rows = self.as_dict(), self.records, self.records.bad_rows
        splits = ", ".join(f"{name} {count}" for name, count in found["splits"].items())
        lines = [
            f"{found['source']}: {found['num_records']} records of {found['num_images']} images"
            + (f" ({splits})" if splits else ""),
            *([] if records.labels is None else [_LABELS.format(found["num_labels"])]),
            "",
            self.table.to_string(),
            "",
            f"images: {self.policy}; {self.preview}",
        ]
        if bad_rows:
            lines += [f"left out {len(bad_rows)} bad rows:", *map(str, bad_rows)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"{self.table.to_html(border=0)}<p>images: {self.policy}</p>{self.preview._repr_html_()}"


def overview(records: Records, policy: ImagePolicy) -> Overview:
    """Measure a data set from its metadata.

    Raises:
        DataError: no records at all.
    """
    if not len(records):
        raise DataError(f"{records.source or 'the data set'} has no records to look at")
    found = preview(records.sizes(policy), SHOWN_SCHEDULERS, allow_collisions=False)
    return Overview(records=records, policy=policy, preview=found)
