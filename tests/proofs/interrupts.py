"""Interrupts at random moments inside next() of a PipeLoader: each batch comes once, or the
iterator says that it was interrupted.

    python tests/proofs/interrupts.py [--rounds 400] [--minutes M] [--seed N]

Each round runs two epochs with 0 or 2 workers, with or without threads in them. A timer raises
KeyboardInterrupt again and again. The loop continues with the same iterator, which must raise
RuntimeError or return the next batch, or with the state and a new iterator. Exit code 1 if a batch
was lost, came twice or was another one.
"""

import random
import signal
import sys
import tempfile
import warnings

from amount import parser, rounds
from pipelines import keys_of

import wds_pipes as wp
from wds_pipes.testing import make_shards


def make(urls, workers, cut=None, threads=None):
    pipe = wp.ShardList(urls, shuffle=True, seed=5).open_shards().load_tar().group_by_key().shuffle_buffer(3)
    pipe = pipe.map_samples(dict, threads=threads)
    loader = wp.PipeLoader(
        pipe,
        batch_size=2,
        collate=keys_of,
        lanes=2,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    return loader if cut is None else loader.with_epoch(batches=cut)


def take(items, given, most):
    """Take batches up to ``most`` in all; returns whether the iterator ended before."""
    for batch in items:
        given.append(batch)
        if len(given) == most:
            return False
    return True


def interrupt(number, frame):
    """Raises KeyboardInterrupt inside ``take`` only."""
    while frame is not None:
        if frame.f_code is take.__code__:
            raise KeyboardInterrupt
        frame = frame.f_back


def trial(urls, expected, workers, rng):
    """One run through all of ``expected``; returns how often it was interrupted.

    Raises:
        AssertionError: a batch was lost, came twice or was another one.
    """
    cut, longest = rng.choice([None, 3]), rng.choice([0.0005, 0.005, 0.05] if workers else [0.0003, 0.002])
    loader, given, interrupts = make(urls, workers, cut, rng.choice([None, 2])), [], 0
    items = iter(loader)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        while len(given) < len(expected):
            ended, same = False, rng.random() < 0.5
            if interrupts < 12:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, longest))
            try:
                ended = take(items, given, len(expected))
            except KeyboardInterrupt:
                interrupts += 1
            except RuntimeError as error:
                same = False
                if "was interrupted" not in str(error):
                    raise
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert given == expected[: len(given)], f"{given} instead of {expected}"
            if ended:
                assert len(given) % (cut or len(expected) // 2) == 0, f"an epoch ends after {len(given)} batches"
                items = iter(loader)
            elif not same:
                loader.load_state_dict(loader.state_dict())
                items = iter(loader)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        loader.close()
    return interrupts


def run(directory, options):
    """The rounds, with 0 and with 2 workers; returns how many runs were made, and interrupts."""
    urls = make_shards(directory, shards=5, samples=[3, 0, 5, 2, 4])
    plain = make(urls, 0)
    expected = [batch for _ in range(2) for batch in plain]
    runs = interrupts = 0
    for number in rounds(options):
        for workers in (0, 2):
            interrupts += trial(urls, expected, workers, random.Random(f"{options.seed} {number} {workers}"))
            runs += 1
    return runs, interrupts


if __name__ == "__main__":
    options = parser(__doc__, 400).parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    sys.unraisablehook = lambda _: None  # hooks around a fork are interrupted too, and Python reports each
    with tempfile.TemporaryDirectory() as folder:
        try:
            runs, found = run(folder, options)
        except AssertionError as error:
            sys.exit(f"wrong: {error}; seed={options.seed}")
    print(f"runs={runs} interrupts={found} wrong=0 seed={options.seed}")
