"""The package works without torch's DataPipes and without torchdata."""

import textwrap

import pytest
from scripts import run_file

from wds_pipes.testing import make_shards

NO_DATAPIPES = """
    import torch.utils.data
    for name in [name for name in sys.modules if name.startswith("torch.utils.data.datapipes")]:
        sys.modules[name] = None
    torchs = {name: vars(torch.utils.data).pop(name) for name in ("IterDataPipe", "MapDataPipe", "DFIterDataPipe", "datapipes")}
    import wds_pipes.datapipes
    vars(torch.utils.data).update(torchs)  # this torch itself needs them
"""  # noqa: E501
NO_TORCHDATA = """
    class NoTorchdata:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "torchdata":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoTorchdata())
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script over shards and returns what it prints."""
    urls = make_shards(tmp_path / "shards", shards=4, samples=6)

    def run(*parts):
        code = "import sys\n" + "".join(map(textwrap.dedent, parts))
        done = run_file(tmp_path / "script.py", code, *urls)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


RESUME = """
    import json
    import wds_pipes as wp

    def keys_of(samples):
        return [sample["__key__"] for sample in samples]

    def make(workers):
        pipe = wp.ShardList(sys.argv[1:], shuffle=True, seed=3).open_shards().load_tar().group_by_key().shuffle_buffer(5)
        return wp.PipeLoader(pipe, batch_size=2, collate=keys_of, lanes=2, num_workers=workers, multiprocessing_context="fork" if workers else None)

    whole = list(make(0))
    assert len({key for batch in whole for key in batch}) == 24
    for cut in (0, 1, 7, 11):
        loader = make(2)
        items = iter(loader)
        first = [next(items) for _ in range(cut)]
        state = json.loads(json.dumps(loader.state_dict()))
        loader.close()
        loader = make(0)
        loader.load_state_dict(state)
        assert first + list(loader) == whole, cut
    pipe = wp.ShardList(sys.argv[1:]).open_shards().load_tar().group_by_key()
    items = iter(pipe)
    first = [next(items)["__key__"] for _ in range(5)]
    state = pipe.state_dict()
    again = wp.ShardList(sys.argv[1:]).open_shards().load_tar().group_by_key()
    again.load_state_dict(state)
    assert len(first + [sample["__key__"] for sample in again]) == 24
    assert repr(pipe).endswith("(4 shards)).open_shards().load_tar().group_by_key()"), repr(pipe)
    assert len(list(torch.utils.data.DataLoader(pipe.as_dataset(), batch_size=None))) == 24
    assert not isinstance(pipe, torch.utils.data.IterDataPipe)
    print("exact")
"""  # noqa: E501


@pytest.mark.slow
def test_without_both(run):
    """A resume through PipeLoader, pipes and as_dataset()."""
    assert run(NO_DATAPIPES, NO_TORCHDATA, RESUME) == "exact\n"


def test_methods_without_datapipes(run):
    """Help, TAB completion, a user's own step, what replaces a step of torch's, what nodes need."""
    code = """
        import wds_pipes as wp

        class AddOne(wp.Stage):
            def run(self):
                for item in self.source.items:
                    yield item + 1

        wp.register_stage(AddOne)
        pipe = wp.ShardList(sys.argv[1:])
        assert {"add_one", "shuffle_buffer"} <= set(dir(pipe))
        assert "how many samples are held" in pipe.shuffle_buffer.__doc__
        assert list(pipe.map_samples(lambda ref: len(ref.url)).add_one()) == [len(url) + 1 for url in sys.argv[1:]]
        for call in (lambda: pipe.map(len), lambda: pipe.shufle_buffer(3), lambda: wp.nodes):
            try:
                call()
            except (NotImplementedError, AttributeError, ModuleNotFoundError) as error:
                print(error)
        import wds_pipes.checkpoint
        print("torch.distributed.checkpoint" in sys.modules)
    """
    said = run(NO_DATAPIPES, NO_TORCHDATA, code).splitlines()
    assert said[0] == "this step was torch's, and this torch has no DataPipes any more: use map_samples()"
    assert "shuffle_buffer" in said[1]
    assert said[2] == "wds_pipes.nodes needs torchdata (No module named 'torchdata'): pip install torchdata"
    assert said[3] == "False", "it takes a while to import, and is imported when it is used"
