"""The digest of a set of samples: its values, and that it tells sets apart."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from wds_pipes.core.digest import NOTHING, add, from_text, in_epoch, of_samples, of_shard, subtract, to_text

KEYS = st.one_of(st.text(st.characters(blacklist_characters="\0"), max_size=300), st.text("01", min_size=7, max_size=9))
SAMPLES = st.lists(st.tuples(KEYS, st.sampled_from(["0", "1", "a\x0017"])), max_size=30)


def digest(samples):
    return of_samples([key for key, _ in samples], [of_shard(shard) for _, shard in samples])


def test_golden_vectors():
    """The values are part of the checkpoint format."""
    keys = ["000000001", "a", "n01440764/n01440764_10026", "ключ/é", "k" * 300, ""]
    assert [to_text(of_samples([key], [of_shard("7")])) for key in keys] == GOLDEN
    assert to_text(of_samples([f"{number:09d}" for number in range(1000)], [of_shard("7")] * 1000)) == GOLDEN_SUM
    assert to_text(in_epoch(of_samples(["a"], [of_shard("7")]), 3)) == GOLDEN_EPOCH


GOLDEN = [
    "a372699957fa26c2265ecfe6fa200455",
    "8d6a6bb6b123c737de1dbedbb31dfa43",
    "2d6b7516a65b01ad1777032c9d6fd41f",
    "f5a0f5c9a4a37b80292f2a7e1eb2c9d7",
    "1ff3457315e8153dd9b08ff7e9c495c6",
    "76d63d44df5378ff94f4f6ef52ceb542",
]
GOLDEN_SUM = "0e005557febdeba71a3b196113870be0"
GOLDEN_EPOCH = "f7ee5a36c34586878c5cecbe32ee34cf"


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms())
def test_it_is_a_sum(samples, random):
    """Many samples at once have the sum of the hashes of each, in any order, divided in any way."""
    whole = digest(samples)
    assert whole == add(digest([sample]) for sample in samples)
    random.shuffle(samples)
    cut = random.randrange(len(samples) + 1)
    parts = digest(samples[:cut]), digest(samples[cut:])
    assert add(parts) == whole
    assert subtract(whole, parts[0]) == parts[1]
    assert from_text(to_text(whole)) == whole
    assert add(in_epoch(part, 5) for part in parts) == in_epoch(whole, 5)


def test_sets_of_alike_keys_differ():
    """Pairs of keys that differ in single digits have distinct sums, although together they have
    the same digits: any 32 bits of the sums repeat no more often than by chance.
    """
    for form in ("{:02d}", "{:09d}", "im_{:04d}/0000{:04d}"):
        keys = [form.format(number, number) for number in range(64)]
        hashes = [of_samples([key], [of_shard(shard)]) for shard in "01" for key in keys]
        sums = {add(pair) for pair in itertools.combinations(hashes, 2)}
        for bits in range(0, 128, 32):
            parts = {int(to_text(found), 16) >> bits & 0xFFFFFFFF for found in sums}
            assert len(parts) >= len(sums) - 2  # 8128**2 / 2**33 = 0.008 by chance
        assert len(sums) == 128 * 127 // 2


def test_no_samples():
    assert of_samples([], []) == NOTHING
    assert to_text(NOTHING) == "0" * 32
