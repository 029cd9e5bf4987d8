"""The results as JSON and as a table in Markdown, and the ratios that they are judged by."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from typing import Any

from peers.rows import MEASUREMENTS, MEMORY, STATE
from wds_pipes.core.words import plural

RATIOS = (  # what, over what, of which measurement
    ("wds_pipes", "limit: the same function", "decoded workers"),
    ("wds_pipes", "limit: the same function", "decoded threads"),
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded workers"),
    ("wds_pipes, size=(224, 224)", "limit: decode + resize", "decoded threads"),
    ("wds_pipes", "webdataset", "decoded workers"),
    ("wds_pipes, size=(224, 224)", 'webdataset, .decode("pil")', "decoded workers"),
    ("wds_pipes", "limit: header walk", "raw tiny"),
    ("wds_pipes", "webdataset", "raw tiny"),
    ("wds_pipes", "webdataset", "raw images"),
    ("wds_pipes", "webdataset", "shuffled tiny"),
)


def write(results: dict[str, Any], directory: str) -> list[str]:
    """Write ``peers.json``, ``peers.md`` and, where matplotlib is installed, ``peers.png``.

    Returns:
        The paths of the files that were written.
    """
    os.makedirs(directory, exist_ok=True)
    data, page, picture = (os.path.join(directory, f"peers.{ending}") for ending in ("json", "md", "png"))
    with open(data, "w") as file:
        json.dump(results, file, indent=1)
        file.write("\n")
    try:
        from peers.chart import draw

        draw(results, picture)
    except ModuleNotFoundError:
        picture = ""
    with open(page, "w") as file:
        file.write(table(results, os.path.basename(picture)))
    return [path for path in (data, page, picture) if path]


def table(results: dict[str, Any], picture: str = "") -> str:
    """Return results as a page in Markdown.

    Args:
        results: of ``running.compare``.
        picture: the name of the chart next to the page, if there is one.
    """
    reasons: list[str] = []
    titles = ["", "reads", *(each.title for each in MEASUREMENTS[:-1])]
    titles += ["peak memory, 2 workers", "first batch after a resume", "state", "resumed"]
    lines = ["# Against other loaders", "", f"{heading(results)}.", "", _explained(results), ""]
    if picture:
        lines += [f"![The rates of the table]({picture})", ""]
    lines += [_line(titles), _line(["---"] * 2 + ["--:"] * (len(titles) - 3) + ["---"])]
    for row in results["rows"]:
        cells = row["cells"]
        shown = [_shown(cells[each.name], reasons) for each in MEASUREMENTS]
        resumed = cells["resume"]
        memory = cells[MEMORY].get("peak_bytes")
        shown[-1:] = [
            f"{memory / 1e6:,.0f} MB" if memory else "",
            _shown(resumed, reasons, "s"),
            _shown(cells[STATE.name], reasons, "bytes"),
            resumed.get("outcome", ""),
        ]
        lines.append(_line([row["name"], row["reads"], *shown]))
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    found = ratios(results)
    if found:
        lines += ["", "## Ratios", "", "Medians of the ratios in each round.", ""]
        lines += [_line(["", "of", "ratio"]), _line(["---", "---", "--:"])]
        lines += [_line([f"{one} / {other}", what, f"{value:.2f}"]) for (one, other, what), value in found.items()]
    versions = dict(sorted(pair for row in results["rows"] for pair in row["versions"].items()))
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    return "\n".join(lines) + "\n"


def heading(results: dict[str, Any]) -> str:
    """Return when and on what machine the results were measured."""
    machine = results["machine"]
    return (
        f"Measured on {results['date']} on {machine['cores']} cores ({machine['processor']}), Python "
        f"{machine['python']}, wds_pipes {results['version']}"
    )


def ratios(results: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return the medians of the ratios of RATIOS, of rounds that followed each other."""
    cells = {row["name"]: row["cells"] for row in results["rows"]}
    found = {}
    for one, other, what in RATIOS:
        pair = [cells.get(name, {}).get(what, {}).get("values") for name in (one, other)]
        if pair[0] and pair[1]:
            found[one, other, what] = statistics.median(mine / theirs for mine, theirs in zip(*pair))
    own, theirs = (cells.get(name, {}).get(MEMORY, {}).get("peak_bytes") for name in ("wds_pipes", "webdataset"))
    if own and theirs:
        found["wds_pipes", "webdataset", "peak memory"] = own / theirs
    return found


def _explained(results: dict[str, Any]) -> str:
    images, tiny = results["data"]["images"], results["data"]["tiny"]
    load = results["machine"]["load_before"]
    busy = "" if load is None else f" The load of the machine was {load:.1f} before the run."
    return (
        "`python tests/bench/peers` writes this page. Samples per second, medians of "
        f"{plural(results['plan']['rounds'], 'round')} in which the rows take turns, with half of the distance "
        f"between the least and the most.{busy}\n\n"
        f"Images: {images['samples']:,} samples with a JPEG of 500 x 375 pixels, "
        f"{images['bytes'] // images['samples']:,} bytes each. Tiny: {tiny['samples']:,} samples of 200 bytes. "
        "All files are in the memory of the machine. Decoded: batches of 64 images of 224 x 224 pixels, in the middle "
        "of an epoch, by the same function in all rows whose names do not say otherwise; DALI decodes by itself. The "
        "limits decode images that are in memory: by that function, and by the quickest way that is known, which is "
        "that of `size=`. DALI and the directory of files read no JSON. Each measurement is a process of its own.\n\n"
        "A row that does not read tar reads what the library's own writer has made of the shards. Where it is ahead, "
        "that is the reason: the members of the tars were found and their fields grouped before. The parser of spdl "
        "is C++ and verifies no checksums: it leaves out a damaged member, and ends at a cut, without an error."
    )


def _shown(cell: dict[str, Any], reasons: list[str], unit: str = "") -> str:
    """Return a cell of the table; what has no figure refers to its reason."""
    if "reason" in cell:
        if cell["reason"] not in reasons:
            reasons.append(cell["reason"])
        return f"({reasons.index(cell['reason']) + 1})"
    value, values = cell["median"], cell["values"]
    if unit == "bytes":
        return f"{value:,.0f} B" if value < 10_000 else f"{value / 1e3:,.0f} kB"
    figure = f"{value:.3f} s" if unit == "s" else f"{value:,.0f}"
    return f"{figure} ±{(max(values) - min(values)) / 2 / value:.0%}" if len(values) > 1 else figure


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
