"""The public names: sorted, importable and documented."""

import pydoc
import sys
import tarfile
from pathlib import Path

import pytest

import wds_pipes as wp
from wds_pipes.testing import make_shards


def test_all_is_sorted_and_complete():
    assert wp.__all__ == sorted(wp.__all__)
    assert all(getattr(wp, name).__doc__ for name in wp.__all__)
    assert set(wp.__all__) <= set(dir(wp))
    assert {
        name for name, value in vars(wp).items() if not name.startswith("_") and not isinstance(value, type(sys))
    } == set(wp.__all__)
    assert all(
        part in pydoc.plain(pydoc.render_doc(wp))
        for part in ("class ShardList(", "mix = class Mix(", "join = class Join(", "rank()", "describe_state(state")
    )


def test_errors_are_also_those_that_scripts_for_other_libraries_catch(tmp_path):
    """A cut shard, a missing field, an iterator that was replaced; also out of a worker process."""
    url = make_shards(tmp_path, shards=1, samples=3, fields=("txt",))[0]
    whole = Path(url).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:1800])
    pipe = wp.ShardList(url).open_shards().load_tar().group_by_key()
    replaced = iter(pipe)
    next(replaced), next(iter(pipe))
    cut = wp.ShardList(tmp_path / "cut.tar").open_shards().load_tar().group_by_key()
    for call, kinds, text in (
        (lambda: list(wp.PipeLoader(cut, num_workers=1)), (wp.ShardError, tarfile.ReadError), "shard "),
        (lambda: list(wp.PipeLoader(pipe.to_tuple("jpg"), num_workers=1)), (wp.SampleError, KeyError), "sample '"),
        (lambda: next(replaced), (wp.StateError, RuntimeError), "this iterator "),
    ):
        with pytest.raises(kinds[0]) as caught:
            call()
        assert isinstance(caught.value, kinds[1])
        assert str(caught.value).startswith(text)  # a KeyError shows its repr
    with pytest.raises(wp.ShardError) as caught:
        list(wp.ShardList(tmp_path / "gone.tar").open_shards().load_tar())
    assert not isinstance(caught.value, tarfile.ReadError)


def test_modules_are_attributes():
    """Also without an import of the module."""
    assert wp.tar.TarWriter is wp.TarWriter
    assert wp.stages.ShardList.__name__ == wp.nodes.ShardList.__name__ == "ShardList"
    assert not hasattr(wp, "__wrapped__")
