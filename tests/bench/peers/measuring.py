"""One measurement, in a process of its own: ``python -m peers.measuring JOB RESULT``.

JOB is JSON. RESULT is a file of JSON: ``value``, with more about a resume, or ``reason``, why there
is no value.
"""

import importlib
import importlib.metadata
import itertools
import json
import os
import pickle
import random
import sys
import time
import traceback
import warnings
from collections import Counter

CHUNK = 256  # samples between two looks at the clock
IN_FLIGHT = 3  # batches of each worker or thread, at most: torch's DataLoader has 2, PipeLoader one more


def rate(passes, seconds):
    """Samples per second in passes that take ``seconds``, without the first sample of each."""
    count, spent = 0, 0.0
    while spent < seconds or not count:
        items = iter(passes())
        if next(items, None) is None:
            raise ValueError("there are no samples")
        start = time.perf_counter()
        while taken := sum(1 for _ in itertools.islice(items, CHUNK)):
            count += taken
            if spent + time.perf_counter() - start >= seconds:
                break
        spent += time.perf_counter() - start
    return count / spent


def batch_rate(batches, processors):
    """Samples per second in the middle of one pass: from the first batch of each worker or thread
    to the last one before those that are in flight at the end. Else the batches that a loader has
    ready when the clock starts would count as made in no time.
    """
    count, counts, times = 0, [], []
    for batch in batches:
        count += len(batch[0])
        counts.append(count)
        times.append(time.perf_counter())
    first = processors - 1
    last = max(first + 1, len(times) - 1 - IN_FLIGHT * processors)
    if last >= len(times):
        raise ValueError("there are too few batches")
    return (counts[last] - counts[first]) / (times[last] - times[first])


def access_rate(read, count, seconds):
    """Samples per second at random places."""
    rng = random.Random(1)
    for _ in range(16):
        read(rng.randrange(count))
    places = [rng.randrange(count) for _ in range(4096)]
    done, spent, start = 0, 0.0, time.perf_counter()
    while not done or spent < seconds:
        for place in places[done % 4096 :][:CHUNK]:
            read(place)
        done, spent = done + CHUNK, time.perf_counter() - start
    return done / spent


def save(adapter, path):
    """Read one epoch without a break, and keep its state at the half and what came after it;
    returns the bytes of the state as JSON, or pickled if it is not JSON.
    """
    batches, state_of = adapter.resumable(None)
    before = list(names_of(itertools.islice(batches, adapter.data.count("images") // 64 // 2)))
    state = state_of()
    pickled = pickle.dumps(state)
    after = list(names_of(batches))
    if not after:
        raise ValueError(f"the epoch ended after {len(before)} samples")
    with open(path, "wb") as file:
        pickle.dump((before, pickled, after), file)
    try:
        return len(json.dumps(pickle.loads(pickled)))
    except (TypeError, ValueError):
        return len(pickled)


def resume(adapter, path):
    """Continue from the state of ``save``; returns the seconds to the first batch, and how the rest
    of the epoch differs from that without a break.
    """
    with open(path, "rb") as file:
        before, pickled, expected = pickle.load(file)
    start = time.perf_counter()
    batches, _ = adapter.resumable(pickle.loads(pickled))
    first = next(batches, ())
    seconds = time.perf_counter() - start
    # A library that begins another epoch after this one is cut off.
    most = len(before) + 2 * len(expected)
    return seconds, outcome(expected, list(itertools.islice(names_of(itertools.chain([first], batches)), most)))


def outcome(expected, found):
    """Say how the samples after a resume differ from those that had come without a break."""
    lost = (Counter(expected) - Counter(found)).total()
    repeated = (Counter(found) - Counter(expected)).total()
    if lost or repeated:
        return f"lost {lost}, repeated {repeated}"
    return "exact" if found == expected else "other order"


def names_of(batches):
    """Yield the names of samples as plain Python: strings, or numbers that may be numpy's."""
    for batch in batches:
        for name in batch:
            yield name if isinstance(name, (str, int, bytes)) else int(name)


def measure(adapter, what, seconds):
    """Measure one thing; see ``rows.COLUMNS``."""
    state = os.path.join(adapter.work, "state")
    match what.split():
        case ["prepare"]:
            adapter.prepare()
            return {"value": 0}
        case ["raw", kind]:
            value = rate(lambda: adapter.samples(kind), seconds)
        case ["shuffled", kind]:
            value = rate(lambda: adapter.samples(kind, shuffle=True), seconds)
        case ["access", kind]:
            value = access_rate(adapter.access(kind), adapter.data.count(kind), seconds)
        case ["decoded"]:
            value = batch_rate(adapter.decoded(workers=0, threads=0), 1)
        case ["decoded", "workers"]:
            value = batch_rate(adapter.decoded(workers=2, threads=0), 2)
        case ["decoded", "threads"]:
            value = batch_rate(adapter.decoded(workers=0, threads=2), 2)
        case ["save"]:
            value = save(adapter, state)
        case ["resume"]:
            value, found = resume(adapter, state)
            return {"value": value, "outcome": found}
    return {"value": value}


def last_line(error):
    """The line of an error that says most: that of a worker's error is its last one."""
    lines = [line.strip() for line in "".join(traceback.format_exception_only(error)).splitlines() if line.strip()]
    return lines[-1 if any(line.startswith("Traceback") for line in lines[1:]) else 0][:200]


def main(job, result_path):
    """Measure what a job says, and write the result."""
    from peers.adapters.base import adapter_of
    from peers.data import Data

    warnings.simplefilter("ignore")
    try:
        versions = {package: importlib.metadata.version(package) for package in job["packages"]}
        kind = adapter_of(job["adapter"])
        os.makedirs(job["work"], exist_ok=True)
        adapter = kind(Data(**job["data"]), job["work"])
        for library in kind.imports:
            importlib.import_module(library)
        result = {**measure(adapter, job["measurement"], job["seconds"]), "versions": versions}
    except importlib.metadata.PackageNotFoundError as error:
        result = {"reason": f"not installed: pip install {error.name}"}
    except Exception as error:  # of any library: it is the result of this measurement
        traceback.print_exc()
        result = {"reason": last_line(error)}
    with open(f"{result_path}.partial", "w") as file:
        json.dump(result, file)
    os.replace(f"{result_path}.partial", result_path)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
