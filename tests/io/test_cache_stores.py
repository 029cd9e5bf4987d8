"""The cache and stores that are reached in other ways: their bytes are kept apart, and the same
store's are found again.
"""

import contextlib
import json
import os

import fsspec
import pytest
from remote import content
from scripts import run_code
from serving import Ranged, serving

import wds_pipes as wp
from wds_pipes.io.identity import identify_store
from wds_pipes.testing import make_shards

KEYS = {"key": "k", "secret": "secret-of-key"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The endpoints of two servers, as of S3, with other bytes under all names."""
    with contextlib.ExitStack() as stack:
        endpoints = []
        for seed in range(2):
            folder, fields = tmp_path_factory.mktemp("shards"), {"cls": lambda _, __, seed=seed: b"%d" % seed}
            [shard] = make_shards(folder, shards=1, samples=2, fields=fields)
            endpoints.append(stack.enter_context(serving(Ranged, data=content(shard))))
        yield endpoints


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


CONFIG = """
[profile p{0}]
endpoint_url = {1}
[profile s{0}]
services = s{0}
[services s{0}]
s3 =
  endpoint_url = {1}
"""


def options_of(way, endpoint, number, monkeypatch):
    """The storage options for a way to say which store is meant; what is said elsewhere is said
    there.
    """
    if way == "endpoint_url":
        return {**KEYS, "endpoint_url": endpoint}
    if way == "client_kwargs":
        return {**KEYS, "client_kwargs": {"endpoint_url": endpoint}}
    if way == "fsspec":
        monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": endpoint})
    elif way == "AWS_PROFILE":
        monkeypatch.setenv("AWS_PROFILE", f"p{number}")
    elif way in ("profile", "services"):
        return {**KEYS, "profile": f"{way[0]}{number}"}
    else:
        monkeypatch.setenv(way, endpoint)
    return KEYS


WAYS = [
    "endpoint_url",
    "client_kwargs",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "fsspec",
    "profile",
    "AWS_PROFILE",
    "services",
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_each_store_has_its_own_bytes(stores, tmp_path, monkeypatch, way):
    """Also on the second pass, when they come from the cache."""
    (tmp_path / "config").write_text("".join(CONFIG.format(number, endpoint) for number, endpoint in enumerate(stores)))
    for _ in range(2):
        for number, endpoint in enumerate(stores):
            options = options_of(way, endpoint, number, monkeypatch)
            cache = wp.ShardCache(tmp_path / "cache", max_bytes="1GB")
            pipe = (
                wp.ShardList("s3://shards/x.tar")
                .open_shards(storage_options=options, cache=cache)
                .load_tar()
                .group_by_key()
            )
            assert [sample["cls"] for sample in pipe] == [b"%d" % number] * 2
    assert len([name for name in os.listdir(tmp_path / "cache") if name.endswith(".shard")]) == 2
    assert "secret-of-key" not in "".join(
        path.name + path.read_bytes().decode("latin-1") for path in (tmp_path / "cache").iterdir()
    )


def test_the_environment_changes_before_the_first_fetch(stores, tmp_path, monkeypatch):
    """What comes from the cache makes no file system: the one that is made later goes by the
    environment of that time, and so does what is stored then.
    """

    def pipe(*names):
        cache = wp.ShardCache(tmp_path / "cache", max_bytes="1GB")
        return (
            wp.ShardList([f"s3://shards/{name}.tar" for name in names])
            .open_shards(storage_options=KEYS, cache=cache)
            .load_tar()
            .group_by_key()
        )

    monkeypatch.setenv("AWS_ENDPOINT_URL", stores[0])
    assert [sample["cls"] for sample in pipe("x")] == [b"0"] * 2
    items = iter(pipe("x", "y"))
    assert next(items)["cls"] == b"0"
    monkeypatch.setenv("AWS_ENDPOINT_URL", stores[1])
    assert [sample["cls"] for sample in items] == [b"0", b"1", b"1"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", stores[0])
    assert [sample["cls"] for sample in pipe("y")] == [b"0"] * 2


@pytest.mark.parametrize("name", ["s3", "s3a"])
@pytest.mark.parametrize("protocol", ["s3", "s3a"])
def test_the_configuration_of_each_name_of_a_protocol_counts(name, protocol, monkeypatch):
    """fsspec gives a file system what is configured for any of its protocols."""
    one = identify_store(f"{protocol}://b/x", {})
    monkeypatch.setitem(fsspec.config.conf, name, {"endpoint_url": "http://h"})
    assert identify_store(f"{protocol}://b/x", {}) != one


SAME = [
    ("s3://b/x", {"key": "a", "secret": "b"}, {"key": "c", "secret": "d", "token": "e"}),
    ("s3://b/x", {"key": "a", "secret": "b"}, {"anon": True, "config_kwargs": {"max_pool_connections": 5}}),
    (
        "s3://b/x",
        {"client_kwargs": {"region_name": "us-east-1"}},
        {"endpoint_url": "https://s3.eu-west-1.amazonaws.com"},
    ),
    (
        "s3://b/x",
        {"endpoint_url": "http://h", **KEYS},
        {"client_kwargs": {"endpoint_url": "http://h/"}, "key": "k", "secret": "new", "token": "new"},
    ),
    ("gs://b/x", {"token": "a.json"}, {"token": {"private_key": "b"}}),
    ("https://h/x", {"headers": {"Authorization": "a"}}, {"headers": {"Authorization": "b", "Cookie": "c"}}),
    ("https://me:a@h/x", {}, {}),
    ("az://c/x", {"account_name": "a", "account_key": "a"}, {"account_name": "a", "sas_token": "b"}),
    (
        "az://c/x",
        {"connection_string": "AccountName=a;AccountKey=b=="},
        {"connection_string": "AccountName=a;AccountKey=c=="},
    ),
]
OTHER = [
    ("s3://b/x", {}, {"client_kwargs": {"region_name": "cn-north-1"}}),
    ("s3://b/x", {"endpoint_url": "http://h", "key": "a"}, {"endpoint_url": "http://h", "key": "b"}),
    ("s3://b/x", {"endpoint_url": "http://h", "key": "a"}, {"endpoint_url": "http://h", "key": "a", "anon": True}),
    ("gs://b/x", {}, {"endpoint_url": "http://h"}),
    ("https://h/x", {"headers": {"X-Tenant": "a"}}, {"headers": {"X-Tenant": "b"}}),
    ("az://c/x", {"account_name": "a"}, {"account_name": "b"}),
    (
        "az://c/x",
        {"connection_string": "AccountName=a;AccountKey=b=="},
        {"connection_string": "AccountName=b;AccountKey=b=="},
    ),
    ("simplecache::s3://b/x", {"s3": {"endpoint_url": "http://a"}}, {"s3": {"endpoint_url": "http://b"}}),
    ("sftp://h/x", {"username": "a"}, {"username": "b"}),
    ("made-up://h/x", {"anything": 1}, {"anything": 2}),
]


@pytest.mark.parametrize(
    ("url", "one", "other", "same"),
    [*((*case, True) for case in SAME), *((*case, False) for case in OTHER)],
)
def test_which_options_mean_the_same_store(url, one, other, same):
    """New credentials do; whatever may lead to another store does not."""
    assert (identify_store(url, one) == identify_store(url, other)) == same


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("gs://b/x", "STORAGE_EMULATOR_HOST"),
        ("ais://b/x", "AIS_ENDPOINT"),
        ("hf://b/x", "HF_ENDPOINT"),
        ("az://c/x", "AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_the_environment_tells_stores_apart(url, name, monkeypatch):
    monkeypatch.setenv(name, "http://one")
    one = identify_store(url, {})
    monkeypatch.setenv(name, "http://other")
    assert identify_store(url, {}) != one


IDENTITIES = """
import fsspec
from wds_pipes.io.identity import identify_store
options = {"b": {3, 1, 2}, "a": print, "fs": fsspec.filesystem("memory"), "object": object(), "client_kwargs": {"endpoint_url": "http://h"}}
options["secret"] = "s"
print(identify_store("s3://b/x", options), identify_store("made-up://b/x", options))
"""  # noqa: E501


def test_processes_agree(capsys):
    """Whatever their seeds of ``hash``, and with objects among the options."""
    exec(IDENTITIES)
    said = capsys.readouterr().out
    without_torch = 'import sys\nsys.modules["torch"] = None  # it starts faster\n'
    assert run_code(without_torch + IDENTITIES, environment={**os.environ, "PYTHONHASHSEED": "1"}) == said
    assert json.dumps("s") not in said
