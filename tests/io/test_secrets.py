"""Credentials are in nothing that is shown, whatever goes wrong, in this process and in workers."""

import json
import logging
import traceback
import warnings

import pytest
from click.testing import CliRunner
from remote import content
from servers.process import free_port
from serving import Site, serving

import wds_pipes as wp
from wds_pipes.cli import main
from wds_pipes.io.urls import hide
from wds_pipes.tar import TarWriter, index_shards
from wds_pipes.testing import make_shards

CANARIES = ("canary-in-query", "canary-in-user", "canary-in-header", "canary-in-path", "canary-in-fragment")
OPTIONS = {"headers": {"X-Api-Key": "canary-in-header"}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that answers with whatever its path names, and repeats the query in where it
    sends clients on to.
    """
    [path] = make_shards(tmp_path_factory.mktemp("shard"), shards=1, samples=4)
    objects = {f"/{status}": status for status in (403, 404, 500)}
    objects |= {"/page": b"<html>" * 200, "/cut": content(path)[:1100], "/loop": "/loop?{query}"}
    objects["/away"] = f"http://u:canary-in-user@127.0.0.1:{free_port()}/x?{{query}}"
    objects["/odd"] = "http://u:canary-in-user@[1:/x?{query}"
    with serving(Site, objects=objects, came=[]) as address:
        yield address.removeprefix("http://")


def chain(error):
    """An error and all that led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def shown_of(error):
    """All that is shown of an error by anything that knows errors."""
    return "".join(traceback.format_exception(error)) + "".join(
        f"{each} {each!r} {each.args} {getattr(each, '__notes__', '')}" for each in chain(error)
    )


CASES = [
    "404",
    "403",
    "500",
    "loop",
    "away",
    "odd",
    "page",
    "cut",
    "nowhere",
    "no host",
    "a bad port",
    "no package",
    "no protocol",
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("cached", [False, True])
def test_whatever_goes_wrong(server, caplog, tmp_path, workers, cached):
    caplog.set_level(logging.INFO, "wds_pipes")
    hosts = {
        "nowhere": f"http://{{}}@127.0.0.1:{free_port()}",
        "no host": "http://{}@",
        "a bad port": "http://{}@127.0.0.1:99999999",
    }
    hosts |= {"no package": "hf-made-up://{}@h", "no protocol": "made-up://{}@h"}
    said = []
    for case in CASES if not workers else ["loop", "odd", "page", "a bad port"]:
        host = hosts.get(case, f"http://{{}}@{server}").format("user:canary-in-user")
        url = f"{host}/{case.replace(' ', '-')};token=canary-in-path?part=1&%74oken=canary-in-query&jwt=canary-in-query#code=canary-in-fragment"  # noqa: E501
        cache = wp.ShardCache(tmp_path / "cache", max_bytes="1GB") if cached else None
        options = OPTIONS if case != "no protocol" else {}
        pipe = (
            wp.ShardList(url)
            .open_shards(storage_options=options, retries=0, timeout_seconds=5, cache=cache)
            .load_tar()
            .group_by_key()
            .batch_samples(1)
        )
        loader = wp.PipeLoader(pipe, num_workers=workers)
        with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(wp.WdsError) as failed:
            list(loader)
        said += [shown_of(failed.value), repr(pipe), pipe._repr_html_(), repr(loader)]
        said += [
            json.dumps(pipe.state_dict()),
            json.dumps(loader.state_dict()),
            wp.describe_state(loader.state_dict()),
            *(str(each.message) for each in caught),
        ]
    said += [caplog.text, *(f"{path.name} {path.read_text()}" for path in tmp_path.glob("cache/*.json"))]
    for canary in CANARIES:
        assert [text for text in said if canary in text] == []


@pytest.mark.parametrize("case", ["404", "403"])
def test_patterns_and_indices(server, case):
    """What is listed or read before the iteration."""
    url = f"http://user:canary-in-user@{server}/{case}"
    query = "jwt=canary-in-query"
    with pytest.raises((wp.ShardError, ValueError)) as failed:
        wp.ShardList(f"{url}/*.tar?{query}", storage_options=OPTIONS)
    with pytest.raises((wp.ShardError, ValueError)) as of_index:
        wp.ShardList("x.tar", index=f"{url}?{query}", storage_options=OPTIONS)
    for canary in CANARIES:
        assert canary not in shown_of(failed.value) + shown_of(of_index.value)


COMMANDS = {
    "head": "head URL",
    "cat": "cat --jsonl URL",
    "cat of a range": "cat --jsonl --slice 1:2 URL",
    "fields": "cat --fields nothing URL",
    "export": "export URL out --to jsonl",
    "images": "export URL out --to imagefolder",
    "map": "map canary_functions:broken URL out",
    "map to no dict": "map canary_functions:number URL out",
    "map to no field": "map canary_functions:odd URL out",
    "map and skip": "map canary_functions:broken URL out --on-error skip --json",
    "filter": "filter URL out --keep canary_functions:broken",
    "sort": "sort URL out --by nothing",
    "sort by text": "sort URL out --by txt",
    "info": "info --json URL",
    "ls": "ls --json URL",
    "get": "get nothing URL",
    "verify": "verify --json URL",
    "index": "index URL -o index.json",
    "dedup": "dedup URL out --json",
    "reshard": "reshard URL out --json",
    "join": "join URL URL out",
    "create": "create URL out --from list",
    "convert": "convert URL out --from tfrecord",
}


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(command, id=name) for name, command in COMMANDS.items()),
        pytest.param("demo --data URL --workers 1", id="demo", marks=pytest.mark.slow),
    ],
)
def test_what_commands_print_and_write(web, tmp_path, monkeypatch, command):
    """Samples have the whole URL of their shard in memory, and functions put it into their
    errors.
    """
    make_shards(web.directory, shards=1, samples=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "canary_functions.py").write_text(FUNCTIONS)
    url = f"{web.url}/shard-000000.tar?token=canary-in-query".replace("://", "://user:canary-in-user@")
    result = CliRunner().invoke(main, command.replace("URL", url).split())
    told = result.output + "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
    assert "canary-in" not in told.replace(FUNCTIONS, "")
    assert result.output


FUNCTIONS = """
def broken(sample):
    raise ValueError(f"what is {sample['__url__']}")


def number(sample):
    return 1


def odd(sample):
    return {"txt": object()}
"""


def test_wrong_arguments():
    url = "http://user:canary-in-user@h/x.tar?jwt=canary-in-query"
    for wrong in (
        lambda: wp.ShardList({url: 1}),
        lambda: wp.ShardList([[url]]),
        lambda: wp.ShardList(url).open_shards(storage_options=f"secret {url}"),
    ):
        with pytest.raises(TypeError) as failed:
            wrong()
        assert "canary" not in shown_of(failed.value)


SECRET_URL = "http://user:canary-in-user@h/%06d.tar?jwt=canary-in-query"
WRITERS = {
    "shard": lambda url, folder: TarWriter(url.replace("%06d", "x")),
    "shards": lambda url, folder: wp.ShardWriter(url).write({"__key__": "a", "txt": "a"}),
    "pattern": lambda url, folder: wp.ShardWriter(url.replace("%06d", "x")).write({"__key__": "a", "txt": "a"}),
    "index": lambda url, folder: index_shards(make_shards(folder, shards=1, samples=1), url),
    "index of writer": lambda url, folder: wp.ShardWriter(f"{folder}/%d.tar", index=url),
}


@pytest.mark.parametrize("way", WRITERS)
def test_what_is_not_written_to_a_web_server(tmp_path, way):
    with pytest.raises((OSError, ValueError)) as failed:
        WRITERS[way](SECRET_URL, tmp_path)
    assert "canary" not in shown_of(failed.value) + str(getattr(failed.value, "filename", ""))


@pytest.mark.parametrize(
    "command", ["TOKEN=canary false", "TOKEN='canary x' false", "'canary;'", "false canary", "canary=1 ; exit 3"]
)
def test_a_command_that_fails(command):
    with pytest.raises(wp.ShardError) as failed:
        list(wp.ShardList(f"pipe:{command}").open_shards(allow_pipe=True).load_tar())
    assert "canary" not in shown_of(failed.value)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (
            "retries exceeded with url: /tokeninfo?access_token=a%2Fcanary%3D%3D (Caused by ...)",
            {"token": "a/canary=="},
        ),
        ("retries exceeded with url: /tokeninfo?id=5&access_token=canary (Caused by ...)", {}),
        ("cannot open https://h/a%3Btoken%3Dcanary", {}),
    ],
)
def test_what_libraries_write_otherwise(text, options):
    assert "canary" not in hide(text, "", options)
    assert hide("cannot open /data/x.tar?part=5, b=3", "", options) == "cannot open /data/x.tar?part=5, b=3"


@pytest.mark.parametrize("url", ["http://h/x.tar?...", "http://h/x.tar", "s3://b/x.tar?versionId=3"])
def test_what_has_no_secret_any_more_stays(url):
    """Messages pass here more than once."""
    text = f"shard {url}: no field 'a' ({url}), {url}; and so on"
    assert hide(text) == text
