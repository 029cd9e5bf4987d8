"""``wds-pipes state prove``: the digest in a state is computed again from the shards."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from commands import refused, run_command
from ledgers import FAULTS, states_after, with_fault
from pipelines import keys_of, loaded, samples, shuffled, through_json

import wds_pipes as wp
from wds_pipes.core.digest import to_text
from wds_pipes.errors import for_commands
from wds_pipes.tools import prove


def same(sample):
    return dict(sample)


def by_list(urls):
    return shuffled(urls).decode_by_ext().map_samples(same).to_tuple("txt")


def by_index(urls):
    return samples(urls, index=True).interleave_shards(2).decode_by_ext()


def by_order(urls):
    return wp.SampleList(urls, shuffle=True, seed=5).fetch_samples().to_tuple("txt", "cls")


def in_order(urls):
    return wp.SampleList(urls, shuffle=True, seed=5).fetch_samples()


WHERE = []  # the shards of ``pipeline``


def pipeline():
    return by_filter(WHERE)


def by_filter(urls):
    return samples(urls).decode_by_ext().filter_samples(chosen).shuffle_buffer(3)


def chosen(sample):
    return int(sample["__key__"]) % 5 != 2


def by_mix(urls=None):
    urls = urls or WHERE
    return wp.mix({"a": samples(urls[:3]).decode_by_ext(), "b": samples(urls[3:]).decode_by_ext()}, exhausted="drop")


def by_repeats():
    return wp.mix({"a": samples(WHERE[:2]), "b": samples(WHERE[2:4]).take_samples(3)}, exhausted="repeat")


def by_draws(urls=None):
    return samples(urls or WHERE, resampled=True)


def by_join(urls=None):
    urls = urls or WHERE
    return wp.join({"a": samples(urls), "b": samples(urls, shuffle=False)}, prefix=True).shuffle_buffer(3)


def by_careful(urls=None):
    return samples(urls or WHERE).map_samples(unless_chosen, on_error="skip").shuffle_buffer(3)


def unless_chosen(sample):
    if not chosen(sample):
        raise ValueError
    return sample


def loader():
    return wp.PipeLoader(pipeline(), batch_size=3, epoch_end="exact")


@pytest.mark.parametrize(
    ("make", "runs"),
    [(by_list, [(1, 0), (2, 4)]), (by_index, [(2, 4), (3, 100)]), (by_order, [(2, 4), (1, 100)])],
)
def test_it_holds_on_other_machines_for_any_ranks(indexed, make, runs, tmp_path):
    """Over moved shards, by the steps that the state names; within an epoch and at its end."""
    moved = [shutil.copy(url, tmp_path) for url in indexed]
    for url in indexed:
        shutil.copy(f"{url}.idx", tmp_path)
    for ranks, steps in runs:
        path = states_after(
            lambda: make(indexed), steps, tmp_path / "states.json", world=ranks, batch_size=2, lanes=2 * ranks
        )
        found = prove(path, moved)
        assert found.proven, found
        assert found.lines[0].startswith("proven: ")
        assert len(found.lines) == (2 if (ranks, steps) == (1, 100) else 1)


def test_shards_with_other_names_are_moved_ones_if_that_is_said(indexed, tmp_path):
    """In words of Python and of the command line."""
    moved = [shutil.copy(url, tmp_path / f"x-{number}.tar") for number, url in enumerate(indexed)]
    path = states_after(lambda: by_list(indexed), 5, tmp_path / "states.json", batch_size=2)
    assert prove(path, moved, moved=True).proven
    with pytest.raises(wp.StateError, match=r"pass moved=True: load_state_dict\(state, moved=True\), or") as refused:
        prove(path, moved)
    assert for_commands(refused.value).endswith("at another place or under other names, pass --moved.")


def test_of_a_function(indexed, tmp_path, monkeypatch):
    """That returns the pipe or the PipeLoader of the training, also with a filter."""
    monkeypatch.setattr(f"{__name__}.WHERE", indexed)
    path = states_after(pipeline, 5, tmp_path / "states.json", batch_size=3)
    assert prove(path, f"{__name__}:pipeline").proven
    assert prove(path, f"{__name__}:loader").proven
    with pytest.raises(wp.StateError, match="does not say enough .*module:function"):
        prove(path, indexed)
    skipped = states_after(by_careful, 12, tmp_path / "skipped.json", batch_size=3)
    with pytest.raises(wp.StateError, match="does not say enough .*module:function"):
        prove(skipped, indexed)
    with pytest.raises(ValueError, match="and not a pipe or a PipeLoader"):
        prove(path, "builtins:dict")


@pytest.mark.parametrize("make", [by_mix, by_draws, by_join])
def test_of_other_functions(indexed, make, tmp_path, monkeypatch):
    """Of two ranks that go on as one; within an epoch, and at the beginning of the next one, whose
    samples may be others.
    """
    monkeypatch.setattr(f"{__name__}.WHERE", indexed)
    for ranks, steps in ((2, 4), (1, 100)):
        path = states_after(make, steps, tmp_path / "states.json", batch_size=2, world=ranks)
        found = prove(path, f"{__name__}:{make.__name__}")
        assert found.proven, found
        assert len(found.lines) == (2 if ranks == 1 else 1)


@pytest.mark.parametrize(("make", "steps"), [(by_list, 5), (by_order, 20), (by_mix, 3)])
def test_epochs_that_follow_each_other(indexed, make, steps, tmp_path, monkeypatch):
    """On other ranks in between; a fault in one of these epochs is noticed."""
    monkeypatch.setattr(f"{__name__}.WHERE", indexed)
    what = f"{__name__}:{make.__name__}" if make is by_mix else indexed
    options = {"batch_size": 3, "epoch_end": "loop", "ledger": True, "collate": "list"}
    loaders = [wp.PipeLoader(make(indexed), rank=rank, world_size=2, **options) for rank in range(2)]
    states = after_steps(loaders, steps)
    (tmp_path / "states.json").write_text(json.dumps(states))
    found = prove(str(tmp_path / "states.json"), what)
    assert found.proven, found
    assert found.lines[0].startswith(f"proven: {6 * steps} samples of epochs 0 to ")
    loaders = [loaded(wp.PipeLoader(make(indexed), rank=rank, world_size=3, **options), states) for rank in range(3)]
    states = through_json(after_steps(loaders, 7))
    (tmp_path / "states.json").write_text(json.dumps(states))
    assert prove(str(tmp_path / "states.json"), what).proven
    (tmp_path / "states.json").write_text(json.dumps(with_other_digest(states)))
    assert prove(str(tmp_path / "states.json"), what).lines[0].startswith("not proven: ")


def after_steps(loaders, steps):
    for loader in loaders:
        for _ in itertools.islice(loader, steps):
            pass
    return [loader.state_dict() for loader in loaders]


def with_other_digest(states):
    """Of one more sample, which no shard has."""
    other = json.loads(json.dumps(states))
    other[0]["ledger"]["epoch"] = to_text(int(other[0]["ledger"]["epoch"], 16) + 1)
    return other


@pytest.mark.parametrize("make", [shuffled, in_order])
def test_epochs_with_edits(indexed, make, tmp_path):
    """Shards that were added, and samples that were left out of the whole epoch, for whose middle
    the state does not say enough.
    """
    path, options = tmp_path / "state.json", {"batch_size": 3, "ledger": True, "collate": "list", "epoch_end": "exact"}
    loader, came = wp.PipeLoader(make(indexed[:5]), **options), keys_of(make(indexed[:5]))
    state = after_steps([loader], 3)[0]
    loader = loaded(wp.PipeLoader(make(indexed), **options), state, added="append")
    path.write_text(json.dumps(after_steps([loader], 2)))
    assert prove(str(path), indexed).proven
    assert not prove(str(path), indexed).lines[1:]
    keys = [came[0], came[-1], keys_of(make(indexed[5:]))[0]]
    (tmp_path / "keys.txt").write_text("\n".join([*keys, came[1]]))
    loader.load_state_dict(loader.state_dict(), exclude=keys)
    path.write_text(json.dumps(after_steps([loader], 2)))
    with pytest.raises(wp.StateError, match=r"the same keys, as exclude= or --exclude"):
        prove(str(path), indexed)
    with pytest.raises(wp.StateError, match="from the middle of an epoch on, and it does not say"):
        prove(str(path), indexed, exclude=keys)
    for _ in loader:
        pass
    path.write_text(json.dumps(after_steps([loader], 4)))
    proof = prove(str(path), indexed, exclude=f"@{tmp_path / 'keys.txt'}")
    assert proof.proven
    assert proof.lines[1] == "of the epochs before it is not known which samples were left out, or added later"
    path.write_text(json.dumps(with_other_digest(json.loads(path.read_text()))))
    if make is in_order:
        with pytest.raises(wp.StateError, match="or other samples were returned"):
            prove(str(path), indexed, exclude=keys)
    else:
        assert prove(str(path), indexed, exclude=keys).lines[0].startswith("not proven: ")


@pytest.mark.parametrize("end", ["exact", "loop"])
def test_epochs_that_depend_on_the_number_of_lanes(indexed, end, tmp_path, monkeypatch):
    """They are read again with as many as they began with; of other epochs that is not known."""
    monkeypatch.setattr(f"{__name__}.WHERE", indexed)
    path, named = tmp_path / "states.json", f"{__name__}:by_repeats"
    options = {"batch_size": 2, "epoch_end": end, "ledger": True, "collate": "list"}
    states = after_steps([wp.PipeLoader(by_repeats(), rank=rank, world_size=2, **options) for rank in range(2)], 2)
    loader = loaded(wp.PipeLoader(by_repeats(), lanes=1, rank=0, world_size=1, **options), states)
    later = after_steps([loader], 20)
    for saved in [states, later] if end == "exact" else [states]:
        path.write_text(json.dumps(saved))
        assert prove(str(path), named).proven
    path.write_text(json.dumps(after_steps([loader], 20)))
    if end == "loop":
        with pytest.raises(wp.StateError, match="depends on how many ranks and workers there are"):
            prove(str(path), named)
    else:
        told = "of the epochs before it is not known which samples were in them"
        assert prove(str(path), named).lines[1].startswith(told)
        path.write_text(json.dumps(with_other_digest(later)))
        assert not prove(str(path), named).proven


def test_epochs_that_follow_each_other_with_added_shards(indexed, tmp_path):
    """While a lane is in an epoch after that of its loader."""
    path, options = tmp_path / "state.json", {"batch_size": 3, "lanes": 2, "ledger": True, "epoch_end": "loop"}
    options |= {"collate": "list", "rank": 0, "world_size": 1}
    loader = wp.PipeLoader(shuffled(indexed[:2]), **options)
    loader = loaded(wp.PipeLoader(shuffled(indexed[:3]), **options), after_steps([loader], 1)[0], added="append")
    path.write_text(json.dumps(after_steps([loader], 20)))
    assert prove(str(path), indexed[:3]).proven


@pytest.mark.parametrize("end", ["exact", "loop"])
def test_a_position_that_is_not_that_of_the_digest(indexed, end, tmp_path):
    """Samples between the two were lost, or come twice."""
    path, options = tmp_path / "state.json", {"batch_size": 2, "ledger": True, "epoch_end": end, "collate": "list"}
    one, other = (after_steps([wp.PipeLoader(shuffled(indexed[:3]), **options)], steps)[0] for steps in (1, 2))
    for state, wrong in ((one, other), (other, one)):
        lane = {**wrong["lanes"]["0"], "position": state["lanes"]["0"]["position"]}
        path.write_text(json.dumps([{**wrong, "lanes": {"0": lane}}]))
        assert not prove(str(path), indexed[:3]).proven


def test_batches_of_several_lanes(indexed, tmp_path):
    """Over a list of samples, which has no global order then."""
    path = states_after(lambda: by_order(indexed), 3, tmp_path / "states.json", batch_size=4, mix_lanes=2, lanes=4)
    assert prove(path, indexed).proven


def test_epochs_before(indexed, tmp_path):
    """Another one is noticed at the beginning of the next epoch, unless samples were dropped."""
    (tmp_path / "broken").mkdir()
    broken = with_fault("lost", indexed, 2, 4, tmp_path / "broken")
    path = states_after(lambda: shuffled(broken), 100, tmp_path / "states.json", batch_size=2)
    assert prove(path, broken).proven
    assert prove(path, indexed).lines[1].startswith("not proven: in the epochs before other samples")
    path = states_after(lambda: by_index(indexed), 100, path, batch_size=4, epoch_end="drop")
    assert prove(path, indexed) == (
        True,
        [
            f"proven: 0 samples of epoch 1 were returned, none lost and none too often (digest {'0' * 32})",
            "of the epochs before it is not known which samples were dropped at their ends",
        ],
    )


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_noticed(fifty, kind, tmp_path):
    """The run read shards with the fault, and the shards of the proof have none; or the other way
    round.
    """
    (tmp_path / "broken").mkdir()
    broken = with_fault(kind, fifty, 2, 4, tmp_path / "broken")
    for one, other in ((broken, fifty), (fifty, broken)):
        path = states_after(lambda: careless(one), 12, tmp_path / "states.json", batch_size=2)  # noqa: B023
        assert prove(path, one).proven
        found = prove(path, other)
        assert not found.proven
        assert found.lines[0].startswith("not proven: 24 samples of epoch 0 have digest ")


def careless(urls):
    return wp.ShardList(urls, empty_check=False).open_shards().load_tar().group_by_key(on_repeated_key="ignore")


def test_what_cannot_be_proven(indexed, tmp_path):
    def saved(**options):
        return states_after(lambda: by_index(indexed), 3, tmp_path / "states.json", batch_size=2, **options)

    with pytest.raises(wp.StateError, match="has no ledger"):
        prove(saved(ledger=False), indexed)
    with pytest.raises(wp.StateError, match="does not fit this pipeline: .*it was made over 8 shards"):
        prove(saved(), indexed[1:])
    states = json.loads(Path(saved(world=2)).read_text())
    (tmp_path / "one.json").write_text(json.dumps(states[:1]))
    with pytest.raises(wp.StateError, match="of rank 0 of 2 alone"):
        prove(str(tmp_path / "one.json"), indexed)


def test_the_command(fifty, tmp_path):
    path = states_after(lambda: shuffled(fifty), 3, tmp_path / "states.json", batch_size=2)
    assert run_command("state", "prove", path, *fifty).stdout.startswith("proven: 6 samples of epoch 0 were returned")
    (tmp_path / "broken").mkdir()
    broken = with_fault("lost", fifty, 2, 4, tmp_path / "broken")
    other = states_after(lambda: shuffled(broken), 24, tmp_path / "other.json", batch_size=2)
    lines = run_command("state", "diff", "--ledger", path, other, code=1).stdout
    assert lines.startswith("not the same data so far: 6 samples of epoch 0, and 48 samples of epoch 0")
    assert run_command("state", "diff", "--ledger", "--json", path, path).stdout.startswith('{"same": true')
    assert "has no ledger" in refused(
        "state", "prove", states_after(lambda: shuffled(fifty), 1, path, ledger=False), *fifty
    )
