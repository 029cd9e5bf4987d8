"""Shards for the tests of remote ones."""

import pytest

from wds_pipes.testing import make_shards


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """Four local shards of 2 MB each, in 40 samples."""
    directory = tmp_path_factory.mktemp("local")
    return make_shards(
        directory,
        shards=4,
        samples=40,
        fields={"bin": lambda rng, _: rng.randbytes(50_000), "cls": lambda rng, _: b"%d" % rng.randrange(10)},
    )
