"""``wds-pipes verify``: checks shards, and says what mends them."""

from __future__ import annotations

import sys
from typing import Any

import click

from wds_pipes.cli.options import (
    FOUND,
    as_json,
    echo,
    echo_json,
    engine,
    example,
    executor_of,
    in_one_line,
    key_split,
    storage_options,
    urls,
)
from wds_pipes.core.words import plural

# The kinds of findings; the reference of the command line says what each means.
KINDS = (
    "damage",
    "end",
    "sample",
    "reserved-name",
    "link",
    "duplicate-key",
    "undecodable",
    "some-fields",
    "dotted-name",
    "checksum",
    "stale-index",
)


@click.command(
    epilog=example("wds-pipes verify 'train-*.tar' -j 4\nwds-pipes verify --decode --json s3://bucket/train/index.json")
)
@urls
@click.option("--decode", is_flag=True, help="Also decode all fields; nothing that could run code.")
@click.option("--index", metavar="PATH", help="Compare with this index.json.  [default: the one beside the shards]")
@click.option(
    "--ignore",
    "ignored",
    multiple=True,
    type=click.Choice(KINDS),
    help="Leave out findings of a kind; repeatable.",
)
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="How many processes read shards."
)
@engine
@as_json
@key_split
@storage_options
def verify(
    *,
    urls: tuple[str, ...],
    decode: bool,
    index: str | None,
    ignored: tuple[str, ...],
    jobs: int,
    engine: str | None,
    as_json: bool,
    key_split: str,
    storage_options: Any,
) -> None:
    """Read shards to their ends and report what is wrong, with the shard, the key and the byte.

    It reports all damage that reading finds; keys that come twice, in a shard or in several; files
    that no sample can have: links, and names that are kept for metadata; shards of which no file
    makes a sample; fields that only some samples have; keys with dots; with --decode, fields that
    cannot be decoded; sizes and MD5s other than those of the index.json beside the shards; indexes
    of offsets and of keys that are of other shards. A note says what was not looked at.
    Bytes are those of the tar, after decompression.

    The exit code is 0 if nothing was found, 1 if something was, and 2 if the command was not called
    rightly.
    """
    with in_one_line():
        from wds_pipes.cli.look.checking import Checked, Finding, Options
        from wds_pipes.cli.look.findings import in_order
        from wds_pipes.cli.look.findings import verify as check

        mends, shown = dict[str, None](), 0

        def show(finding: Finding) -> None:
            echo(" ".join(f"{finding.kind}: {finding.text}".split()))
            if finding.mend is not None:
                mends[finding.mend] = None  # it mends all findings of its kind

        progress = sys.stderr.isatty() and not as_json

        def on_shard(checked: Checked) -> None:
            nonlocal shown
            shown += 1
            for finding in () if as_json else checked.findings:
                if finding.kind not in ignored:
                    show(finding)
            if progress:
                click.echo(f"\r{shown:,} shards read ", nl=False, err=True)

        options = Options(storage_options, key_split, decode)
        with executor_of(engine) as executor:
            jobs = jobs if executor is None else executor.width
            report = check(urls, options, index=index, jobs=jobs, executor=executor, ignored=ignored, on_shard=on_shard)
        if progress:
            click.echo(f"\r{'':30}\r", nl=False, err=True)
        total = sum(report.counts.values())
        if as_json:
            content = {
                "shards": report.shards,
                "samples": report.samples,
                "outside": report.outside,
                "counts": dict(report.counts),
                "findings": [finding._asdict() for finding in report.findings],
                "notes": sorted(report.notes),
            }
            echo_json(content)
        else:
            for finding in report.of_all:
                show(finding)
            for note in sorted(report.notes):
                echo(f"note: {note}")
            commands = in_order(mends)
            if len(commands) > 1:
                echo("These commands mend it, one after the other, each on what the one before has written:")
            for command in commands:
                echo(f"  -> {command}")
            hidden = total - len(report.findings)
            more = f", of which {hidden:,} are not shown" if hidden else ""
            outside = f"; {plural(report.outside, 'file')} of no sample" if report.outside else ""
            echo(
                f"{plural(report.shards, 'shard')}, {plural(report.samples, 'sample')}: "
                f"{plural(total, 'finding') if total else 'nothing is wrong'}{more}{outside}"
            )
        if total:
            raise SystemExit(FOUND)
