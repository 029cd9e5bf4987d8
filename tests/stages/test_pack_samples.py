"""PackSamples: packs of a token budget."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import flat, loaded, resumed, through_json, tokens_of
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples, PackSamples
from wds_pipes.testing import check_resume, make_shards

BUDGET = 10
METHODS = ["best-fit", "first-fit", "wrap"]


def documents(lengths):
    """Samples whose tokens are all distinct."""
    starts = np.cumsum([0, *lengths])
    return [
        {"__key__": str(number), "tokens": np.arange(start, start + length), "cls": number}
        for number, (start, length) in enumerate(zip(starts, lengths, strict=False))
    ]


def packed(samples, budget=BUDGET, **options):
    """The packs, and the counts of the epoch."""
    stream = Stream(PackSamples(Given(samples), "tokens", budget, **options))
    return list(stream), stream.counts()


def parts_of(pack):
    """The tokens of each part, by its key."""
    ends = pack["cu_seqlens"].tolist()
    return [
        (key, pack["tokens"][start:stop].tolist())
        for key, (start, stop) in zip(pack["__key__"], itertools.pairwise(ends), strict=False)
    ]


LENGTHS = st.lists(st.integers(0, 14), max_size=40)


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.sampled_from(METHODS[:2]), st.integers(1, 9), st.booleans())
def test_each_document_is_whole_in_one_pack(lengths, method, window, cuts):
    samples = documents(lengths)
    packs, counts = packed(samples, method=method, window=window, too_long="cut" if cuts else "drop")
    kept = [sample for sample in samples if len(sample["tokens"]) > 0 and (cuts or len(sample["tokens"]) <= BUDGET)]
    expected = {sample["__key__"]: sample["tokens"].tolist()[:BUDGET] for sample in kept}
    assert sorted(flat(map(parts_of, packs))) == sorted(expected.items())
    assert all(1 <= len(pack["tokens"]) <= BUDGET for pack in packs)
    longer = sum(length > BUDGET for length in lengths) if cuts else 0
    assert (counts["delivered"], counts["dropped"]) == (len(kept), len(samples) - len(kept))
    assert counts.get("cut", 0) == longer


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.booleans())
def test_wrap_makes_full_packs_of_one_sequence(lengths, drop_last):
    samples = documents(lengths)
    packs, counts = packed(samples, method="wrap", drop_last=drop_last)
    tokens = [token for pack in packs for token in pack["tokens"].tolist()]
    assert tokens == list(range(sum(lengths)))[: len(tokens)]
    assert len(tokens) == sum(lengths) - (sum(lengths) % BUDGET if drop_last else 0)
    assert all(len(pack["tokens"]) == BUDGET for pack in packs[:-1])
    ends = list(itertools.accumulate(lengths))
    whole = sum(length > 0 and end <= len(tokens) for length, end in zip(lengths, ends, strict=True))
    assert (counts["delivered"], counts["dropped"]) == (whole, len(samples) - whole)


@pytest.mark.parametrize(("method", "firsts"), [("best-fit", [[0, 2], [1], [3]]), ("first-fit", [[0], [1], [2, 3]])])
def test_where_documents_go(method, firsts):
    """Best-fit begins with the longest of a window, first-fit with the first."""
    lengths = {"best-fit": [3, 8, 7, 6], "first-fit": [8, 9, 3, 6]}[method]
    packs, _ = packed(documents(lengths), method=method, window=5)
    assert [[int(key) for key in pack["__key__"]] for pack in packs] == firsts


def test_the_emptiest_pack_is_filled_up_in_the_next_window():
    packs, _ = packed(documents([6, 9, 4, 9]), window=2)
    assert [pack["__key__"] for pack in packs] == [["1"], ["0", "2"], ["3"]]


def test_a_pack_is_what_attention_over_sequences_of_different_lengths_takes():
    samples = [
        {"__key__": "a", "tokens": torch.tensor([5, 6, 7]), "labels": [6, 7, -100], "note": "x"},
        {"__key__": "b", "tokens": torch.tensor([8, 9]), "labels": [9, -100], "note": "yz"},
    ]
    [pack], _ = packed(samples, aligned=["labels"])
    assert list(pack) == ["__key__", "tokens", "labels", "note", *MADE]
    assert (pack["__key__"], pack["note"], pack["max_seqlen"]) == (["a", "b"], ["x", "yz"], 3)
    for name, values, dtype in (
        ("tokens", [5, 6, 7, 8, 9], torch.int64),
        ("labels", [6, 7, -100, 9, -100], torch.int64),
        ("cu_seqlens", [0, 3, 5], torch.int32),
        ("position_ids", [0, 1, 2, 0, 1], torch.int64),
        ("document_ids", [0, 0, 0, 1, 1], torch.int32),
    ):
        assert (pack[name].tolist(), pack[name].dtype) == (values, dtype)


MADE = ["cu_seqlens", "max_seqlen", "position_ids", "document_ids"]


def test_packs_that_are_filled_up_can_be_stacked():
    """What fills them up is a part of its own, since kernels leave other rows undefined."""
    samples = [{"tokens": [1, 2, 3], "mask": [1.0, 0.5, 1.0]}, {"tokens": [4] * 9, "mask": [1.0] * 9}]
    first, second = packed(samples, aligned=["mask"], pad={"tokens": -1, "mask": 0})[0]
    assert first["tokens"].tolist() == [1, 2, 3, *[-1] * 7]
    assert first["mask"].tolist() == [1.0, 0.5, 1.0, *[0.0] * 7]
    assert (first["cu_seqlens"].tolist(), first["max_seqlen"]) == ([0, 3, 10], 7)
    assert first["position_ids"].tolist() == [0, 1, 2, *range(7)]
    assert first["document_ids"].tolist() == [0, 0, 0, *[-1] * 7]
    assert torch.stack([first["tokens"], second["tokens"]]).shape == (2, BUDGET)
    [full] = packed([{"tokens": [1] * BUDGET}], pad=0)[0]
    assert (full["cu_seqlens"].tolist(), full["document_ids"].tolist()) == ([0, BUDGET], [0] * BUDGET)


def test_packs_of_different_lengths_are_told_to_be_filled_up():
    """Not what images need."""
    batch = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(
        wp.SampleError, match=r"different lengths: fill them up with pad= of pack_samples\(\)"
    ) as caught:
        list(Stream(BatchSamples(Given(batch), 2)))
    assert "images" not in str(caught.value)


def attention(rows, mask=None):
    scores = rows @ rows.T
    return torch.softmax(scores if mask is None else scores.masked_fill(~mask, -torch.inf), dim=1) @ rows


def test_attention_with_a_pack_is_that_of_each_document():
    """By the document ids, as in a mask of FlexAttention."""
    torch.manual_seed(0)
    vectors = {str(number): torch.randn(length, 4) for number, length in enumerate([3, 5, 2])}
    [pack], _ = packed([{"__key__": key, "tokens": value} for key, value in vectors.items()])
    ids = pack["document_ids"]
    found = attention(pack["tokens"], ids[:, None] == ids)
    for number, key in enumerate(pack["__key__"]):
        start, stop = pack["cu_seqlens"][number : number + 2].tolist()
        assert torch.allclose(found[start:stop], attention(vectors[key]), atol=1e-6)


def test_tokens_keep_their_dtype_and_further_dimensions():
    rows = np.arange(12, dtype=np.float32).reshape(6, 2)
    [pack], _ = packed([{"tokens": rows[:4]}, {"tokens": rows[4:]}], pad=0.5)
    assert (pack["tokens"].dtype, pack["tokens"].shape) == (torch.float32, (BUDGET, 2))
    assert pack["tokens"][:6].tolist() == rows.tolist()
    assert set(pack["tokens"][6:].flatten().tolist()) == {0.5}
    [pack], _ = packed([{"tokens": np.array([1, 2], ">u2")}])
    assert (pack["tokens"].dtype, pack["tokens"].tolist()) == (torch.uint16, [1, 2])


def test_with_a_function_packs_are_lists_of_samples():
    stream = Stream(PackSamples(Given([3, 9, 4, 0, 11, 5]), int, BUDGET, too_long="drop", window=3, drop_last=True))
    assert list(stream) == [[9], [3, 4, 0]]
    assert stream.counts() == {"delivered": 4, "filtered": 0, "skipped": 0, "dropped": 2}


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        (
            {"tokens": [0] * 11},
            {},
            r"sample '1' of shard b.tar has the length 11, more than the budget of 10. Pass a larger budget or too_l",
        ),
        ({"text": "x"}, {}, "has no field 'tokens'"),
        ({"tokens": b"xyz"}, {}, "has bytes in field 'tokens', not a list, an array or a tensor. Decode it"),
        ({"tokens": np.array(3)}, {}, "has ndarray in field 'tokens'"),
        ({"tokens": ["x"]}, {}, "has <U1 in field 'tokens'. Decode it to numbers"),
        ({"tokens": [[1], [2, 3]]}, {}, "has no array of numbers in field 'tokens'"),
        ({"tokens": [0.5]}, {}, r"has float64 of shape \(1,\) in field 'tokens', and sample '0' .* has int64 of shape"),
        ({"tokens": [[1, 2]]}, {}, r"has int64 of shape \(1, 2\) in field 'tokens'"),
        ({"tokens": [1], "more": 1}, {}, "differ in form.*Choose the fields with select_fields"),
        (
            {"tokens": [1], "labels": [1, 2]},
            {"aligned": ["labels"]},
            "has 2 values in field 'labels', and 1 in 'tokens'",
        ),
        ({"tokens": [1]}, {"aligned": ["labels"]}, "has no field 'labels'"),
        ({"tokens": [1]}, {"pad": 0.5}, "field 'tokens' has the dtype int64, which cannot be pad=0.5"),
        ({"tokens": [1]}, {"pad": 1 << 70}, "cannot be pad="),
    ],
)
def test_a_bad_sample_is_named(second, options, message):
    first = {"tokens": [1, 2]} | ({"labels": [0, 0]} if "aligned" in options else {})
    samples = [{"__key__": str(number), "__url__": "b.tar", **sample} for number, sample in enumerate([first, second])]
    for method in METHODS:
        if "budget" not in message or method != "wrap":
            with pytest.raises(wp.SampleError, match=message):
                packed(samples, method=method, **options)


def test_a_field_that_a_pack_makes_is_not_replaced():
    with pytest.raises(wp.SampleError, match=r"has a field 'position_ids'"):
        packed([{"__key__": "a", "tokens": [1], "position_ids": [4]}])


@pytest.mark.parametrize("length", [-1, 2.5, None])
def test_a_length_is_a_number(length):
    with pytest.raises((TypeError, ValueError), match="the length of sample 'a' must be"):
        list(Stream(PackSamples(Given([{"__key__": "a"}]), lambda sample: length)))


VARIANTS = [
    {"too_long": "cut"},
    {"method": "first-fit", "window": 3, "too_long": "drop"},
    {"window": 1, "too_long": "cut"},
    {"drop_last": True, "pad": 0, "too_long": "cut"},
    {"method": "wrap"},
    {"method": "wrap", "drop_last": True},
]


@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_every_cut_and_second_cut(options):
    samples = documents([3, 8, 0, 2, 14, 6, 1, 7, 10, 4, 5, 33, 1, 1, 0, 1])
    check_resume(lambda: Stream(PackSamples(Given(samples), "tokens", BUDGET, **{"window": 4, **options})))


@pytest.mark.parametrize(
    ("method", "entry", "message"),
    [
        ("wrap", {"yielded": 1}, "it packs by 'wrap'"),
        ("best-fit", {"inside": 1}, "it packs by 'best-fit'"),
        ("best-fit", {"passed": 1}, "it packs by 'best-fit'"),
        ("best-fit", {"yielded": 9}, "8 samples do not make so many groups"),
        ("best-fit", {"carried": "EA=="}, "does not say which of 4 samples are carried over"),
        ("best-fit", {"carried": "?"}, "does not say which of 4 samples"),
        ("best-fit", {"carried": "A" * 100}, "does not say which of 4 samples"),
    ],
)
def test_an_impossible_position_is_refused(method, entry, message):
    stream = Stream(PackSamples(Given(documents([3, 4])), "tokens", BUDGET, method=method, window=4))
    state = stream.state_dict()
    state["lanes"]["0"]["position"][-1] |= entry
    with pytest.raises(wp.StateError, match=message):
        stream.load_state_dict(state)


@pytest.mark.parametrize("again", [[3], [4, 20, 3], []], ids=["shorter", "longer", "gone"])
@pytest.mark.parametrize("method", ["best-fit", "wrap"])
def test_other_samples_after_a_resume_are_refused(method, again):
    """As far as they are noticed: a pack that was yielded is not made, or a sample ends before."""
    lengths = {"best-fit": [8, 9, 7], "wrap": [14]}[method]
    options = {"method": method, "window": 4} | ({} if method == "wrap" else {"too_long": "drop"})
    if (method, again) == ("wrap", [4, 20, 3]):
        again = [3]

    def make(lengths):
        return lambda: Stream(PackSamples(Given(documents(lengths)), "tokens", BUDGET, **options))

    _, stream = resumed(make(lengths), 3 if method == "best-fit" else 1, make(again))
    with pytest.raises(wp.StateError, match=r"finds other samples than before"):
        list(stream)


def test_a_state_is_small():
    """Also with the largest window, of which each sample may be carried over."""
    lengths = [1, *[7] * 600]
    for window, most in ((512, 600), (4096, 1100)):
        stream = Stream(PackSamples(Given(documents(lengths)), "tokens", 8192, window=window))
        sizes = [len(json.dumps(stream.state_dict())) for _ in stream]
        assert max(sizes) < most


def chain(urls, **options):
    pipe = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    return pipe.map_samples(tokens_of).pack_samples("tokens", BUDGET, **{"window": 5, **options})


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("docs"), shards=8, samples=6, fields=("txt",))


def test_parts_of_samples_come_once_on_changing_numbers_of_lanes(urls):
    """Other methods are in tests/test_resume.py."""
    tokens, state, counts = [], None, {}
    for lanes, cut in ((1, 3), (3, 4), (2, 2), (4, None)):
        loader = wp.PipeLoader(chain(urls, method="wrap"), lanes=lanes, epoch_end="exact")
        loader = loader if state is None else loaded(loader, state)
        for pack in itertools.islice(loader, cut):
            tokens += pack["tokens"].tolist()
        state, counts = through_json(loader.state_dict()), loader.counts()
    assert sorted(tokens) == sorted(token for key in range(48) for token in tokens_of({"__key__": str(key)})["tokens"])
    assert counts == {"delivered": 48, "filtered": 0, "skipped": 0, "dropped": 0}


def test_all_ranks_get_as_many_full_packs(urls):
    """With epoch_end="loop", over several epochs of the data, in batches of packs."""
    for rank in range(3):
        pipe = chain(urls, method="wrap", drop_last=True).to_tuple("tokens", "document_ids")
        loader = wp.PipeLoader(pipe, batch_size=2, epoch_end="loop", rank=rank, world_size=3).with_epoch(batches=60)
        shapes = [batch[0].shape for batch in loader]
        assert shapes == [(2, BUDGET)] * 20
    with pytest.raises(ValueError, match=r"pack_samples\(\) may change their number.*epoch_end='loop'"):
        iter(wp.PipeLoader(pipe, rank=0, world_size=3)).__next__()


@pytest.mark.slow
def test_the_page_about_packing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parents[2] / "tutorials" / "docs" / "packing.md"
    names = {}
    for block in re.findall(r"(?s)```python\n(.*?)```", page.read_text()):
        exec(block, names)
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([4, 1024]) torch.Size([4, 1024]) torch.Size([4, 1024])") == 10
    assert {tuple(batch["image"].shape)[1:3] for batch in names["batches"]} == set(names["SHAPES"])
