"""Redirects of web servers: what is sent on to another origin, and what is not."""

import contextlib
import json
import os
import traceback
import warnings
from shutil import copyfile
from typing import NamedTuple

import aiohttp
import fsspec.config
import pytest
from commands import run_command
from remote import content, samples
from serving import Site, certified, serving

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.stages import ShardList
from wds_pipes.tar import index_shards

SECRET = "5ecret"
BASIC = "dXNlcjo1ZWNyZXQ="  # of a user with it as the password


class Running(NamedTuple):
    """A site that runs: its ``address``, the ``objects`` to fill, and what ``came``."""

    address: str
    objects: dict
    came: list

    def leaked(self):
        return [
            headers for _, headers in self.came if SECRET in str(headers) or {"authorization", "cookie"} & set(headers)
        ]


@pytest.fixture
def site(tmp_path):
    """Starts one: ``site(code)``, or ``site(code, tls=True)``."""
    with contextlib.ExitStack() as stack:

        def start(code=302, tls=False):
            objects, came = {}, []
            secure = certified(tmp_path) if tls else None
            address = stack.enter_context(serving(Site, tls=secure, code=code, objects=objects, came=came))
            return Running(address, objects, came)

        yield start


def basic():
    """A name and a password, as aiohttp has them until its version 4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return aiohttp.BasicAuth("user", SECRET)


HEADERS = {
    "X-Api-Key": SECRET,
    "PRIVATE-TOKEN": SECRET,
    "X-Odd": SECRET,
    "Authorization": f"Bearer {SECRET}",
    "Cookie": f"a={SECRET}",
}
OPTIONS = {
    "headers": {"headers": HEADERS},
    "headers of the client": {"client_kwargs": {"headers": HEADERS}},
    "cookies": {"cookies": {"a": SECRET}},
    "cookies of the client": {"client_kwargs": {"cookies": {"a": SECRET}}},
    "cookies beside a header": {"headers": {"Cookie": "b=1"}, "client_kwargs": {"cookies": {"a": SECRET}}},
    "auth": {"auth": basic()},
    "auth of the client": {"client_kwargs": {"auth": basic()}},
    "parameters": {"params": {"token": SECRET}},
}


@pytest.mark.filterwarnings("ignore:The 'auth' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_credentials_stay_with_their_origin(site, local, options):
    """A redirect within it takes them along, one to another origin does not, nor one from there;
    harmless headers go everywhere.
    """
    first, second = site(307), site(302)
    first.objects.update({"/x.tar": "/moved/x.tar", "/moved/x.tar": f"{second.address}/a/x.tar"})
    second.objects.update({"/a/x.tar": f"{first.address}/back/x.tar", "/b/x.tar": content(local[0])})
    first.objects["/back/x.tar"] = f"{second.address}/b/x.tar"
    options = {**options, "headers": {**options.get("headers", {}), "User-Agent": "mine"}}
    assert len(list(samples(f"{first.address}/x.tar", storage_options=options))) == 40
    sent = [(path.partition("?")[0], SECRET in str(headers) or BASIC in str(headers)) for path, headers in first.came]
    if "params" not in options:
        assert all(told == (path != "/back/x.tar") for path, told in sent)
    if "b=1" in str(options):
        assert {part.strip() for part in first.came[0][1]["cookie"].split(";")} == {"b=1", f"a={SECRET}"}
    assert second.came
    assert not second.leaked()
    assert not [path for path, _ in second.came if SECRET in path]
    for _, headers in second.came:
        assert (headers["user-agent"], headers["accept-encoding"]) == ("mine", "identity")
        assert headers["range"].startswith("bytes=")


@pytest.mark.filterwarnings("ignore:The 'auth' parameter is deprecated:DeprecationWarning")
@pytest.mark.parametrize("way", ["configured", "password", "chained", "tls"])
def test_credentials_stay_with_their_origin_in_other_ways(site, local, way, monkeypatch, tmp_path):
    """Where the user has configured fsspec with them, in a URL, for the cache of fsspec, and where
    the other origin is another scheme.
    """
    first, second = site(tls=way == "tls"), site()
    first.objects["/x.tar"], second.objects["/x.tar"] = f"{second.address}/x.tar", content(local[0])
    url, options = f"{first.address}/x.tar", {"headers": HEADERS, "ssl": False}
    if way == "configured":
        monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"auth": basic()}})
        options = None
    elif way == "password":
        url, options = url.replace("://", f"://user:{SECRET}@"), None
    elif way == "chained":
        url = f"simplecache::{url}"
        options = {"http": {"headers": HEADERS}, "simplecache": {"cache_storage": str(tmp_path)}}
    pipe = samples(url, storage_options=options)
    assert len(list(pipe)) == 40
    assert first.leaked()
    assert second.came
    assert not second.leaked()
    if way == "configured":
        monkeypatch.undo()
        first.came.clear()
        assert len(list(samples(url))) == 40  # while the other pipe has its file system
        assert not first.leaked()


def test_an_index_and_what_is_looked_for_beside_it(site):
    """They are read in other ways than shards: as whole files, and by names that may be there."""
    first, second = site(), site()
    index = json.dumps({"wids_version": 1, "shardlist": [{"url": "x.tar", "nsamples": 3}]}).encode()
    for name in ("index.json", "d/"):
        first.objects[f"/{name}"] = f"{second.address}/{name}"
    second.objects.update({"/index.json": index, "/d/": b'<a href="x-1.tar">x-1.tar</a>', "/d/x-1.tar": b""})
    first.objects["/d/x-1.tar"] = b""
    options = {"storage_options": {"headers": HEADERS, "client_kwargs": {"auth": None, "cookies": {"c": SECRET}}}}
    assert list(ShardList(f"{first.address}/index.json", **options).samples) == [3]
    assert list(ShardList(f"{first.address}/x.tar", index=True, **options).samples) == [3]
    assert [url.rpartition("/")[2] for url in ShardList(f"{first.address}/d/*.tar", **options).urls] == ["x-1.tar"]
    assert {path for path, _ in second.came} >= {"/index.json", "/d/"}
    assert first.leaked()
    assert not second.leaked()


def test_a_server_that_wants_what_is_not_sent_on(site, local):
    """The message says why it does not get it."""
    first, second = site(), site(403)
    first.objects["/x.tar"], second.objects["/x.tar"] = f"{second.address}/x.tar", f"{second.address}/x.tar"
    with pytest.raises(ShardError, match="redirected to 127.0.0.1:.*, to which your headers are not sent"):
        list(samples(f"{first.address}/x.tar", storage_options={"headers": HEADERS}))


WHERE = {
    "in circles": "{address}/x.tar?token=5ecret",
    "to a file": "file:///etc/passwd?token=5ecret",
    "to another protocol": "ftp://user:5ecret@host/x.tar",
    "to no host": "http://?token=5ecret",
    "to no port": "http://user:5ecret@host:99999/x.tar",
    "to no name": "http://user:5ecret@[::/x.tar",
}


@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_redirects_that_lead_nowhere(site, where):
    """An error in words, after one attempt, without what is secret in them; neither in its
    causes.
    """
    one = site()
    one.objects["/x.tar"] = where.format(address=one.address)
    with pytest.raises(ShardError, match=r"/x.tar cannot be read \(.*redirect") as caught:
        list(samples(f"{one.address}/x.tar", timeout_seconds=10))
    shown = "".join(traceback.format_exception(caught.value))
    error = caught.value
    while error is not None:
        shown += f"{error} {error.__notes__ if hasattr(error, '__notes__') else ''}"
        error = error.__cause__ or error.__context__
    assert SECRET not in shown
    assert len(one.came) == (10 if "address" in where else 1)


@pytest.fixture
def two(site, local, tmp_path):
    """Two sites: the first has an index that names a shard of each, the second also has offsets."""
    first, second = site(), site()
    urls = ["x.tar", f"{second.address}/y.tar"]
    first.objects["/index.json"] = json.dumps({"shardlist": [{"url": url, "nsamples": 40} for url in urls]}).encode()
    index_shards([copyfile(path, tmp_path / os.path.basename(path)) for path in local[:2]], offsets=True)
    for one, path, name in ((first, local[0], "/x.tar"), (second, local[1], "/y.tar")):
        one.objects[name], one.objects[f"{name}.idx"] = (
            content(path),
            content(tmp_path / f"{os.path.basename(path)}.idx"),
        )
    return first, second


@pytest.mark.filterwarnings("ignore:The 'auth' parameter is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:storage_options are not sent")
@pytest.mark.parametrize("given", ["list", "step"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_credentials_stay_with_the_origin_of_the_index(two, options, given):
    """Whether they are given to the list of shards, or to the step that opens them."""
    first, second = two
    shards = wp.ShardList(f"{first.address}/index.json", storage_options=options if given == "list" else None)
    pipe = shards.open_shards(storage_options=options if given == "step" else None).load_tar().group_by_key()
    assert len(list(pipe)) == 80
    assert SECRET in str(first.came) or BASIC in str(first.came)
    assert second.came
    assert not second.leaked()
    assert SECRET not in str(second.came)


READERS = {
    "IndexedShards": lambda url, **options: wp.IndexedShards(url, **options)[50],
    "fetch_samples": lambda url, **options: list(wp.SampleList(url, **options).fetch_samples()),
    "with a cache": lambda url, **options: list(
        wp.ShardList(url, **options).cache_shards(os.environ["PLACE"], max_bytes="1GB").open_shards().load_tar()
    ),
    "mix": lambda url, **options: list(
        wp.mix({"a": wp.ShardList(url, **options), "b": wp.ShardList(url)}).open_shards().load_tar()
    ),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
def test_credentials_of_each_reader_stay_with_the_origin_of_the_index(two, read, tmp_path, monkeypatch):
    first, second = two
    monkeypatch.setenv("PLACE", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=f"not sent to {second.address}, which only an index"):
        read(f"{first.address}/index.json", storage_options={"headers": HEADERS})
    assert first.leaked()
    assert second.came
    assert not second.leaked()


@pytest.mark.filterwarnings("default:storage_options are not sent")
def test_credentials_of_a_command_stay_with_the_origin_of_the_index(two, tmp_path, monkeypatch):
    first, second = two
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.txt").write_text(f"{first.address}/index.json\n")
    done = run_command("ls", "@list.txt", "--storage-options", json.dumps({"headers": HEADERS}))
    assert f"warning: storage_options are not sent to {second.address}" in done.output
    assert first.leaked()
    assert second.came
    assert not second.leaked()


def test_options_are_for_all_that_the_program_names(two, tmp_path):
    """In a list, in an index on this machine, and in a mix with an index of another server."""
    first, second = two
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"shardlist": [{"url": f"{second.address}/y.tar", "nsamples": 40}]}))
    given = {"storage_options": {"headers": HEADERS}}
    with_index = {
        "a": wp.ShardList(f"{first.address}/index.json", **given),
        "b": wp.ShardList(f"{second.address}/y.tar"),
    }
    for shards in (wp.ShardList(f"{second.address}/y.tar"), wp.ShardList(str(own)), wp.mix(with_index)):
        assert list(shards.open_shards(**given).load_tar())
    assert second.came
    assert len(second.leaked()) == len(second.came)


@pytest.mark.filterwarnings("ignore:storage_options are not sent")
def test_an_index_in_a_store_takes_no_credentials_to_a_web_server(two):
    """Of all that the program has named, nothing is a web server."""
    _, second = two
    entry = {"url": f"{second.address}/y.tar", "nsamples": 40}
    fsspec.filesystem("memory").pipe_file("/of_store/index.json", json.dumps({"shardlist": [entry]}).encode())
    pipe = wp.ShardList("memory://of_store/index.json", storage_options={"headers": HEADERS}).open_shards().load_tar()
    assert list(pipe)
    assert not second.leaked()


@pytest.mark.filterwarnings("ignore:storage_options are not sent")
@pytest.mark.parametrize("odd", ["http://\t{}", "http://\n{}"])
def test_an_odd_url_takes_no_credentials_to_another_origin(two, odd):
    """Libraries leave tabs and ends of lines out of a URL."""
    first, second = two
    url = odd.format(second.address.removeprefix("http://")) + "/y.tar"
    first.objects["/odd.json"] = json.dumps({"shardlist": [{"url": url, "nsamples": 40}]}).encode()
    with contextlib.suppress(ShardError):
        list(wp.ShardList(f"{first.address}/odd.json", storage_options={"headers": HEADERS}).open_shards().load_tar())
    assert first.leaked()
    assert not second.leaked()
