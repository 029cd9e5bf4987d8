"""The pages as HTML. All links are relative, and name shards, samples and fields by numbers, so
that the same pages are served and exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from wds_pipes.browse.data import SAMPLES, DataSet
from wds_pipes.browse.fields import MOST_NAME, Fields
from wds_pipes.browse.findings import of_sample
from wds_pipes.core.importing import library
from wds_pipes.core.words import bytes_shown, plain, plural
from wds_pipes.display.pictures import LARGE
from wds_pipes.display.text import cut
from wds_pipes.errors import WdsError, for_commands
from wds_pipes.tools.findings import VerifyReport

SHARDS = 100  # of a page
_CARD = 8  # fields of a sample in a grid
_FIELDS = 100  # fields on a page of a sample
STATIC = ("browse.css", "browse.js")
_NUMBER = r"(\d{1,15})"

Render = Callable[..., str]


class Pages:
    """Renders the pages of a data set, by their names.

    Args:
        data: the data set.
        exported: the names of the pages that are written as files: only they are linked. None: the
            pages are served.

    Attributes:
        navigation: the names and titles of the pages that every page links at its top.

    Raises:
        ModuleNotFoundError: jinja2 is not installed.
    """

    def __init__(self, data: DataSet, *, exported: Collection[str] | None = None) -> None:
        jinja2 = library("jinja2", "jinja2", "wds-pipes browse", extra="browse")
        self.data, self._exported, self._checks = data, exported, data.checks()
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
        self._templates.globals |= {"served": exported is None, "linked": self._is_linked, "rows_of_page": SHARDS}
        self.add(rf"shards-{_NUMBER}\.html", self._shards)
        self.add(rf"shard-{_NUMBER}-{_NUMBER}\.html", self._grid)
        self.add(rf"sample-{_NUMBER}-{_NUMBER}\.html", self._sample)

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

    def page(self, name: str, query: Mapping[str, str] | None = None) -> str:
        """Return the page with a name.

        Raises:
            LookupError: there is no such page, shard or sample.
            WdsError: a shard or an index cannot be read.
        """
        for pattern, render in self._routes:
            if found := pattern.fullmatch(name):
                return render(*map(int, found.groups()), query=query or {})
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

    def _is_linked(self, name: str) -> bool:
        return self._exported is None or name in self._exported

    def _shards(self, page: int, query: Mapping[str, str]) -> str:
        data, first = self.data, (page - 1) * SHARDS
        numbers = range(len(data.shards))[max(first, 0) : first + SHARDS]
        if page < 1 or not numbers:
            raise LookupError(f"there is no page {page} of shards: there are {plural(len(data.shards), 'shard')}")
        rows = [
            {"number": number, "url": data.shown(number), "count": data.count(number), "size": size}
            for number, size in zip(numbers, data.sizes(numbers), strict=True)
        ]
        names, problem = self._fields_of(numbers[0])
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
            with self.data.look(shard, 0, 1, whole=False) as view:
                found = view.samples.found
                names = [cut(member.field, MOST_NAME) for member in found[0].members[:_FIELDS]] if found else []
                return names, view.samples.problem
        except WdsError as error:
            return [], for_commands(error)

    def _grid(self, shard: int, page: int, query: Mapping[str, str]) -> str:
        first = max(page - 1, 0) * SAMPLES
        with self.data.look(shard, first) as view:
            samples, fields, report = view.samples, Fields(view), self._report(shard, query)
            cards = [
                {
                    "sample": sample._replace(key=cut(sample.key, MOST_NAME)),
                    "fields": fields.of(sample, range(len(sample.members))[:_CARD]),
                    "findings": of_sample(report, sample),
                    "left": max(0, len(sample.members) - _CARD),
                }
                for sample in samples.found
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
            more=samples.more,
            problem=samples.problem,
            report=report,
        )

    def _report(self, shard: int, query: Mapping[str, str]) -> VerifyReport | None:
        """Return what ``verify`` finds in a shard; None: it is not checked."""
        try:
            return self._checks.report(shard, now=self._exported is None and query.get("verify") == "1")
        except OSError:  # the page says why it cannot be read
            return None

    def _sample(self, shard: int, number: int, query: Mapping[str, str]) -> str:
        with self.data.look(shard, number, 1) as view:
            found, more, problem = view.samples
            if not found:
                if problem:
                    return self.error(problem, shard)
                raise LookupError(f"there is no sample {number:,} in shard {self.data.shown(shard)}")
            sample = found[0]
            first = int(query["fields"]) if re.fullmatch(_NUMBER, query.get("fields", ""), re.ASCII) else 0
            numbers = range(len(sample.members))[first : first + _FIELDS]
            fields = Fields(view, LARGE).of(sample, numbers)
            findings = of_sample(self._report(shard, query), sample)
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
    return "unknown" if value is None else bytes_shown(value)
