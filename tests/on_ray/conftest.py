"""A Ray cluster of this machine, with two workers; the tests skip where Ray is not installed."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def cluster():
    ray = pytest.importorskip("ray")
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    ray.init(address="local", num_cpus=2, object_store_memory=200 << 20, **quiet)
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Another working directory than that of the workers of Ray."""
    monkeypatch.chdir(tmp_path)
