"""One measurement, in a process of its own: ``python -m peers.measuring JOB RESULT``.

Both are JSON files. RESULT has ``value``, with more about a resume, or ``reason``, why there is no
value.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from peers.data import Data

if TYPE_CHECKING:
    from peers.adapters.base import Adapter

CHUNK = 256  # samples between two looks at the clock
IN_FLIGHT = 3  # batches of each worker or thread, at most: torch's DataLoader has 2, PipeLoader one more


def rate(passes: Callable[[], Iterable[Any]], seconds: float) -> float:
    """Samples per second in passes that take ``seconds``, without the first sample of each."""
    count, spent = 0, 0.0
    while spent < seconds:
        items = iter(passes())
        if next(items, None) is None:
            raise ValueError("there are no samples")
        start = time.perf_counter()
        before, more = count, True
        while more:  # at least one chunk, however slow the machine is
            taken = sum(1 for _ in itertools.islice(items, CHUNK))
            count, more = count + taken, taken == CHUNK and spent + time.perf_counter() - start < seconds
        spent += time.perf_counter() - start
        if count == before:
            raise ValueError("a pass has one sample only")
        del items
    return count / spent


def batch_rate(batches: Iterable[Any], processors: int) -> float:
    """Samples per second in the middle of one pass: from the first batch of each worker or thread
    to the last one before those that are in flight at the end. Else the batches that a loader has
    ready when the clock starts would count as made in no time.
    """
    count, counts, times = 0, list[int](), list[float]()
    for batch in batches:
        if isinstance(batch, float):  # a rate that the adapter has measured itself
            return float(batch)
        count += len(batch[0])
        counts.append(count)
        times.append(time.perf_counter())
    first = processors - 1
    last = max(first + 1, len(times) - 1 - IN_FLIGHT * processors)
    if last >= len(times):
        raise ValueError("there are too few batches")
    return (counts[last] - counts[first]) / (times[last] - times[first])


def access_rate(read: Callable[[int], Any], count: int, seconds: float) -> float:
    """Samples per second at random places."""
    rng = random.Random(1)
    places = [rng.randrange(count) for _ in range(4096)]
    for place in places[:16]:
        read(place)
    done, spent, start = 0, 0.0, time.perf_counter()
    while not done or spent < seconds:
        for place in places[done % 4096 :][:CHUNK]:
            read(place)
        done, spent = done + CHUNK, time.perf_counter() - start
    return done / spent


def save(adapter: Adapter, path: str) -> dict[str, Any]:
    """Read one epoch without a break, and keep its state at the half and what came after it."""
    batches, state_of = adapter.resumable(None)
    half = adapter.data.count("images") // 64 // 2
    before, state, after = list[Any](), None, list[Any]()
    for number, names in enumerate(batches, 1):
        (before if number <= half else after).extend(map(_plain, names))
        if number == half:
            state = pickle.dumps(state_of())
    if state is None or not after:
        raise ValueError(f"the epoch ended after {len(before)} samples")
    with open(path, "wb") as file:
        pickle.dump((before, state, after), file)
    return {"value": _size(pickle.loads(state))}


def resume(adapter: Adapter, path: str) -> dict[str, Any]:
    """Continue from the state of ``save``: the seconds to the first batch, and how the rest of the
    epoch differs from that without a break.
    """
    with open(path, "rb") as file:
        before, state, expected = pickle.load(file)
    start = time.perf_counter()
    batches, _ = adapter.resumable(pickle.loads(state))
    first = next(batches, None)
    if first is None:
        return {"reason": f"the resume lost all {len(expected)} samples that were left"}
    seconds = time.perf_counter() - start
    # A library that begins another epoch after this one is cut off.
    most = len(before) + 2 * len(expected)
    rest = itertools.islice(itertools.chain(first, itertools.chain.from_iterable(batches)), most)
    return {"value": seconds, "outcome": outcome(before, expected, [_plain(name) for name in rest])}


def outcome(before: Sequence[Any], expected: Sequence[Any], found: Sequence[Any]) -> str:
    """Say how the samples after a resume differ from those that had come without a break."""
    if list(found) == list(expected):
        return "exact"
    lost = sum((Counter(expected) - Counter(found)).values())
    repeated = sum((Counter(found) - Counter(expected)).values())
    if not lost and not repeated:
        return "other order"
    return f"lost {lost}, repeated {repeated}"


def _plain(name: Any) -> Any:
    return name if isinstance(name, (str, int, bytes)) else int(name)


def _size(state: Any) -> int:
    """The bytes of a state as JSON, or pickled if it is not JSON."""
    try:
        return len(json.dumps(state))
    except (TypeError, ValueError):
        return len(pickle.dumps(state))


def measure(adapter: Adapter, what: str, seconds: float) -> dict[str, Any]:
    """Measure one thing; see ``rows.MEASUREMENTS``."""
    data, state = adapter.data, os.path.join(adapter.work, "state")
    match what.split():
        case ["prepare"]:
            start = time.perf_counter()
            adapter.prepare()
            return {"value": time.perf_counter() - start}
        case ["raw", kind]:
            return {"value": rate(lambda: adapter.raw(kind), seconds)}
        case ["shuffled", kind]:
            return {"value": rate(lambda: adapter.shuffled(kind), seconds)}
        case ["access", kind]:
            return {"value": access_rate(adapter.access(kind), data.count(kind), seconds)}
        case ["decoded"]:
            return {"value": batch_rate(adapter.decoded(0, 0), 1)}
        case ["decoded", "workers"]:
            return {"value": batch_rate(adapter.decoded(2, 0), 2)}
        case ["decoded", "threads"]:
            return {"value": batch_rate(adapter.decoded(0, 2), 2)}
        case ["save"]:
            return save(adapter, state)
        case ["resume"]:
            return resume(adapter, state)
    raise ValueError(f"there is no measurement {what!r}")


def _last_line(lines: Iterable[str]) -> str:
    """Return the line of an error that says most: that of a worker's error is its last one."""
    found = [line.strip() for line in "".join(lines).splitlines() if line.strip()]
    return found[-1 if any(line.startswith("Traceback") for line in found[1:]) else 0][:200]


def main(job_path: str, result_path: str) -> None:
    """Measure what a job says, and write the result."""
    from peers.adapters.base import adapter_of

    warnings.simplefilter("ignore")
    with open(job_path) as file:
        job = json.load(file)
    result: dict[str, Any]
    try:
        versions = {package: importlib.metadata.version(package) for package in job["packages"]}
        kind = adapter_of(job["adapter"])
        os.makedirs(job["work"], exist_ok=True)
        kind.load()
        result = measure(kind(Data(**job["data"]), job["work"]), job["measurement"], job["seconds"])
        result["versions"] = versions
    except importlib.metadata.PackageNotFoundError as error:
        result = {"reason": f"not installed: pip install {error.name}"}
    except Exception as error:  # of any library: it is the result of this measurement
        traceback.print_exc()
        result = {"reason": _last_line(traceback.format_exception_only(error))}
    with open(f"{result_path}.partial", "w") as file:
        json.dump(result, file)
    os.replace(f"{result_path}.partial", result_path)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
