"""The chart of the results."""

from __future__ import annotations

from typing import Any

from peers.report import heading

PANELS = (  # title, measurements with the labels of their bars, whether the axis is logarithmic
    (
        "decoded 224 x 224, images/s",
        {"decoded workers": "2 workers", "decoded threads": "2 threads", "decoded": "1 process"},
        False,
    ),
    (
        "raw samples/s (logarithmic)",
        {"raw images": "images", "raw tiny": "tiny", "shuffled tiny": "tiny, shuffled"},
        True,
    ),
)


def draw(results: dict[str, Any], path: str) -> None:
    """Draw the rates of results to a PNG: medians, with the least and the most of all rounds.

    Args:
        results: of ``running.compare``, or read from its JSON.
        path: the PNG to write.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if any("values" in row["cells"][name] for name in _shown())][::-1]
    figure = Figure(figsize=(12, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    for axis, (title, bars, logarithmic) in zip(axes, PANELS):
        for number, (name, label) in enumerate(bars.items()):
            places = [place for place, row in enumerate(rows) if "values" in row["cells"][name]]
            cells = [rows[place]["cells"][name] for place in places]
            medians = [cell["median"] for cell in cells]
            spread = [
                [median - min(cell["values"]) for median, cell in zip(medians, cells)],
                [max(cell["values"]) - median for median, cell in zip(medians, cells)],
            ]
            heights = [place + 0.27 * (1 - number) for place in places]
            axis.barh(heights, medians, 0.25, xerr=spread, label=label, error_kw={"elinewidth": 0.8})
        axis.set_title(title)
        axis.set_xscale("log" if logarithmic else "linear")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize="small", loc="lower right")
    axes[0].set_yticks(range(len(rows)), [f"{row['name']}  [{row['reads']}]" for row in rows])
    for label, row in zip(axes[0].get_yticklabels(), rows):
        label.set_fontweight("bold" if row["name"].startswith("wds_pipes") else "normal")
    figure.suptitle(heading(results), fontsize="medium")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _shown() -> list[str]:
    return [name for _, bars, _ in PANELS for name in bars]
