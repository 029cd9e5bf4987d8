"""shuffle_buffer: an order that never changes, bounded lateness, and a small exact position."""

import itertools
import statistics
import weakref

import pytest
import torch
from sources import Given

from wds_pipes.core.stream import Stream
from wds_pipes.stages import FilterSamples, ShuffleBuffer
from wds_pipes.testing import check_resume

# The orders of 0 to 19 by shuffle_buffer(4) and shuffle_buffer(3, seed=11) with seed 0: they never
# change, see ordering.py.
GOLDEN = [0, 2, 1, 3, 7, 4, 5, 6, 8, 12, 9, 10, 11, 13, 15, 14, 19, 16, 18, 17]
GOLDEN_OWN_SEED = [1, 0, 2, 4, 6, 3, 5, 7, 8, 9, 11, 10, 12, 13, 15, 14, 16, 18, 17, 19]


def order(count, size, *, epoch=0, seed=0):
    stream = Stream(ShuffleBuffer(Given(range(count), seed=seed), size))
    stream.set_epoch(epoch)
    return list(stream)


@pytest.mark.parametrize(("count", "size"), [(0, 3), (1, 3), (20, 1), (50, 9)])
def test_resumes_exactly_over_many_blocks(count, size):
    """Also where the position of the source has moved on, and where there is no data."""
    check_resume(lambda: Stream(ShuffleBuffer(Given(range(count)), size)))


def test_two_in_a_chain_resume_and_differ():
    """The second one has an order of its own, also after a stage that leaves samples out."""
    check_resume(lambda: Stream(ShuffleBuffer(FilterSamples(ShuffleBuffer(Given(range(40)), 5), is_even), 4)))
    once = order(1000, 50)
    twice = list(Stream(ShuffleBuffer(ShuffleBuffer(Given(range(1000)), 50), 50)))
    again = [once[place] for place in once]
    assert twice not in (once, again)


def is_even(number):
    return number % 2 == 0


def test_golden_order():
    """The order is part of the checkpoint format."""
    assert order(20, 4) == GOLDEN
    assert list(Stream(ShuffleBuffer(Given(range(20)), 3, seed=11))) == GOLDEN_OWN_SEED


@pytest.mark.parametrize("size", [1, 2, 5, 8, 100, 2_000, 100_000])
def test_output_is_a_permutation_that_is_late_at_most_by_the_window(size):
    """Every item once, none more than 2 * size - 1 positions later than it came. Size 1 leaves the
    order as it is.
    """
    shuffled = order(5_000, size)
    assert sorted(shuffled) == list(range(5_000))
    assert (shuffled == list(range(5_000))) == (size == 1)
    assert max(place - number for place, number in enumerate(shuffled)) <= 2 * size - 1


def test_order_depends_on_epoch_seed_and_lane_only():
    """Two runs are the same; another epoch, seed or own seed is not."""
    assert order(500, 50) == order(500, 50)
    orders = [order(500, 50), order(500, 50, epoch=1), order(500, 50, epoch=2), order(500, 50, seed=1), order(500, 60)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


def test_own_seed_replaces_the_seed_of_the_shards():
    """With seed= the seed of the source does not matter, and the own seed does."""
    with_own = [
        list(Stream(ShuffleBuffer(Given(range(100), seed=seed), 10, seed=own)))
        for seed, own in ((0, 3), (1, 3), (0, 4))
    ]
    assert with_own[0] == with_own[1] != with_own[2]


def test_lanes_have_orders_of_their_own():
    """Positions, not values, are shuffled differently in each lane."""
    orders = []
    for lane in (0, 1):
        source = Given(range(200))
        source.context.lane, source.context.lanes = lane, 2
        orders.append([number // 2 for number in Stream(ShuffleBuffer(source, 20))])
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(100))
    assert orders[0] != orders[1]


def test_holds_about_size_and_at_most_twice_that():
    """The items that the source has yielded minus those that have left, in the
    middle of the data.
    """
    source, size = Given(range(20_000)), 500
    held = [source.taken[0] - left for left, _ in enumerate(Stream(ShuffleBuffer(source, size)), 1)]
    assert max(held) + 1 <= 2 * size
    assert statistics.mean(held[2 * size : -2 * size]) == pytest.approx(size, rel=0.05)


def test_frees_the_items_that_have_left():
    """Only waiting items are kept in memory: tensors that left are freed when the caller drops
    them.
    """
    source = [torch.zeros(1) for _ in range(300)]
    alive = [weakref.ref(item) for item in source]
    stream = Stream(ShuffleBuffer(Draining(source), 10))
    for left, item in enumerate(stream, 1):
        del item
        assert sum(ref() is not None for ref in alive) <= 300 - left + 1


class Draining(Given):
    """Forgets the items that it has yielded."""

    def run(self):
        while self.given:
            yield self.given.pop(0)


def test_first_sample_leaves_before_the_buffer_is_full():
    """A loader need not wait until size samples are read."""
    firsts = []
    for seed in range(20):
        source = Given(range(10_000), seed=seed)
        next(iter(Stream(ShuffleBuffer(source, 1_000))))
        firsts.append(source.taken[0])
    assert statistics.mean(firsts) < 150


def test_displacement_is_that_of_an_even_jitter():
    """A standard deviation of 2 * size / sqrt(12), about 0.58 * size."""
    size = 1_000
    shuffled = order(100_000, size)[2 * size : -2 * size]
    moved = [place - number for place, number in enumerate(shuffled, 2 * size)]
    assert statistics.pstdev(moved) == pytest.approx(0.577 * size, rel=0.03)
    assert abs(statistics.mean(moved)) < 0.02 * size


@pytest.mark.parametrize("size", [1, 8, 100])
def test_resume_reads_again_at_most_what_the_docstring_says(size):
    """2.25 * size samples, wherever it is cut."""
    total, worst = 12 * size + 200, 0
    whole = order(total, size)
    stream = Stream(ShuffleBuffer(Given(range(total)), size))
    for left, _ in enumerate(stream, 1):
        if left % max(1, size // 7) or left == total:
            continue
        state, taken = stream.state_dict(), stream.stage.source.taken[0]
        resumed = Stream(ShuffleBuffer(Given(range(total)), size))
        resumed.load_state_dict(state)
        assert next(iter(resumed)) == whole[left]
        counted = Stream(ShuffleBuffer(Given(range(total)), size))
        next(itertools.islice(counted, left, None))
        new = counted.stage.source.taken[0] - taken
        worst = max(worst, resumed.stage.source.taken[0] - new)
    assert size < worst <= 2.25 * size


def test_state_is_a_few_small_numbers():
    """However large the buffer, there is no sample in the state."""
    stream = Stream(ShuffleBuffer(Given(range(3_000)), 1_000))
    next(itertools.islice(stream, 2_500, None))
    source, shuffle = stream.state_dict()["lanes"]["0"]["position"]
    assert set(source) == {"number"}
    assert set(shuffle) == {"first", "left"}
    assert all(isinstance(value, int) for value in shuffle.values())
