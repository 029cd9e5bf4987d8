"""A cache under fire: processes that read random shards with a limit smaller than the data, close
some early, and are killed at random.

    python tests/bench/cache.py [--seconds 60] [--processes 6] [--seed N]

Every byte read is compared. The directory is measured all the time: never more than the limit and
the shards that may be open. Each second shard has an MD5, and one answer in twenty has a wrong
byte, ends early, or breaks off. Exit code 1 if anything was wrong.
"""

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from remote_store import Store

from wds_pipes import ShardError
from wds_pipes.io.cache.files import CacheDirectory
from wds_pipes.io.cache.shard_cache import ShardCache

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["wds_pipes.io.cache.shard_cache"])
SHARDS, SIZE, LIMIT = 24, 1_500_000, 9_000_000


class FaultyStore(Store):
    """One response in twenty has a wrong byte, if the shard has an MD5; others break off, also
    without one.
    """

    def fetch(self, name):
        def fetch(offset):
            kind = random.randrange(60)
            checked = int(name.split(".")[0]) % 2
            store = Store(
                self.root,
                rate=40_000_000,
                flips=10**9 * (kind == 0 and checked),
                flip_at=random.randrange(SIZE),
                cuts=10**9 * (kind == 1),
            )
            answer = store.fetch(name)(offset)
            if kind == 2:
                answer.read = broken
            return answer

        return fetch


def broken(n):
    raise ConnectionResetError("broken off")


def read(cache, store, seed, log):
    rng = random.Random(seed)
    random.seed(seed)
    while True:
        number = rng.randrange(SHARDS)
        name = f"{number}.tar"
        with open(f"{store.root}/{name}", "rb") as file:
            data = file.read()
        outcome = "read"
        try:
            with cache.open(
                f"s3://b/{name}",
                store.fetch(name),
                size=len(data),
                md5=hashlib.md5(data).hexdigest() if number % 2 else None,
            ) as stream:
                got = stream.read(None if rng.random() < 0.7 else rng.randrange(len(data)))
                if got != data[: len(got)]:
                    outcome = "WRONG"  # unless the checksum shows it at the end
                    stream.read()
        except ConnectionResetError:
            outcome = "reset"
        except ShardError as error:
            outcome = "refused: " + ("read before" if "is wrong" in str(error) else "twice")
        if outcome == "WRONG" and len(got) < len(data) and not number % 2:
            outcome = "WRONG without a checksum"
        with open(log, "a") as file:
            file.write(f"{outcome}\n")


def kept(directory):
    total = 0
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(f"{directory}/{name}").st_size
    return total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    rng = random.Random(options.seed)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as root:
        store, cache, log = FaultyStore(f"{root}/store"), ShardCache(f"{root}/cache", max_bytes=LIMIT), f"{root}/log"
        os.makedirs(cache.directory)
        contents = {}
        for number in range(SHARDS):
            # like a compressed shard
            contents[f"{number}.tar"] = b"\x1f\x8b\x08" + rng.randbytes(SIZE + rng.randrange(100_000))
            store.put(f"{number}.tar", contents[f"{number}.tar"])
        readers, kills, most, bad = [], 0, 0, []
        end = time.monotonic() + options.seconds
        kill_at = time.monotonic() + 2
        while time.monotonic() < end:
            while len(readers) < options.processes:
                readers.append(CONTEXT.Process(target=read, args=(cache, store, rng.randrange(10**9), log)))
                readers[-1].start()
            most = max(most, kept(cache.directory))
            if time.monotonic() > kill_at:
                victim = readers.pop(rng.randrange(len(readers)))
                os.kill(victim.pid, signal.SIGKILL)
                victim.join()
                kills += 1
                kill_at = time.monotonic() + rng.random() * 0.3
            bad += [f"a reader ended with {reader.exitcode}" for reader in readers if not reader.is_alive()]
            readers = [reader for reader in readers if reader.is_alive()]
        for reader in readers:
            reader.kill()
            reader.join()
        with cache.open("s3://b/0.tar", Store(store.root).fetch("0.tar")) as stream:
            if stream.read() != contents["0.tar"]:
                bad.append("the last shard is wrong")
        for entry in CacheDirectory(cache.directory).entries():
            if (
                entry.state == "complete"
                and pathlib.Path(entry.path).read_bytes() != contents[os.path.basename(entry.url)]
            ):
                bad.append(f"{entry.url} is stored wrong")
            if entry.state == "downloading":
                bad.append(f"{entry.url} is locked")
        outcomes = Counter(pathlib.Path(log).read_text().splitlines())
        allowed = LIMIT + options.processes * (SIZE + 100_000)
        requests = sum(len(store.asked(name)) for name in contents)
        print(
            json.dumps(
                {
                    "kills": kills,
                    "outcomes": outcomes,
                    "requests": requests,
                    "most_bytes": most,
                    "allowed_bytes": allowed,
                    "left": kept(cache.directory),
                }
            )
        )
        if most > allowed or kept(cache.directory) > LIMIT + 21:
            bad.append("there were more bytes than the limit and open shards")
        bad += [f"{count} x {outcome}" for outcome, count in outcomes.items() if "WRONG" in outcome]
        print("\n".join(bad) or "all is right")
        sys.exit(bool(bad))


if __name__ == "__main__":
    main()
