"""The results as JSON, as a table in Markdown and as charts, and the ratios that have bars."""

import json
import statistics

from peers.rows import COLUMNS, MEMORY, RATIOS, STATE
from wds_pipes.core.words import plural

ELASTIC = "\n## On other ranks\n"
PANELS = (  # of the chart: title, measurements with the labels of their bars, whether the axis is logarithmic
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
SHORT_PANELS = {  # what is measured, and the row that is the limit
    "Small samples, shuffled, one process": ("shuffled tiny", "limit: header walk"),
    "Images decoded to 224 x 224, two workers": ("decoded workers", "limit: decode + resize"),
}
OTHERS = ' opacity="0.45"'  # the bars of other loaders
SHORT_ROWS = ("wds_pipes", "webdataset", "Energon", "HF datasets", "Mosaic Streaming", "LitData")
# In the README the picture is a file of its own, with no page whose colours it could take.
ALONE = """  <style>
    svg:root { font-family: system-ui, sans-serif; }
    @media (prefers-color-scheme: dark) { svg:root { color: #e6edf3; --color-brand-primary: #5c93ff; } }
  </style>"""


def write(results, directory):
    """Write ``peers.json``, ``peers.md``, ``rates.svg`` and, where matplotlib is installed,
    ``peers.png``; return their paths. A page that is there keeps what stands from ELASTIC on, which
    other scripts measure.
    """
    directory.mkdir(parents=True, exist_ok=True)
    data, page, picture = (directory / f"peers.{ending}" for ending in ("json", "md", "png"))
    data.write_text(json.dumps(results, indent=1) + "\n")
    short = directory / "rates.svg"
    short.write_text(short_chart(results))
    kept = "".join(page.read_text().partition(ELASTIC)[1:]) if page.exists() else ""
    try:
        draw(results, picture)
    except ModuleNotFoundError:
        page.write_text(table(results) + kept)
        return [data, page, short]
    page.write_text(table(results, picture.name) + kept)
    return [data, page, short, picture]


def table(results, picture=""):
    """Return results as a page in Markdown.

    Args:
        results: of ``running.compare``.
        picture: the name of the chart next to the page, if there is one.
    """
    rates = [what for what in COLUMNS if what != "resume"]
    titles = ["", "reads", *(COLUMNS[what] for what in rates)]
    titles += ["peak memory, 2 workers", COLUMNS["resume"], "state", "resumed"]
    lines = ["# Against other loaders", "", f"{heading(results)}.", "", explained(results), ""]
    if picture:
        lines += [f"![The rates of the table]({picture})", ""]
    lines += [line(titles), line(["---"] * 2 + ["--:"] * (len(titles) - 3) + ["---"])]
    reasons = []
    for row in results["rows"]:
        cells, memory = row["cells"], row["cells"][MEMORY].get("peak_bytes")
        shown = [row["name"], row["reads"], *(figure(cells[what], reasons) for what in rates)]
        shown += [f"{memory / 1e6:,.0f} MB" if memory else "", figure(cells["resume"], reasons, "s")]
        lines.append(line([*shown, figure(cells[STATE], reasons, "bytes"), cells["resume"].get("outcome", "")]))
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    if found := ratios(results):
        lines += ["", "## Ratios", "", "Medians of the ratios in each round.", ""]
        lines += [line(["", "of", "ratio"]), line(["---", "---", "--:"])]
        lines += [line([f"{one} / {other}", what, f"{value:.2f}"]) for (one, other, what), value in found.items()]
    versions = dict(sorted(pair for row in results["rows"] for pair in row["versions"].items()))
    lines += ["", "Versions: " + ", ".join(f"{name} {version}" for name, version in versions.items()) + "."]
    return "\n".join(lines) + "\n"


def heading(results):
    """Return when and on what machine the results were measured."""
    machine = results["machine"]
    return (
        f"Measured on {results['date']} on {machine['cores']} cores ({machine['processor']}), Python "
        f"{machine['python']}, wds_pipes {results['version']}"
    )


def ratios(results):
    """Return the medians of RATIOS, of rounds that followed each other, and the ratio of memory."""
    cells = {row["name"]: row["cells"] for row in results["rows"]}
    found = {}
    for one, other, what in RATIOS:
        pair = [cells.get(name, {}).get(what, {}).get("values") for name in (one, other)]
        if all(pair):
            found[one, other, what] = statistics.median(mine / theirs for mine, theirs in zip(*pair))
    own, theirs = (cells.get(name, {}).get(MEMORY, {}).get("peak_bytes") for name in ("wds_pipes", "webdataset"))
    if own and theirs:
        found["wds_pipes", "webdataset", "peak memory"] = own / theirs
    return found


def explained(results):
    """Return what the figures mean."""
    images, tiny = results["data"]["images"], results["data"]["tiny"]
    return (
        "`python tests/bench/peers` writes this page. Samples per second, medians of "
        f"{plural(results['plan']['rounds'], 'round')} in which the rows take turns, with half of the distance "
        "between the least and the most. "
        f"The load of the machine was {results['machine']['load_before']:.1f} before the run.\n\n"
        f"Images: {images['samples']:,} samples with a JPEG of 500 x 375 pixels, "
        f"{images['bytes'] // images['samples']:,} bytes each. Tiny: {tiny['samples']:,} samples of 200 bytes. "
        "All files are in the memory of the machine. Decoded: batches of 64 images of 224 x 224 pixels, in the middle "
        "of an epoch, by the same function in all rows whose names do not say otherwise; DALI decodes by itself. The "
        "limits decode images that are in memory: by that function, and by the quickest way that is known, which is "
        "that of `size=`. DALI and the directory of files read no JSON. webdataset has no state: that is "
        "torchdata's, whose StatefulDataLoader reads the epoch again up to the place. Each measurement is a process of "
        "its own.\n\n"
        "A row that does not read tar reads what the library's own writer has made of the shards. Where it is ahead, "
        "that is the reason: the members of the tars were found and their fields grouped before. The parser of spdl "
        "is C++ and verifies no checksums: it leaves out a damaged member, and ends at a cut, without an error."
    )


def figure(cell, reasons, unit=""):
    """Return a cell of the table; what has no figure refers to its reason."""
    if "reason" in cell:
        if cell["reason"] not in reasons:
            reasons.append(cell["reason"])
        return f"({reasons.index(cell['reason']) + 1})"
    value, values = cell["median"], cell["values"]
    if unit == "bytes":
        return f"{value:,.0f} B" if value < 10_000 else f"{value / 1e3:,.0f} kB"
    shown = f"{value:.3f} s" if unit == "s" else f"{value:,.0f}"
    return f"{shown} ±{(max(values) - min(values)) / 2 / value:.0%}" if len(values) > 1 else shown


def line(cells):
    """Return a line of a table."""
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def short_chart(results):
    """Return the rates of the first page and the README, SHORT_ROWS of SHORT_PANELS, as an SVG that
    takes the colours of the page that it is in.
    """
    accent = "var(--color-brand-primary, #0a4bff)"
    marks, told, top = [], [], 0
    for title, (what, limit) in SHORT_PANELS.items():
        marks.append(f'  <text x="0" y="{top + 14}" font-weight="bold">{title}</text>')
        shown = [row for row in results["rows"] if row["name"] in (limit, *SHORT_ROWS)]
        cells = {"limit" if row["name"] == limit else row["name"]: row["cells"][what] for row in shown}
        medians = {name: cell["median"] for name, cell in cells.items() if "median" in cell}
        told.append(f"{title}: {', '.join(f'{name} {median:,.0f}/s' for name, median in medians.items())}.")
        for name, median in medians.items():
            top += 22
            ours = f' fill="{accent}"' if name == "wds_pipes" else ""
            width = 310 * median / max(medians.values())
            marks += [
                f'  <text x="136" y="{top + 14}" text-anchor="end"{ours}>{name}</text>',
                f'  <rect x="142" y="{top + 1}" width="{width:.1f}" height="17" rx="2"{ours or OTHERS}/>',
                f'  <text x="{147 + width:.1f}" y="{top + 14}">{median:,.0f}</text>',
            ]
        top += 40
    shape = f'viewBox="0 0 520 {top - 14}" font-family="inherit" font-size="14" fill="currentColor"'
    name = f'xmlns="http://www.w3.org/2000/svg" {shape} role="img" aria-label="{" ".join(told)}"'
    return "\n".join([f"<svg {name}>", ALONE, *marks, "</svg>", ""])


def draw(results, path):
    """Draw the rates of results to a PNG: medians, with the least and the most of all rounds.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = [name for _, bars, _ in PANELS for name in bars]
    rows = [row for row in reversed(results["rows"]) if any("values" in row["cells"][name] for name in names)]
    chart = Figure(figsize=(12, 1.6 + 0.5 * len(rows)), layout="constrained")
    axes = chart.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
    for axis, (title, bars, logarithmic) in zip(axes, PANELS):
        for number, (name, label) in enumerate(bars.items()):
            places = [place for place, row in enumerate(rows) if "values" in row["cells"][name]]
            cells = [rows[place]["cells"][name] for place in places]
            spread = [
                [cell["median"] - min(cell["values"]) for cell in cells],
                [max(cell["values"]) - cell["median"] for cell in cells],
            ]
            heights = [place + 0.27 * (1 - number) for place in places]
            medians = [cell["median"] for cell in cells]
            axis.barh(heights, medians, 0.25, xerr=spread, label=label, error_kw={"elinewidth": 0.8})
        axis.set_title(title)
        axis.set_xscale("log" if logarithmic else "linear")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize="small", loc="lower right")
    axes[0].set_yticks(range(len(rows)), [f"{row['name']}  [{row['reads']}]" for row in rows])
    for label, row in zip(axes[0].get_yticklabels(), rows):
        label.set_fontweight("bold" if row["name"].startswith("wds_pipes") else "normal")
    chart.suptitle(heading(results), fontsize="medium")
    chart.savefig(path, dpi=100, metadata={"Software": None})
