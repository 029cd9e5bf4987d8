"""PipeLoader over a SampleList: one global order, the same on any number of ranks and workers,
before and after any resume.
"""

import itertools

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from orders import Order, Phase, play

from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
SHARDS = {"some": [7, 0, 5, 12, 9], "few": [3, 2], "one": [1]}


@pytest.fixture(scope="session")
def indexed(tmp_path_factory):
    """Lists of shards with indexes, by name."""
    found = {}
    for name, counts in SHARDS.items():
        found[name] = make_shards(tmp_path_factory.mktemp(name), shards=len(counts), samples=counts)
        index_shards(found[name], offsets=True)
    return found


ORDER = st.builds(
    Order, st.booleans(), st.sampled_from([1, 1, 4]), st.integers(0, 3), st.sampled_from(["dicts", "tuples"])
)
PHASE = st.builds(
    Phase,
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    workers=st.integers(0, 3),
    size=st.sampled_from([1, 2, 3, 5]),
    end=st.sampled_from(["exact", "drop", "pad"]),
    cut=st.sampled_from([0, 1, 1, 2, 3, 5]),
    own=st.booleans(),
)
# "alike": only the workers change, "same": ranks x batch size stays the same
CHANGES = st.sampled_from(["any", "alike", "same"])


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    shards=st.sampled_from(sorted(SHARDS)), order=ORDER, phases=st.lists(PHASE, min_size=1, max_size=6), changes=CHANGES
)
def test_random_histories(shards, order, phases, changes, indexed):
    """The sequence of the ranks' batches is that of an uninterrupted run in one process."""
    if changes == "alike":
        phases = [phases[0]._replace(workers=phase.workers, cut=phase.cut, own=phase.own) for phase in phases]
    elif changes == "same":
        sizes = [(1, 6), (2, 3), (3, 2), (6, 1)]
        phases = [
            phase._replace(ranks=sizes[place % 4][0], size=sizes[place % 4][1], end=phases[0].end)
            for place, phase in zip(itertools.count(phases[0].ranks), phases, strict=False)
        ]
    outcome = play(indexed[shards], sum(SHARDS[shards]), order, phases)
    event(f"{outcome.changes} changes")
    assert outcome.found == outcome.expected
    assert (outcome.lost, outcome.repeated) == (0, 0)
