"""Remote shards: read ahead by ranges, through faults, with a resume that asks for nothing
twice.
"""

import os

import pytest
from remote import bare, put_all, samples


def test_samples_are_those_of_local_shards(remote, local):
    urls = put_all(remote, local)
    assert [bare(sample) for sample in samples(urls, remote)] == [bare(sample) for sample in samples(local)]
    seen = remote.faults.stats(remote.reads)
    assert {request.status for request in seen} <= {200, 206}
    assert sum(request.sent for request in seen) < 1.05 * sum(map(os.path.getsize, local))  # nothing comes twice


FAULTS = {
    "503 for a while": {"times": 3, "status": 503},
    "429 with Retry-After": {"times": 2, "status": 429, "headers": {"Retry-After": "1"}},
    "reset before the answer": {"times": 3, "drop": True},
    "reset in the body": {"times": 3, "reset_after": 300_000},
    "early close": {"times": 3, "close_after": 300_000},
    "short bodies": {"times": 3, "truncate": 100_000},
    "a length that is too long": {"times": 3, "add_length": 100},
    "a length that is too short": {"times": 3, "add_length": -100},
    "stall": {"times": 2, "stall_after": 100_000, "stall": 5},
    "no answer": {"times": 1, "latency": 5},
    "ranges are ignored": {"ignore_range": True},
    "no length": {"no_length": True},
    "a fifth 503, a tenth reset": [{"prob": 0.2, "status": 503}, {"prob": 0.1, "reset_after": 200_000}],
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[name.replace(" ", "-") for name in FAULTS])
def test_faults_are_survived(remote, local, fault):
    """What a network does changes nothing of what is read."""
    urls = put_all(remote, local[:2])
    rules = FAULTS[fault]
    rules = rules if isinstance(rules, list) else [rules]
    remote.faults.rules(*({"match": remote.reads, **rule} for rule in rules), seed=1)
    found = [bare(sample) for sample in samples(urls, remote, timeout_seconds=8)]
    assert found == [bare(sample) for sample in samples(local[:2])]
