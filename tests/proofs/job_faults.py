"""Commands that write shards, from stores and to stores that answer with one fault after another:
after each run every file under a final name must be that of a run on local files, and when the
stores answer again, the same command must end with all of them.

    python tests/proofs/job_faults.py [--rounds 40] [--minutes M] [--seed N]
                                      [--command C] [--source S] [--to S]

Each round draws a command, the stores and their faults. Prints what came of each; exits with 1 if a
file is another one, an error is not one line of words or shows a credential, or a command does not
end.
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import fsspec
from amount import parser, rounds
from jobs import COMMANDS, command_line, finals, make_files, outputs
from servers.all import Servers
from servers.s3 import SECRET

SECONDS = 300  # of a run; far more than it takes
RUNS = 3  # with faults, before the last one without
NAMES = ("create", "download", "filter", "dedup", "repair", "reshard", "split", "shuffle", "sort", "export-jsonl")
READING = {
    "none": {},
    "500": {"prob": 0.1, "status": 500},
    "503": {"prob": 0.2, "status": 503},
    "429": {"prob": 0.1, "status": 429, "headers": {"Retry-After": "1"}},
    "reset": {"prob": 0.2, "reset_after": 20_000},
    "closed": {"prob": 0.2, "close_after": 20_000},
    "short": {"prob": 0.3, "truncate": 50_000},
    "dropped": {"prob": 0.1, "drop": True},
    "slow": {"prob": 0.1, "latency": 0.5},
    "trickle": {"prob": 0.1, "trickle": [2_000, 0.01]},
    "refused": {"status": 403, "skip": 12},
}
WRITING = {
    "none": {},
    "500": {"prob": 0.2, "status": 500},
    "503": {"prob": 0.2, "status": 503},
    "dropped": {"prob": 0.1, "drop": True},
    "unheard": {"prob": 0.1, "reset_after": 0},  # it was done, but the answer is lost
    "slow": {"prob": 0.1, "latency": 0.5},
    "refused": {"status": 403, "skip": 9},
}
READS, WRITES = "^(GET|HEAD) ", "^(PUT|POST|DELETE) "


class Place:
    """A folder in a store, or for None in a local directory."""

    def __init__(self, store, url: str) -> None:
        self.store, self.url = store, url
        self.environment = store.environment if store is not None else {}

    def files(self) -> dict[str, bytes]:
        """The files under final names, read without faults."""
        if self.store is None:
            return outputs(Path(self.url))
        direct = {"use_listings_cache": False, "skip_instance_cache": True}
        fs, path = fsspec.url_to_fs(self.url, **self.store.direct.storage_options, **direct)
        return finals({key.removeprefix(f"{path}/"): fs.cat_file(key) for key in fs.find(path)})

    def faults(self, match: str, rule: dict) -> None:
        """Answer the requests that match with a fault; with none, as usual."""
        if self.store is not None:
            self.store.faults.clear()
            self.store.faults.rules(*([{"match": match, **rule}] if rule else []))


def run(command: list[str], environment: dict[str, str]) -> tuple[int, str, str]:
    """The exit code and the errors of a command, and what is wrong with how it ended."""
    environment = {**os.environ, **environment}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return -1, "", "it did not end"
    code, errors = done.returncode, done.stderr
    if code not in (0, 1, 2):
        return code, errors, f"exit code {code}"
    if "Traceback" in errors or SECRET in errors:
        return code, errors, "not words for people"
    return code, errors, "" if code == 0 or errors.strip() else "no word of why"


def attempts(
    command, here: Place, there: Place, whole: dict, *, reading: dict, writing: dict
) -> tuple[int, list[str], str]:
    """Run a command with faults until it succeeds, the last time without; returns how many runs
    were wrong, what came of each, and the errors of the last one.
    """
    bad, told = 0, []
    for attempt in range(RUNS + 1):
        faulty = attempt < RUNS
        here.faults(READS, reading if faulty else {})
        there.faults(WRITES, writing if faulty else {})
        code, errors, problem = run(command, here.environment | there.environment)
        now = there.files()
        wrong = [key for key, content in now.items() if whole.get(key) != content]
        if wrong or problem or (code == 0 and now != whole) or (not faulty and code):
            bad += 1
            told.append(f"WRONG: {problem} {wrong} code {code}: {errors}")
        told.append(f"{code}:{len(now)}")
        if code == 0:
            break
    here.faults(READS, {})
    there.faults(WRITES, {})
    return bad, told, errors if code else ""


def main() -> None:
    known = parser(__doc__, 40)
    known.add_argument("--command", choices=NAMES, action="append")
    known.add_argument("--source", choices=("local", "web", "s3", "gcs"), action="append")
    known.add_argument("--to", choices=("local", "s3", "gcs"), action="append")
    options = known.parse_args()
    numbers, bad, wholes = random.Random(options.seed), 0, {}
    with tempfile.TemporaryDirectory() as directory, Servers() as servers:
        data = Path(directory)
        files, shards = data / "files", data / "shards"
        make_files(files, 600)
        code, errors, _ = run(command_line("create {files} {to} --max-samples 80", files=files, to=shards), {})
        assert not code, errors
        for number in rounds(options):
            name = numbers.choice(options.command or NAMES)
            source = numbers.choice(options.source or ("local", "web", "s3", "gcs"))
            to = numbers.choice(options.to or ("local", "s3", "gcs"))
            reading, writing = numbers.choice(list(READING)), numbers.choice(list(WRITING))
            if source in (to, "local"):  # the rules are those of a whole store
                source, here = "local", Place(None, str(shards))
            else:
                store = getattr(servers, source)
                here = Place(store, f"{store.url}/in/index.json")
                for path in shards.iterdir():
                    if path.is_file():
                        store.put(f"in/{path.name}", path.read_bytes())
            store = None if to == "local" else getattr(servers, to)
            there = Place(store, f"{data if store is None else store.url}/job-{number}")
            if name not in wholes:
                whole = Place(None, str(data / f"whole-{name}"))
                command = command_line(COMMANDS[name], **{"files": files, "from": shards, "to": whole.url})
                assert not run(command, {})[0], name
                wholes[name] = whole.files()
            command = command_line(COMMANDS[name], **{"files": files, "from": here.url, "to": there.url})
            mistakes, told, errors = attempts(
                command, here, there, wholes[name], reading=READING[reading], writing=WRITING[writing]
            )
            bad += mistakes
            print(f"{number}: {name} {source} ({reading}) -> {to} ({writing}): {' '.join(told)}", flush=True)
            if errors:
                print(f"    {errors.strip().splitlines()[0]}")
    print(f"jobs={number + 1} wrong={bad} seed={options.seed}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
