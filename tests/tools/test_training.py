"""``wds-pipes state prove``: the digests in a state are those of the keys in the shards."""

import itertools
import json
import shutil

import pytest
from commands import run_command
from ledgers import FAULTS, states_after, with_fault
from pipelines import even, keys_of, loaded, samples, shuffled

import wds_pipes as wp
from wds_pipes.errors import for_commands
from wds_pipes.tools import prove


def by_list(urls):
    return shuffled(urls).decode_by_ext().to_tuple("txt")


def by_index(urls):
    return samples(urls, index=True).interleave_shards(2)


def by_order(urls):
    return wp.SampleList(urls, shuffle=True, seed=5).fetch_samples()


@pytest.mark.parametrize("make", [by_list, by_index, by_order])
def test_it_holds_on_other_machines_for_any_ranks(indexed, make, tmp_path):
    """Over moved shards; at the end of an epoch and in the middle of a later one."""
    moved = [shutil.copy(url, tmp_path) for url in indexed]
    for ranks, end in ((1, "exact"), (2, "pad")):
        if ranks > 1 and make is by_list:
            end = "exact"
        options = {"world_size": ranks, "batch_size": 2, "epoch_end": end, "ledger": True, "collate": "list"}
        loaders = [wp.PipeLoader(make(indexed), rank=rank, **options) for rank in range(ranks)]
        for epoch in range(3):
            batches = list(zip(*loaders, strict=False)) if end == "pad" else [list(loader) for loader in loaders]
            assert batches
            found = prove(saved(tmp_path, loaders), moved)
            assert found.proven, found
            assert found.lines[-1].startswith("proven: in epoch")
            assert len(found.lines) <= 2, epoch
        for loader in loaders:
            next(iter(loader))
        assert (
            prove(saved(tmp_path, loaders), moved).lines[1].endswith("so far: an epoch can be proven when it has ended")
        )


def saved(folder, loaders):
    """The path of the states of all ranks."""
    path = folder / "states.json"
    path.write_text(json.dumps([loader.state_dict() for loader in loaders]))
    return str(path)


def test_shards_with_other_names_are_moved_ones_if_that_is_said(fifty, tmp_path):
    """In words of Python and of the command line."""
    moved = [shutil.copy(url, tmp_path / f"x-{number}.tar") for number, url in enumerate(fifty)]
    path = states_after(lambda: shuffled(fifty), 100, tmp_path / "states.json", batch_size=2)
    assert prove(path, moved, moved=True).proven
    with pytest.raises(wp.StateError, match=r"pass moved=True: load_state_dict\(state, moved=True\), or") as refused:
        prove(path, moved)
    assert for_commands(refused.value).endswith("at another place or under other names, pass --moved.")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_noticed(fifty, kind, tmp_path):
    """The run read shards with the fault, and the shards of the proof have none; or the other way
    round.
    """
    (tmp_path / "broken").mkdir()
    broken = with_fault(kind, fifty, 2, 4, tmp_path / "broken")
    for one, other in ((broken, fifty), (fifty, broken)):
        path = states_after(lambda: careless(one), 100, tmp_path / "states.json", batch_size=2)  # noqa: B023
        assert prove(path, one).proven
        assert prove(path, other).lines[0].startswith("not proven: epoch 0 has digest ")
        assert not prove(path, other).proven


def careless(urls):
    return wp.ShardList(urls, empty_check=False).open_shards().load_tar().group_by_key(on_repeated_key="ignore")


@pytest.mark.parametrize("make", [shuffled, by_order])
def test_samples_that_were_left_out_of_all_epochs(indexed, make, tmp_path):
    """They are left out of the shards, too."""
    keys = keys_of(make(indexed))[:3]
    options = {"batch_size": 3, "ledger": True, "epoch_end": "exact", "collate": "list"}
    loader = wp.PipeLoader(make(indexed), **options)
    loader = loaded(loader, loader.state_dict(), exclude=keys)
    assert len(list(itertools.chain.from_iterable(loader))) == len(keys_of(make(indexed))) - 3
    path = saved(tmp_path, [loader])
    assert prove(path, indexed, exclude=keys).proven
    assert not prove(path, indexed, exclude=keys[:2]).proven
    (tmp_path / "keys.txt").write_text("\n".join(keys))
    run_command("state", "prove", path, "--exclude", tmp_path / "keys.txt", *indexed)


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (shuffled, {"ledger": False}, "has no ledger"),
        (shuffled, {"steps": 3}, "it is of 9 samples of epoch 0, which has not ended"),
        (shuffled, {"epoch_end": "loop"}, "which do not end together"),
        (lambda urls: wp.mix({"a": samples(urls[:3]), "b": samples(urls[3:])}), {}, "from several lists of shards"),
        (lambda urls: samples(urls[1:]), {}, "it was made over 7 shards, and these are 8"),
        (shuffled, {"world": 2, "only": 1}, "of rank 0 of 2 alone"),
    ],
)
def test_what_cannot_be_proven(fifty, make, options, why, tmp_path):
    steps, only = options.pop("steps", 100), options.pop("only", None)
    path = states_after(lambda: make(fifty), steps, tmp_path / "states.json", batch_size=3, **options)
    if only:
        (tmp_path / "states.json").write_text(json.dumps(json.loads((tmp_path / "states.json").read_text())[:only]))
    with pytest.raises(wp.StateError, match=why):
        prove(path, fifty)


def test_an_epoch_that_left_samples_out(fifty, tmp_path):
    """The states of its end count them; a later one does not, so other samples may have come. Those
    that a step leaves out after the digest is taken belong to it.
    """
    options = {"batch_size": 5, "ledger": True, "epoch_end": "exact", "world_size": 2}
    late = samples(fifty).to_tuple("__key__").filter_samples(lambda names: even({"__key__": names[0]}))
    counted_before = [wp.PipeLoader(late, rank=rank, **options) for rank in range(2)]
    filtered = lambda: samples(fifty).filter_samples(even).shuffle_buffer(3)  # noqa: E731
    loaders = [wp.PipeLoader(filtered(), rank=rank, **options) for rank in range(2)]
    for loader in counted_before + loaders:
        assert list(loader)
    assert prove(saved(tmp_path, counted_before), fifty).proven
    with pytest.raises(wp.StateError, match="25 samples of epoch 0 were left out, and it does not say which"):
        prove(saved(tmp_path, loaders), fifty)
    for loader in loaders:
        next(iter(loader))
    assert prove(saved(tmp_path, loaders), fifty).lines[0].startswith("not proven: epoch 0 has digest ")


def test_the_command(fifty, tmp_path):
    path = states_after(lambda: shuffled(fifty), 100, tmp_path / "states.json", batch_size=2)
    assert run_command("state", "prove", path, *fifty).stdout.startswith("proven: in epoch 0 each sample of the shards")
    (tmp_path / "broken").mkdir()
    broken = with_fault("lost", fifty, 2, 4, tmp_path / "broken")
    assert run_command("state", "prove", path, *broken, code=1).stdout.startswith("not proven: ")
    other = states_after(lambda: shuffled(broken), 24, tmp_path / "other.json", batch_size=2)
    lines = run_command("state", "diff", "--ledger", path, other, code=1).stdout
    assert lines.startswith("not the same data so far: 0 samples of epoch 1, and 48 samples of epoch 0")
    assert run_command("state", "diff", "--ledger", "--json", path, path).stdout.startswith('{"same": true')
