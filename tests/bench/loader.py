"""What keeping state costs in PipeLoader, and how long a resume takes: in one run, alternating,
medians.

    python tests/bench/loader.py [DIRECTORY]      writes about 60 MB there (default: a temporary
    directory), takes three minutes

Prints the figures beside their bars; exits with 1 if one is missed.
"""

import gc
import itertools
import statistics
import time
import warnings
from functools import partial

import psutil
from bars import bar, directory, exit_if_missed, in_turn
from peers.data import tiny
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp

BATCH, WORKERS = 64, 2
SLICES, SLICE = 60, 100  # of the 6 250 batches of an epoch


def pipe(urls):
    return (
        wp.ShardList(urls, shuffle=True, seed=1)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(1000)
        .decode_by_ext()
        .to_tuple("txt", "cls")
    )


def plain(urls):
    """The same pipeline in torch's DataLoader, without any state."""
    return DataLoader(pipe(urls).batch_samples(BATCH), batch_size=None, num_workers=WORKERS)


def stateful(urls):
    """The same in StatefulDataLoader."""
    return StatefulDataLoader(pipe(urls).batch_samples(BATCH).as_dataset(), batch_size=None, num_workers=WORKERS)


def ours(urls):
    """The same in PipeLoader."""
    return wp.PipeLoader(pipe(urls), batch_size=BATCH, num_workers=WORKERS)


def alternate(sources, spent, busy) -> None:
    """Take slices of batches from each source in turn, of one epoch; note the seconds of a batch of
    each slice, without those of starting workers.

    The workers of the others rest meanwhile, for they have read ahead what they may; so what the
    machine does besides hits all alike. ``busy`` gets the processor seconds of each source: of its
    workers, and of this process while it reads from it.
    """

    def read(name, items):
        start, own = time.perf_counter(), time.process_time()
        assert sum(1 for _ in itertools.islice(items, SLICE)) == SLICE
        busy[name] += time.process_time() - own
        return (time.perf_counter() - start) / SLICE

    ways, workers = {}, {}
    for name, source in sources.items():
        before, items = set(psutil.Process().children()), iter(source)
        next(items)
        workers[name] = set(psutil.Process().children()) - before
        busy[name] -= processor(workers[name])
        ways[name] = partial(read, name, items)
    for name, seconds in in_turn(ways, SLICES).items():
        spent[name] += seconds
        busy[name] += processor(workers[name])


def processor(processes) -> float:
    """The processor seconds that processes have used."""
    return sum(used.user + used.system for used in (process.cpu_times() for process in processes))


def main() -> None:
    warnings.simplefilter("ignore")
    with directory() as place:
        urls = tiny(place, shards=8)

        print(f"tiny samples, batches of {BATCH}, {WORKERS} workers")
        spent: dict[str, list[float]] = {make.__name__: [] for make in (plain, stateful, ours)}
        busy = dict.fromkeys(spent, 0.0)
        for _ in range(6):
            gc.collect()
            alternate({make.__name__: make(urls) for make in (plain, stateful, ours)}, spent, busy)
        for name, seconds in spent.items():
            print(
                f"  {name:<10}{BATCH / statistics.median(seconds):>12,.0f} samples/s in "
                f"{len(seconds)} slices of {SLICE} batches"
            )
        for peer, least in (("plain", 0.98), ("stateful", 1.0)):
            # of slices that followed each other
            ratios = [other / own for own, other in zip(spent["ours"], spent[peer], strict=True)]
            bar(f"ours against {peer}", statistics.median(ratios), least, least=True)
            low, _, high = statistics.quantiles(ratios, n=4)
            print(
                f"    half of the ratios lie between {low:.3f} and {high:.3f}; of the sums it is "
                f"{sum(spent[peer]) / sum(spent['ours']):.3f}"
            )
            print(f"    of the processor seconds it is {busy[peer] / busy['ours']:.3f}")

        print("64 lanes")
        loader = wp.PipeLoader(pipe(urls * 8), batch_size=BATCH, lanes=64)
        items = iter(loader)
        for _ in range(200):
            next(items)
        start = time.perf_counter()
        for _ in range(1000):
            loader.state_dict()
        bar("state_dict(), us", (time.perf_counter() - start) * 1e3, 200)
        del items

        print("from load_state_dict to the first batch, 400 000 samples")
        loader, states, total = ours(urls), {}, 400_000 // BATCH
        for number, _ in enumerate(loader):
            if number in (total // 10, total // 2, total * 9 // 10):
                states[number] = loader.state_dict()
        loader.close()
        seconds = {number: [] for number in states}
        for _ in range(5):
            for number, state in states.items():
                again = wp.PipeLoader(pipe(urls), batch_size=BATCH, num_workers=0, lanes=2)
                start = time.perf_counter()
                again.load_state_dict(state)
                next(iter(again))
                seconds[number].append(time.perf_counter() - start)
        times = [statistics.median(values) for values in seconds.values()]
        print("  at 10, 50 and 90 %:", ", ".join(f"{value * 1e3:.1f} ms" for value in times))
        bar("slowest against fastest", max(times) / min(times), 1.5)
    exit_if_missed()


if __name__ == "__main__":
    main()
