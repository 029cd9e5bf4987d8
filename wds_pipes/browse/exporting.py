"""The pages as files, to look at without a server."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.resources import files

from wds_pipes.browse.data import SAMPLES, DataSet
from wds_pipes.browse.pages import SHARDS, STATIC, Pages
from wds_pipes.errors import WdsError


def export(
    data: DataSet, folder: str, most: int = 1000, *, add: Callable[[Pages], None] = lambda pages: None
) -> tuple[int, int]:
    """Write pages as files: of the shards, and of the first samples, with their pictures. Audio,
    video and downloads are left out. ``index.html`` is the first page.

    Args:
        data: the data set.
        folder: the directory to write to; it is made if it does not exist.
        most: how many samples. Whole pages of a grid are written, so there may be a few more.
        add: adds the other pages of the navigation, which are also written.

    Returns:
        How many samples were written, and how many pages.

    Raises:
        ValueError: the directory has files.
        OSError: a file cannot be written. What cannot be read is said on its page.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise ValueError(f"directory {folder} has files: name another one, or remove them")
    names, samples = _plan(data, most)
    pages = Pages(data, exported=names)
    add(pages)
    names.update(name for name, _ in pages.navigation)
    os.makedirs(folder, exist_ok=True)
    for name in sorted(names):
        try:
            text = pages.page(name)
        except WdsError as error:
            text = pages.error(str(error))
        _write(folder, name, text.encode())
    _write(folder, "index.html", pages.page("shards-1.html").encode())
    static = files("wds_pipes.browse") / "static"
    for name in STATIC:
        _write(folder, name, (static / name).read_bytes())
    return samples, len(names)


def _plan(data: DataSet, most: int) -> tuple[set[str], int]:
    """Return the names of the pages to write, and how many samples they have."""
    names, samples = {"shards-1.html"}, 0
    for shard in range(len(data.shards)):
        page, more = 0, True
        while more and samples < most:
            try:
                with data.look(shard, page * SAMPLES, whole=False) as view:
                    found, more, _ = view.samples
            except WdsError:  # the page says why
                found, more = [], False
            names |= {f"sample-{shard}-{sample.number}.html" for sample in found}
            page, samples = page + 1, samples + len(found)
            names |= {f"shard-{shard}-{page}.html", f"shards-{shard // SHARDS + 1}.html"}
        if samples >= most:
            break
    return names, samples


def _write(folder: str, name: str, content: bytes) -> None:
    with open(os.path.join(folder, name), "xb") as file:
        file.write(content)
