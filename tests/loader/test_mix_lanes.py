"""Batches with an equal part from each of several lanes: which samples they have, and that their
state is exact.
"""

import itertools
import random
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, flat, keys_of, loaded, samples, through_json
from tars import tar

import wds_pipes as wp
from wds_pipes.stages.collating import stack_samples
from wds_pipes.testing import check_resume, make_shards, same


def pipe(urls, **options):
    return samples(urls, **{"samples_per_shard": FIFTY, **options}).shuffle_buffer(3).decode_by_ext()


def load(urls, **options):
    return wp.PipeLoader(
        pipe(urls), **{"batch_size": 4, "mix_lanes": 2, "collate": keys_of, "epoch_end": "exact", **options}
    )


def test_a_batch_has_a_part_of_each_lane(fifty):
    """In the order of the lanes, and the parts are those of a loader that does not mix."""
    parts = list(load(fifty, batch_size=2, mix_lanes=1, lanes=4, epoch_end="drop"))
    for mixed in (2, 4):
        expected = [flat(parts[place : place + mixed]) for place in range(0, len(parts) + 1 - mixed, mixed)]
        source = load(fifty, batch_size=2 * mixed, mix_lanes=mixed, lanes=4, epoch_end="drop")
        assert list(source) == expected
        assert len(source) == len(expected)
        assert source.stats()["batches"] == len(expected)


@pytest.mark.parametrize("epoch_end", ["exact", "drop", "pad"])
def test_len_counts_and_remaining(epoch_end, fifty):
    source = load(fifty, epoch_end=epoch_end, lanes=6, collate=None)
    batches = []
    for left, batch in zip(reversed(range(len(source))), source, strict=True):
        assert source.remaining() == (left or len(source)), "after the last batch, of the next epoch"
        batches.append(batch["__key__"])
    keys, counts = flat(batches), source.counts()
    assert {len(batch) for batch in batches[:-1]} == {4}
    if epoch_end == "exact":
        assert sorted(keys) == [f"{number:08d}" for number in range(50)]
    else:
        assert len(batches[-1]) == 4
        assert counts["delivered"] == len(keys) == 50 - counts["dropped"] + counts.get("padded", 0)


@pytest.mark.parametrize(("mixed", "epoch_end"), [(2, "exact"), (4, "drop"), (2, "pad"), (4, "loop")])
def test_resumes_exactly_at_every_place(mixed, epoch_end, fifty):
    def make():
        source = load(fifty, epoch_end=epoch_end, lanes=4, mix_lanes=mixed, collate="list")
        return source.with_epoch(batches=9) if epoch_end == "loop" else source

    check_resume(make)


def test_any_number_of_workers(fifty):
    expected = list(load(fifty, lanes=4))
    source = load(fifty, lanes=4, num_workers=1)
    assert list(itertools.islice(source, 5)) == expected[:5]
    assert list(loaded(load(fifty, lanes=4, num_workers=3), source.state_dict())) == expected[5:]


@pytest.mark.parametrize(("batch_size", "samples_per_shard"), [(4, None), (2, None), (4, FIFTY)])
def test_with_drop_last_all_batches_are_full(batch_size, samples_per_shard, fifty):
    def make():
        source = pipe(fifty, samples_per_shard=samples_per_shard)
        return wp.PipeLoader(source, batch_size=batch_size, mix_lanes=2, lanes=6, drop_last=True, collate=keys_of)

    source = make()
    batches = list(source)
    keys, counts = flat(batches), source.counts()
    assert {len(batch) for batch in batches} == {batch_size}
    assert len(set(keys)) == len(keys) == counts["delivered"] == 50 - counts["dropped"]
    assert len(keys) > 50 - 6 * batch_size
    assert source.epoch == 1
    if samples_per_shard:
        assert len(source) == len(batches)
    else:
        check_resume(make)
    cut = flat(make().with_epoch(samples=80))
    assert len(cut) == 80
    assert cut[: len(keys)] == keys


def test_with_epoch_yields_the_samples_also_if_the_last_batch_lacks_parts(fifty):
    for batch_size in (4, 8):
        source = wp.PipeLoader(pipe(fifty), batch_size=batch_size, mix_lanes=4, lanes=4, collate=keys_of)
        for _ in range(2):
            assert 80 <= len(flat(source.with_epoch(samples=80))) < 80 + batch_size


def test_remaining_after_an_epoch_of_one_of_several_ranks(fifty):
    source = load(fifty, rank=0, world_size=2)
    assert len(list(source)) == source.remaining() == len(source)


def all_ranks(urls, world, **options):
    return [load(urls, rank=rank, world_size=world, **options) for rank in range(world)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    parts=st.lists(
        st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.integers(1, 3)), min_size=2, max_size=4
    ),
)
def test_the_epoch_goes_on_on_others(seed, parts, fifty):
    """Other ranks, lanes, parts: each sample of the epoch once. tests/proofs/loop.py has "loop"."""
    draw, got, states = random.Random(seed), [], None
    for number, (world, mixed, lanes) in enumerate(parts):
        ranks = all_ranks(fifty, world, mix_lanes=mixed, batch_size=2 * mixed, lanes=world * mixed * lanes)
        if states is not None:
            for each in ranks:
                each.load_state_dict(states)
            if {each.state_dict()["epoch"] for each in ranks} != {0}:
                break
        last = number == len(parts) - 1
        # all ranks are cut at one step, and none after its end
        most = 1000 if last else min([draw.randrange(1, 6), *(each.remaining() or 0 for each in ranks)])
        for each in ranks:
            got += flat(itertools.islice(each, most))
        states = through_json([each.state_dict() for each in ranks])
    assert sorted(got) == sorted(set(got))
    if last:
        assert len(got) == 50


def test_ranks_have_equal_steps_and_full_batches_also_after_a_change(fifty):
    for before, after in ((2, 1), (1, 2), (2, 4), (4, 2)):
        for cut in (1, 2, 3):
            first = all_ranks(fifty, before, epoch_end="drop", lanes=8)
            states = [[*itertools.islice(each, cut)] and through_json(each.state_dict()) for each in first]
            second = all_ranks(fifty, after, epoch_end="drop", lanes=8)
            for each in second:
                each.load_state_dict(states)
            batches = [list(each) for each in second]
            assert len(set(map(len, batches))) == 1
            assert all(len(batch) == 4 for batch in flat(batches))


def test_batches_are_joined_as_if_they_were_made_at_once(tmp_path):
    urls = make_shards(tmp_path, shards=4, samples=8, fields=("cls", "txt", "npy"))

    def batches(mixed, convert, collate):
        source = samples(urls, samples_per_shard=8).decode_by_ext().map_samples(convert)
        return list(wp.PipeLoader(source, batch_size=8, mix_lanes=mixed, lanes=4, collate=collate))

    forms = {
        "dict": lambda sample: sample,
        "tuple": lambda sample: (sample["npy"], sample["cls"], sample["txt"]),
        "tensor": lambda sample: torch.tensor(sample["npy"]),
        "text": lambda sample: sample["txt"],
        "number": lambda sample: sample["cls"] / 3,
    }
    for convert in forms.values():
        for collate in (None, "numpy", "keep", "list", lambda batch: ("mine", batch)):
            parts = batches(1, convert, "list")
            rows = [flat(part[2 * place : 2 * place + 2] for part in parts[:4]) for place in range(4)]
            expected = [
                row if collate == "list" else collate(row) if callable(collate) else stack_samples(row, collate=collate)
                for row in rows
            ]
            assert same(batches(4, convert, collate), expected)


def test_fields_in_another_order_are_joined(tmp_path):
    for number, names in enumerate((("cls", "txt"), ("txt", "cls"))):
        members = [(f"{number}{place}.{name}", b"1") for place in range(2) for name in names]
        (tmp_path / f"{number}.tar").write_bytes(tar(members))
    source = samples(tmp_path, shuffle=False).decode_by_ext()
    (batch,) = wp.PipeLoader(source, batch_size=4, mix_lanes=2)
    assert batch["__key__"] == ["00", "01", "10", "11"]
    assert list(batch["cls"]) == [1, 1, 1, 1]


def test_an_error_of_collate_names_the_batch(fifty):
    """Also one that would end a loop."""

    def broken(batch, error):
        raise error

    with pytest.raises(KeyError) as caught:
        list(load(fifty, collate=partial(broken, error=KeyError("no"))))
    assert "raised on a batch of 4 samples, from sample" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="collate raised StopIteration"):
        list(load(fifty, collate=partial(broken, error=StopIteration())))


def test_tensors_that_numpy_does_not_have_are_joined(fifty):
    half = pipe(fifty).map_samples(lambda sample: torch.tensor([float(sample["cls"])]).bfloat16())
    batches = list(wp.PipeLoader(half, batch_size=4, mix_lanes=4, lanes=4, epoch_end="drop"))
    assert {(batch.dtype, tuple(batch.shape)) for batch in batches} == {(torch.bfloat16, (4, 1))}


def test_columns_that_do_not_fit_are_named(fifty):
    def uneven(sample):
        return {"x": np.zeros(2 + int(sample["__key__"]) % 7)}

    source = wp.PipeLoader(pipe(fifty).map_samples(uneven), batch_size=2, mix_lanes=2, lanes=2)
    with pytest.raises(wp.SampleError, match=r"field 'x' of several lanes cannot be joined.*shape \(\d,\).*shape"):
        list(source)
    state = source.state_dict()
    assert state["step"] < 25, "the state is that before the batch"
    mixed_kinds = wp.PipeLoader(
        pipe(fifty).map_samples(lambda sample: sample["cls"] if int(sample["__key__"]) % 2 else "text"),
        batch_size=2,
        mix_lanes=2,
    )
    with pytest.raises(wp.SampleError, match="the samples of several lanes cannot be joined"):
        list(mixed_kinds)


def test_an_error_in_a_lane_loses_nothing(fifty):
    """The state after the error is before the batch that had a part of that lane."""
    broken = ["00000020"]

    def careful(sample):
        if sample["__key__"] in broken:
            raise ValueError("broken")
        return sample

    def make():
        return wp.PipeLoader(
            pipe(fifty).map_samples(careful), batch_size=4, mix_lanes=4, lanes=4, collate=keys_of, epoch_end="exact"
        )

    source, got = make(), []
    with pytest.raises(ValueError, match="broken"):
        got.extend(source)
    state = source.state_dict()
    broken.clear()
    again = loaded(make(), state)
    assert got + list(again) == list(make())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix_lanes": 3}, "batch_size=4 must be a multiple of mix_lanes=3"),
        ({"mix_lanes": 0}, "mix_lanes must be at least 1"),
        ({"batch_size": None, "collate": None}, "mix_lanes go with batch_size"),
        ({"lanes": 3}, "lanes=3 must be a multiple"),
    ],
)
def test_wrong_arguments(options, message, fifty):
    with pytest.raises(ValueError, match=message):
        next(iter(load(fifty, **options)))


@pytest.mark.parametrize(
    ("saved", "loads", "message"),
    [
        (
            {"epoch_end": "drop", "batch_size": 8, "rank": 0, "world_size": 2},
            {"epoch_end": "drop"},
            "rank 0 of 2 alone",
        ),
        *(
            (
                {"epoch_end": end, "mix_lanes": 1, "rank": 0, "world_size": 2},
                {"epoch_end": end, "mix_lanes": 2, "rank": 0, "world_size": 2},
                r"of 2 lanes.*mix_lanes=1, and this loader.*mix_lanes=2.*merge_states",
            )
            for end in ("exact", "loop")  # one lane in each rank, from which no batch can be mixed
        ),
    ],
)
def test_a_state_of_other_lanes_is_refused(saved, loads, message, fifty):
    first = load(fifty, **saved)
    next(iter(first))
    with pytest.raises(wp.StateError, match=message):
        load(fifty, **loads).load_state_dict(first.state_dict())


def test_workers_have_lanes_for_each_batch(fifty):
    assert load(fifty, num_workers=3, mix_lanes=2).state_dict()["lane_count"] == 4
