"""Whatever the sizes, the limits and the faults: the samples are those of local shards."""

import tempfile

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote import bare, put_all, samples

from wds_pipes.testing import make_shards

MIB = 1 << 20
FAULT = st.fixed_dictionaries({"prob": st.sampled_from([0.1, 0.3])}) | st.fixed_dictionaries(
    {"times": st.integers(1, 3), "skip": st.integers(0, 3)}
)
KIND = st.sampled_from(
    [
        {"status": 503},
        {"drop": True},
        {"reset_after": 100_000},
        {"close_after": 0},
        {"truncate": 700_000},
        {"add_length": 5000},
        {"latency": 0.05},
        {"ignore_range": True},
        {"no_length": True},
    ]
)

# Together: a wrong size, which looks like an object that changes.
LIES = [{"ignore_range", "add_length"}, {"ignore_range", "truncate"}]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    size=st.sampled_from([10, 1000, 100_000, 400_000]),
    options=st.fixed_dictionaries(
        {
            "readahead_bytes": st.sampled_from([MIB, 2 * MIB, 5 * MIB]),
            "connections": st.integers(1, 9),
            "shards_ahead": st.integers(0, 3),
        }
    ),
    interleave=st.sampled_from([0, 0, 2]),
    rules=st.lists(st.tuples(FAULT, KIND), max_size=2).filter(
        lambda rules: not any(lies.issubset(name for _, what in rules for name in what) for lies in LIES)
    ),
)
def test_any_of_them(web, *, counts, size, options, interleave, rules):
    with tempfile.TemporaryDirectory() as directory:
        local = make_shards(
            directory,
            shards=len(counts),
            samples=counts,
            fields={"bin": lambda rng, _: rng.randbytes(rng.randrange(size))},
        )
        urls = put_all(web, local)
        alone = samples(local)
        web.faults.rules(*({"match": web.reads, **where, **what} for where, what in rules))
        pipe = samples(urls, timeout_seconds=20, **options)
        if interleave:
            alone, pipe = alone.interleave_shards(interleave), pipe.interleave_shards(interleave)
        assert [bare(sample) for sample in pipe] == [bare(sample) for sample in alone]
