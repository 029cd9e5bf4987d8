"""The ports of public training scripts in tutorials/10_moving_from_webdataset.py resume exactly.

The tutorial itself runs them in one process.
"""

import pickle

import ports
import pytest
from process_group import launch

STEPS = 24


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    directory = tmp_path_factory.mktemp("photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        ports.use_photos()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ports.PORTS)
def test_a_port_resumes_with_workers(name, photos, monkeypatch):
    """The same lanes in this process and, after the cut, in two workers. The loader can be pickled,
    as it must be for workers that are not forked.
    """
    monkeypatch.chdir(photos)
    make, cut = getattr(ports, name), 3 + 5 * ports.PORTS.index(name)
    whole, _ = ports.train(make(lanes=2), STEPS)
    head, saved = ports.train(make(lanes=2), cut)
    loader = pickle.loads(pickle.dumps(make(num_workers=2, multiprocessing_context="fork")))
    rest, _ = ports.train(loader, STEPS - cut, saved)
    assert head + rest == whole
    assert len(set(whole)) == STEPS


@pytest.mark.slow
def test_open_clip_on_two_ranks(photos):
    """Over the ends of epochs of 10 batches, cut in the second."""
    launch(2, ports.train_on_ranks, photos, STEPS, 13, timeout_seconds=120)
