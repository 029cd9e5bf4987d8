"""The commands that write shards, and what they must write, for kill_jobs and job_faults."""

import random
import re
import sys
from pathlib import Path

COMMANDS = {  # {from} are shards, {files} the files that they are made of, {data} the directory of all
    "create": "create {files} {to} --max-samples 50 --shuffle 3",
    "convert": "convert {data}/tables {to} --from parquet --max-samples 50",
    "export-parquet": "export {from} {to} --to parquet",
    "export-imagefolder": "export {from} {to} --to imagefolder",
    "export-jsonl": "export {from} {to} --to jsonl --fields cls",
    "download": "download {from} {to}",
    "index": "index {from} -o {to}/index.json --offsets-to {to}",
    "filter": "filter {from} {to} --every 2",
    "map": "map copy:copy {from} {to}",
    "dedup": "dedup {from} {to} --by content",
    "join": "join {from} {to} --with {data}/indexed --prefer last",
    "repair": "repair {from} {to}",
    "reshard": "reshard {from} {to} --max-bytes 1MB",
    "reshard-md5": "reshard {from} {to} --max-bytes 1MB --md5",
    "split": "split {from} {to} --shares a=0.6,b=0.4 --max-samples 50",
    "shuffle": "shuffle {from} {to} --seed 3 --max-samples 50",
    "sort": "sort {from} {to} --by cls --max-samples 50",
    "mix": "mix {from}=0.7 {data}/others=0.3 {to} --exhausted drop --max-samples 50",
}


def command_line(template: str, **places) -> list[str]:
    """A command in a new process, with its places filled in."""
    words = [word.format(**places) for word in template.split()]
    return [sys.executable, "-m", "wds_pipes", *words, "--no-progress"]


def make_files(folder: Path, count: int) -> None:
    """Write files of samples with two fields, of 1 to 40 kB."""
    numbers = random.Random(0)
    for number in range(count):
        path = folder / f"{number % 17:02d}" / f"{number:06d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".bin").write_bytes(numbers.randbytes(numbers.randrange(1000, 40_000)))
        path.with_suffix(".cls").write_text(str(number % 10))


def finals(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with final names; an index without the hash of where it was written."""
    return {
        name: re.sub(rb'"place": "\w+"', b"", data)
        for name, data in files.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def outputs(folder: Path) -> dict[str, bytes]:
    """The files in a folder under their final names."""
    return finals({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
