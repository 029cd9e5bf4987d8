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
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "support"))

import fsspec
from amount import parser, rounds
from servers.all import Servers
from servers.s3 import SECRET

SECONDS = 300  # of a run; far more than it takes
RUNS = 3  # with faults, before the last one without
COMMANDS = {
    "create": ["create", "{files}", "{to}", "--max-samples", "60", "--shuffle", "3"],
    "download": ["download", "{from}", "{to}"],
    "filter": ["filter", "{from}", "{to}", "--every", "2"],
    "dedup": ["dedup", "{from}", "{to}", "--by", "content"],
    "repair": ["repair", "{from}", "{to}"],
    "reshard": ["reshard", "{from}", "{to}", "--max-bytes", "8MB"],
    "split": ["split", "{from}", "{to}", "--shares", "a=0.6,b=0.4", "--max-samples", "90"],
    "shuffle": ["shuffle", "{from}", "{to}", "--max-samples", "90"],
    "sort": ["sort", "{from}", "{to}", "--by", "cls", "--max-samples", "300"],
    "export": ["export", "{from}", "{to}", "--to", "jsonl", "--fields", "cls"],
}
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


def make_files(folder: Path, count: int) -> None:
    numbers = random.Random(0)
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04d}.bin").write_bytes(numbers.randbytes(numbers.randrange(1000, 40_000)))
        (folder / f"{number:04d}.cls").write_text(str(number % 10))


class Store:
    """Where shards are read or written: a store, or for None a local directory."""

    def __init__(self, store, folder: Path) -> None:
        self.store, self.folder = store, folder

    def at(self, name: str) -> str:
        return str(self.folder / name) if self.store is None else f"{self.store.url}/{name}"

    def files(self, name: str) -> dict[str, bytes]:
        """The files under final names, read without faults."""
        url = self.at(name)
        if self.store is None:
            paths = [path for path in (self.folder / name).rglob("*") if path.is_file()]
            found = {str(path.relative_to(url)): path.read_bytes() for path in paths}
        else:
            direct = {"use_listings_cache": False, "skip_instance_cache": True}
            fs, path = fsspec.url_to_fs(url, **self.store.direct.storage_options, **direct)
            found = {key.removeprefix(f"{path}/"): fs.cat_file(key) for key in fs.find(path)}
        return {key: data for key, data in found.items() if not any(part[0] == "." for part in key.split("/"))}

    def faults(self, *rules: dict) -> None:
        if self.store is not None:
            self.store.faults.clear()
            self.store.faults.rules(*rules)


def run(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """The exit code and the errors of a command."""
    command = [sys.executable, "-m", "wds_pipes", *arguments, "--no-progress"]
    try:
        environment = {**os.environ, **environment}
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return -1, "it did not end"
    return done.returncode, done.stderr


def check_errors(code: int, errors: str) -> str:
    """What is wrong with how a command ended."""
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if "Traceback" in errors or SECRET in errors:
        return "not words for people"
    return "" if code == 0 or errors.strip() else "no word of why"


def main() -> None:
    known = parser(__doc__, 40)
    known.add_argument("--command", choices=COMMANDS, action="append")
    known.add_argument("--source", choices=("local", "web", "s3", "gcs"), action="append")
    known.add_argument("--to", choices=("local", "s3", "gcs"), action="append")
    options = known.parse_args()
    numbers, bad = random.Random(options.seed), 0
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        servers, data, wholes = stack.enter_context(Servers()), Path(directory), {}
        make_files(data / "files", 600)
        code, errors = run(["create", f"{data}/files", f"{data}/shards", "--max-samples", "80"], {})
        assert not code, errors
        for number in rounds(options):
            name = numbers.choice(options.command or list(COMMANDS))
            source = numbers.choice(options.source or ("local", "web", "s3", "gcs"))
            to = numbers.choice(options.to or ("local", "s3", "gcs"))
            reading, writing = numbers.choice(list(READING)), numbers.choice(list(WRITING))
            if source == to:
                source = "local"  # the rules are those of a whole store
            here = Store(getattr(servers, source) if source != "local" else None, data)
            there = Store(getattr(servers, to) if to != "local" else None, data)
            place, files = f"job-{number}", {"files": f"{data}/files", "from": f"{data}/shards", "to": None}
            if here.store is not None:
                for path in (data / "shards").iterdir():
                    if path.is_file():
                        here.store.put(f"in/{path.name}", path.read_bytes())
                files["from"] = here.at("in/index.json")
            if name not in wholes:
                whole = [
                    word.format(**{**files, "from": f"{data}/shards", "to": f"{data}/whole-{name}"})
                    for word in COMMANDS[name]
                ]
                assert not run(whole, {})[0], name
                wholes[name] = Store(None, data).files(f"whole-{name}")
            arguments = [word.format(**{**files, "to": there.at(place)}) for word in COMMANDS[name]]
            environment = {}
            for store in (here.store, there.store):
                environment |= store.environment if store is not None else {}
            told = []
            for attempt in range(RUNS + 1):
                faulty = attempt < RUNS
                here.faults(*([{"match": READS, **READING[reading]}] if faulty and READING[reading] else []))
                there.faults(*([{"match": WRITES, **WRITING[writing]}] if faulty and WRITING[writing] else []))
                code, errors = run(arguments, environment)
                now = there.files(place)
                wrong = [key for key, content in now.items() if wholes[name].get(key) != content]
                problem = check_errors(code, errors)
                if wrong or problem or (code == 0 and now != wholes[name]) or (not faulty and code):
                    bad += 1
                    told.append(f"WRONG: {problem} {wrong} code {code}: {errors}")
                told.append(f"{code}:{len(now)}")
                if code == 0:
                    break
            print(f"{number}: {name} {source} ({reading}) -> {to} ({writing}): {' '.join(told)}", flush=True)
            if code and errors:
                print(f"    {errors.strip().splitlines()[0]}")
            here.faults()
            there.faults()
    print(f"jobs={number + 1} wrong={bad} seed={options.seed}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
