"""The digest of a set of samples: its values, and that it tells sets apart."""

from hypothesis import given, settings
from hypothesis import strategies as st

from wds_pipes.core.digest import (
    NOTHING,
    add,
    as_counts,
    from_text,
    in_epoch,
    of_counts,
    of_samples,
    of_shard,
    subtract,
    to_text,
)

# the keys of tars: no surrogates but those of bytes that are not UTF-8
CHARACTERS = st.one_of(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]),
    st.sampled_from([chr(code) for code in range(0xDC80, 0xDD00)]),
)
KEYS = st.one_of(st.text(CHARACTERS, max_size=300), st.text("01", min_size=7, max_size=9))
SAMPLES = st.lists(st.tuples(KEYS, st.sampled_from(["0", "1", "a\x0017"])), max_size=30)


def digest(samples):
    return of_samples((key, of_shard(shard)) for key, shard in samples)


def test_golden_vectors():
    """The values are part of the checkpoint format."""
    keys = ["000000001", "a", "n01440764/n01440764_10026", "ключ/é", "k" * 300, ""]
    assert [to_text(digest([(key, "7")])) for key in keys] == GOLDEN
    assert to_text(digest((f"{number:09d}", "7") for number in range(1000))) == GOLDEN_SUM
    assert to_text(in_epoch(digest([("a", "7")]), 3)) == GOLDEN_EPOCH


GOLDEN = [
    "33e286c92454e91bb8e2c770c47eb605",
    "bf9511b13ac48655e5a6c46e51571da0",
    "e3318a87d263c9f03446050ab8aee643",
    "24c4c5728ee902eddb049df0daf076b5",
    "0f48af5db6643b6d7e7f3fda15de2a28",
    "2a424ae916519062900f5a38a8cb288f",
]
GOLDEN_SUM = "1436e875f2d3f3f2938f55fe09425331"
GOLDEN_EPOCH = "a4234ea21f2f305909af36b4d0cd8ba0"


@settings(max_examples=50, deadline=None)
@given(SAMPLES, st.randoms())
def test_it_is_a_sum(samples, random):
    """Of the hashes of all samples, in any order, divided in any way."""
    whole = digest(samples)
    assert whole == add(digest([sample]) for sample in samples)
    random.shuffle(samples)
    cut = random.randrange(len(samples) + 1)
    parts = digest(samples[:cut]), digest(samples[cut:])
    assert add(parts) == whole
    assert subtract(whole, parts[0]) == parts[1]
    assert from_text(to_text(whole)) == of_counts(as_counts(whole)) == whole
    assert add(in_epoch(part, 5) for part in parts) == in_epoch(whole, 5)


def test_key_and_shard_are_told_apart():
    """And two samples with each other's shard have another sum."""
    assert digest([("a", "1"), ("b", "2")]) != digest([("b", "1"), ("a", "2")])
    assert digest([("1a", "1")]) != digest([("a", "11")])


def test_no_samples():
    assert of_samples([]) == NOTHING
    assert to_text(NOTHING) == "0" * 32
