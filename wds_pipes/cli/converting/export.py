"""``wds-pipes export``: writes shards in other formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wds_pipes.cli.jobs import Running, job_options, run_job
from wds_pipes.cli.options import dest, example, key_split, storage_options, urls
from wds_pipes.cli.options import fields as fields_option
from wds_pipes.core.words import plural

if TYPE_CHECKING:
    from wds_pipes.io.tasks.task import Job, Report, Task

_KINDS = ("jsonl", "parquet", "tfrecord", "imagefolder")


@click.command(
    epilog=example(
        "wds-pipes export 'shards/*.tar' table/ --to parquet --fields json,cls -j 4\n"
        "wds-pipes export shards/ s3://bucket/records --to tfrecord\n"
        "wds-pipes export shards/ folder/ --to imagefolder"
    )
)
@urls
@dest
@click.option("--to", "kind", type=click.Choice(_KINDS), required=True, help="The format.")
@fields_option
@click.option("--label", metavar="FIELD", help="The field of the class, for imagefolder.  [default: cls]")
@key_split
@storage_options
@job_options
def export(
    *,
    urls: tuple[str, ...],
    dest: str,
    kind: str,
    fields: list[str] | None,
    label: str | None,
    key_split: str,
    storage_options: dict[str, Any],
    running: Running,
) -> None:
    """Write shards in another format into the directory DEST.

    A file is made of each shard, with the name of the shard. Data is written as it is: images are
    never encoded again. A sample that has none of --fields is left out.

    \b
    jsonl        X.jsonl: lines as of wds-pipes cat --jsonl; what is no text, number or JSON is
                 {"base64": ...}
    parquet      X.parquet: columns __key__ and one for each field: text, integers (cls, id and
                 the like, unless one would be changed, as 007 would) or bytes
    tfrecord     X.tfrecord of tf.train.Example: a feature __key__ and one for each field
    imagefolder  images/CLASS/KEY.jpg and other fields beside it, and X.txt, their list; classes
                 are named by classes.json beside the shards, else by what the field --label has;
                 a program that reads the directories numbers them in the order of their names as
                 text, 10 before 2

    wds-pipes convert reads parquet and tfrecord back as they were, and wds-pipes create --from
    classes the images. Run the same command again after an interruption: what is finished is kept.
    """  # noqa: D301
    options = storage_options or None
    if label is not None and kind != "imagefolder":
        raise click.UsageError("--label is for --to imagefolder")

    def make() -> Job:
        from wds_pipes.cli.converting.writing import plan
        from wds_pipes.io.tasks.task import Place

        return plan(
            urls,
            Place(dest, options),
            kind,
            fields=None if fields is None else tuple(fields),
            label=(label or "cls").lower(),
            key_split=key_split,
            storage_options=options,
        )

    run_job(make, running, _planned, _summary)


def _planned(task: Task) -> str:
    return task.outputs[0]


def _summary(report: Report) -> str:
    facts = report.facts.values()
    text = f"{plural(len(facts), 'file')}, {plural(sum(fact['samples'] for fact in facts), 'sample')}"
    without = sum(fact["without_fields"] for fact in facts)
    return f"{text}; {plural(without, 'sample')} left out, which had none of the fields" if without else text
