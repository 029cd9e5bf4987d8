"""Copies of ``pipe.as_dataset()``, and ranks to which it is passed, count epochs by themselves."""

import copy
import multiprocessing
import pickle

import pytest
from pipelines import keys_of, shuffled
from torch.utils.data import DataLoader


def epochs(dataset, workers, count=2, **options):
    loader = DataLoader(dataset, batch_size=None, num_workers=workers, **options)
    return [keys_of(loader) for _ in range(count)]


def send_epochs(dataset, workers, results):
    results.put(epochs(dataset, workers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "workers"), [(copy.deepcopy, 2), (lambda dataset: pickle.loads(pickle.dumps(dataset)), 1)]
)
def test_a_copy_comes_to_the_next_epoch_too(workers, make, urls):
    expected = epochs(shuffled(urls).as_dataset(), workers, 3)
    assert expected[0] != expected[1]
    dataset = shuffled(urls).as_dataset()
    copied = make(dataset)
    assert epochs(copied, workers, 3) == expected
    assert epochs(dataset, workers) == expected[:2]  # the epochs of the copy are not its own
    assert epochs(make(dataset), workers, 1) == expected[2:]  # a copy goes on where it was copied


@pytest.mark.slow
@pytest.mark.parametrize(("method", "ranks"), [("fork", 2), ("forkserver", 1)])
def test_ranks_do_not_share_epochs(method, ranks, urls):
    """Each begins with the epoch of the process that started it, one after another."""
    expected = epochs(shuffled(urls).as_dataset(), 2, 3)
    dataset = shuffled(urls).as_dataset()
    assert epochs(dataset, 2, 1) == expected[:1]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    for _ in range(ranks):
        rank = context.Process(target=send_epochs, args=(dataset, 2, results))
        rank.start()
        assert results.get(timeout=120) == expected[1:]
        rank.join()
    assert epochs(dataset, 2, 1) == expected[1:2]
