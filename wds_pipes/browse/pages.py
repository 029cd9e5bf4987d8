"""The pages as HTML, and as files. All links are relative, and name shards, samples and fields by
numbers, so that the same pages are served and exported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib.resources import files
from typing import Any, TypeAlias

from wds_pipes.browse.data import SAMPLES, SECONDS, Budget, DataSet, findings_at
from wds_pipes.browse.fields import MOST_NAME, Fields
from wds_pipes.core.importing import library
from wds_pipes.core.words import bytes_shown, plain, plural
from wds_pipes.display.pictures import LARGE
from wds_pipes.display.text import cut
from wds_pipes.errors import WdsError, for_commands
from wds_pipes.tools.verifying import VerifyReport

SHARDS = 100  # of a page
_CARD = 8  # fields of a sample in a grid
_FIELDS = 100  # fields on a page of a sample
_NUMBER = r"(\d{1,15})"

Render = Callable[..., str]
Section: TypeAlias = "Callable[[Pages], object]"  # adds pages


class Query(dict[str, str]):
    """The options in the URL of a page.

    Attributes:
        budget: what the page may take.
    """

    def __init__(self, options: Mapping[str, str], budget: Budget) -> None:
        super().__init__(options)
        self.budget = budget


class Pages:
    """Renders the pages of a data set, by their names.

    Args:
        data: the data set.
        sections: functions that add other pages.
        exported: the names of the pages that are written as files: only they are linked. None: the
            pages are served.

    Attributes:
        navigation: the names and titles of the pages that every page links at its top.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """

    def __init__(
        self, data: DataSet, sections: Iterable[Section] = (), *, exported: Collection[str] | None = None
    ) -> None:
        jinja2 = library("jinja2", "jinja2", "wds-pipes browse", extra="browse")
        self.data, self._exported = data, exported
        self.navigation = [("shards-1.html", "Shards")]
        self._routes: list[tuple[re.Pattern[str], Render]] = []
        self._templates = jinja2.Environment(
            loader=jinja2.PackageLoader("wds_pipes.browse"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # control characters, and halves of characters, which are not UTF-8, become escapes
            finalize=lambda value: plain(value) if type(value) is str else value,
        )
        self._templates.filters |= {"plural": plural, "size": _size}
        self._templates.globals |= {
            "served": exported is None,
            "linked": lambda name: exported is None or name in exported,
            "rows_of_page": SHARDS,
        }
        self.add(rf"shards-{_NUMBER}\.html", self._shards)
        self.add(rf"shard-{_NUMBER}-{_NUMBER}\.html", self._grid)
        self.add(rf"sample-{_NUMBER}-{_NUMBER}\.html", self._sample)
        for section in sections:
            section(self)

    def add(self, pattern: str, render: Render, title: str = "") -> None:
        """Add a kind of pages.

        Args:
            pattern: a regular expression of their names, with groups of digits.
            render: called with the numbers in the groups, and with ``query=``, the options in the
                URL; it returns HTML, which ``render`` makes of a template.
            title: the title in the navigation, if the pattern is just a name; "": it is not there.
        """
        self._routes.append((re.compile(pattern, re.ASCII), render))
        if title:
            self.navigation.append((pattern.replace("\\", ""), title))

    def page(self, name: str, options: Mapping[str, str] | None = None, budget: Budget | None = None) -> str:
        """Return the page with a name.

        Args:
            name: its name.
            options: those in the URL; None: there are none.
            budget: what the page may take; None: as long as it takes.

        Raises:
            LookupError: there is no such page, shard or sample.
            WdsError: a shard or an index cannot be read.
            TimeoutError: it has taken too long.
        """
        for pattern, render in self._routes:
            if found := pattern.fullmatch(name):
                return render(*map(int, found.groups()), query=Query(options or {}, budget or Budget()))
        raise LookupError("there is no such page")

    def render(self, template: str, **values: Any) -> str:
        """Return a template, filled with values."""
        data = self.data
        text: str = self._templates.get_template(template).render(
            navigation=self.navigation, shard_count=len(data.shards), total=data.total, **values
        )
        return text

    def error(self, message: str, shard: int | None = None) -> str:
        """Return a page that says what is wrong."""
        return self.render("error.html", message=message, shard=shard)

    def _shards(self, page: int, query: Query) -> str:
        data, first = self.data, (page - 1) * SHARDS
        numbers = range(len(data.shards))[max(first, 0) : first + SHARDS]
        if page < 1 or not numbers:
            raise LookupError(f"there is no page {page} of shards: there are {plural(len(data.shards), 'shard')}")
        fields = "fields", numbers[0]
        found = data.soon(
            {
                **{number: partial(data.size, number) for number in numbers},
                fields: partial(self._fields_of, numbers[0]),
            }
        )
        rows = [
            {"number": number, "url": data.shown(number), "count": data.count(number), "size": found.get(number)}
            for number in numbers
        ]
        names, problem = found.get(fields, ([], "It has not answered yet. Load this page again."))
        return self.render(
            "shards.html",
            rows=rows,
            names=names,
            problem=problem,
            note=data.note,
            page=page,
            pages=-(-len(data.shards) // SHARDS),
        )

    def _fields_of(self, shard: int) -> tuple[list[str], str]:
        """Return the names of the fields of the first sample of a shard, and why they are not
        known.
        """
        try:
            with self.data.look(shard, 0, 1, whole=False, budget=Budget(SECONDS)) as view:
                found = view.found
                names = [cut(member.field, MOST_NAME) for member in found[0].members[:_FIELDS]] if found else []
                return names, view.problem
        except (WdsError, TimeoutError) as error:
            return [], for_commands(error)

    def _grid(self, shard: int, page: int, query: Query) -> str:
        first = max(page - 1, 0) * SAMPLES
        with self.data.look(shard, first, budget=query.budget) as view:
            fields, report = Fields(view, budget=query.budget), self._report(shard, query)
            cards = [
                {
                    "sample": sample._replace(key=cut(sample.key, MOST_NAME)),
                    "fields": fields.of(sample, range(len(sample.members))[:_CARD]),
                    "findings": findings_at(report, sample),
                    "left": max(0, len(sample.members) - _CARD),
                }
                for sample in view.found
            ]
        count = self.data.count(shard)
        return self.render(
            "grid.html",
            shard=shard,
            url=self.data.shown(shard),
            page=page,
            pages=None if count is None else max(1, -(-count // SAMPLES)),
            first=first,
            count=count,
            cards=cards,
            more=view.more,
            problem=view.problem,
            report=report,
        )

    def _report(self, shard: int, query: Mapping[str, str]) -> VerifyReport | None:
        """Return what ``verify`` finds in a shard; None: it is not checked."""
        try:
            return self.data.report(shard, now=self._exported is None and query.get("verify") == "1")
        except OSError:  # the page says why it cannot be read
            return None

    def _sample(self, shard: int, number: int, query: Query) -> str:
        with self.data.look(shard, number, 1, budget=query.budget) as view:
            found, more, problem = view.found, view.more, view.problem
            if not found:
                if problem:
                    return self.error(problem, shard)
                raise LookupError(f"there is no sample {number:,} in shard {self.data.shown(shard)}")
            sample = found[0]
            first = int(query["fields"]) if re.fullmatch(_NUMBER, query.get("fields", ""), re.ASCII) else 0
            numbers = range(len(sample.members))[first : first + _FIELDS]
            fields = Fields(view, LARGE, query.budget).of(sample, numbers)
            findings = findings_at(self._report(shard, query), sample)
        return self.render(
            "sample.html",
            shard=shard,
            url=self.data.shown(shard),
            number=number,
            page=number // SAMPLES + 1,
            sample=sample._replace(key=cut(sample.key, MOST_NAME)),
            fields=fields,
            before=max(0, first - _FIELDS) if first else None,
            after=numbers.stop if numbers.stop < len(sample.members) else None,
            more=more,
            problem=problem,
            findings=findings,
        )


def _size(value: int | None) -> str:
    return "?" if value is None else bytes_shown(value)


def static_files() -> dict[str, bytes]:
    """Return the style and the script of the pages, by their names."""
    folder = files("wds_pipes.browse") / "static"
    return {name: (folder / name).read_bytes() for name in ("browse.css", "browse.js")}


def export(data: DataSet, folder: str, most: int, sections: Iterable[Section]) -> tuple[int, int]:
    """Write pages as files: of the shards, and of the first samples, with their pictures. Audio,
    video and downloads are left out. ``index.html`` is the first page.

    Args:
        data: the data set.
        folder: the directory to write to; it is made if it does not exist.
        most: how many samples. Whole pages of a grid are written, so there may be a few more.
        sections: as of ``Pages``; their pages in the navigation are also written.

    Returns:
        How many samples were written, and how many pages.

    Raises:
        ValueError: the directory has files.
        OSError: a file cannot be written. What cannot be read is said on its page.
    """
    if os.path.isdir(folder) and os.listdir(folder):
        raise ValueError(f"directory {folder} has files: name another one, or remove them")
    names, samples = _plan(data, most)
    pages = Pages(data, sections, exported=names)
    names.update(name for name, _ in pages.navigation)
    os.makedirs(folder, exist_ok=True)
    for name in sorted(names):
        try:
            text = pages.page(name)
        except WdsError as error:
            text = pages.error(str(error))
        _write(folder, name, text.encode())
    _write(folder, "index.html", pages.page("shards-1.html").encode())
    for name, content in static_files().items():
        _write(folder, name, content)
    return samples, len(names)


def _plan(data: DataSet, most: int) -> tuple[set[str], int]:
    """Return the names of the pages to write, and how many samples they have."""
    names, samples = {"shards-1.html"}, 0
    for shard in range(len(data.shards)):
        page, more = 0, True
        while more and samples < most:
            try:
                with data.look(shard, page * SAMPLES, whole=False) as view:
                    found, more = view.found, view.more
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
