"""Servers that tell less than they should, or something else: without ranges, sizes, lengths;
answers that nobody can read; ETags that come and go.
"""

import pytest
from pipelines import loaded
from remote import bare, content, cut_at, put_all, samples
from serving import Ranged, serving

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.testing import make_shards


class Answers(Ranged):
    """Gives ``data`` as ``kind`` says."""

    kind = ""

    def do_GET(self):
        start, stop = self.requested()
        body, headers = self.data, {"Connection": "close"}
        if self.kind != "sizes are unknown":
            self.begin(200, {**headers, "Content-Length": len(body) if self.kind == "no ranges" else None})
        elif start >= len(body):
            body = b""
            self.begin(416, headers)
        else:
            body = body[start:stop]
            self.begin(206, {**headers, "Content-Range": f"bytes {start}-{stop - 1}/*", "Content-Length": len(body)})
        self.write(body)


@pytest.fixture(params=["sizes are unknown", "no ranges", "no lengths"])
def url(request, tmp_path):
    [path] = make_shards(tmp_path, shards=1, samples=40, fields={"bin": lambda rng, _: rng.randbytes(70_000)})
    with serving(Answers, data=content(path), kind=request.param) as address:
        yield f"{address}/x.tar"


@pytest.mark.parametrize("connections", [1, 4])
def test_all_is_read_once_and_a_resume_is_exact(url, connections):
    def make():
        return wp.ShardList(url).open_shards(connections=connections, readahead_bytes=1 << 20).load_tar().group_by_key()

    wanted = [f"{number:08d}" for number in range(40)]
    assert [sample["__key__"] for sample in make()] == wanted
    assert [sample["__key__"] for sample in loaded(make(), cut_at(make(), 26))] == wanted[26:]


JUNK = {
    "no status line": "junk\r\n\r\n",
    "bytes of something else": "\x16\x03\x01\x00\xff" * 20,
    "a bad status": "HTTP/1.1 2x6 Odd\r\n\r\n",
    "a bad header": "HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nno colon here\r\n\r\nabcde",
    "a bad length": "HTTP/1.1 206 Partial Content\r\nContent-Length: -5\r\n\r\nabcde",
    "two lengths": "HTTP/1.1 206 Partial Content\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "a long header": "HTTP/1.1 206 Partial Content\r\nX-Long: " + "x" * 100_000 + "\r\n\r\n",
    "a bad chunk": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc",
    "a chunk that goes on": "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdefgh\r\n",
    "nothing": "",
    "half a head": "HTTP/1.1 206 Partial Con",
    "no content": "HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": "HTTP/1.1 304 Not Modified\r\nConnection: close\r\n\r\n",
    "several ranges": "HTTP/1.1 206 Partial Content\r\nContent-Type: multipart/byteranges; "
    "boundary=x\r\nContent-Length: 5\r\n\r\n--x\r\n",
}


@pytest.mark.parametrize("junk", JUNK)
def test_one_answer_that_cannot_be_read(web, local, junk):
    """Is a broken transfer as others are: the request is made again.

    At the beginning and in the middle.
    """
    read_on(web, local, JUNK[junk])


@pytest.mark.parametrize("store", ["s3", "gcs"])
@pytest.mark.parametrize("junk", ["no status line", "a bad header", "a bad chunk", "not modified"])
def test_one_answer_of_s3_or_gcs_that_cannot_be_read(request, local, store, junk):
    read_on(request.getfixturevalue(store), local, JUNK[junk])


def test_a_range_that_is_refused_and_within_the_size_of_the_refusal(web, local):
    size = len(content(local[0]))
    read_on(web, local, f"HTTP/1.1 416 Range Not Satisfiable\r\nContent-Range: bytes */{size}\r\n\r\n")


def read_on(remote, local, raw):
    (url,) = put_all(remote, local[:1])
    remote.faults.rules(
        {"match": remote.reads, "raw": raw, "times": 1},
        {"match": remote.reads, "raw": raw, "times": 1, "skip": 2},
    )
    assert list(map(bare, samples(url, remote))) == list(map(bare, samples(local[0])))
    assert sum("raw" in request.faults for request in remote.faults.stats(remote.reads)) == 2


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 599])
def test_a_status_that_passes(web, local, status):
    """All of 5xx, as it is documented."""
    (url,) = put_all(web, local[:1])
    web.faults.rules({"match": web.reads, "status": status, "times": 1})
    assert list(map(bare, samples(url, web))) == list(map(bare, samples(local[0])))


def test_a_code_that_passes(s3, local):
    """With a status that does not."""
    (url,) = put_all(s3, local[:1])
    s3.faults.rules(
        {"match": s3.reads, "status": 400, "body": "<Error><Code>RequestTimeout</Code></Error>", "times": 1}
    )
    assert list(map(bare, samples(url, s3))) == list(map(bare, samples(local[0])))


@pytest.mark.parametrize("status", [300, 304, 305, 400, 402, 405, 409, 410, 451])
def test_a_status_that_stays(web, local, status):
    """Those that say what is wrong with the request are an error at once; one without a meaning
    here is not.
    """
    (url,) = put_all(web, local[:1])
    web.faults.rules({"match": web.reads, "status": status})
    with pytest.raises(ShardError, match=str(status)):
        list(samples(url, web, retries=1))
    assert len(web.faults.stats(web.reads)) == (2 if status == 304 else 1)


NAMES = {
    "weak and strong": ['W/"one"', '"one"', 'W/"one"', '"one"'],
    "strong and weak": ['"one"', 'W/"one"', '"one"', 'w/"one"'],
    "sometimes none": ['"one"', None, '"one"', None],
    "none at first": [None, '"one"', 'W/"one"', '"one"'],
}


class Tagged(Ranged):
    """Ranges of ``data``, with ``tags`` in turn; where there is none, with the time of the last
    change only.
    """

    tags = ()
    times = ("Wed, 21 Oct 2015 07:28:00 GMT",) * 4
    asked = 0

    def do_GET(self):
        start, stop = self.requested()
        stop = min(stop, start + 600_000)
        number = type(self).asked = min(type(self).asked + 1, len(self.tags))
        self.begin_range(start, stop, **{"ETag": self.tags[number - 1], "Last-Modified": self.times[number - 1]})
        self.write(self.data[start:stop])


@pytest.mark.parametrize("tags", NAMES.values(), ids=NAMES)
def test_etags_that_say_the_same_or_nothing(local, tags):
    """The object is the same: a weak one is compared with a strong one, and one that is missing
    says nothing.
    """
    with serving(Tagged, data=content(local[0]), tags=tags) as address:
        assert list(map(bare, samples(f"{address}/x.tar", connections=1))) == list(map(bare, samples(local[0])))


@pytest.mark.parametrize(
    "changes",
    [
        {"tags": ['"one"', None, '"two"', '"two"']},
        {"tags": ['W/"one"', '"one"', 'W/"two"', '"two"']},
        {"tags": [None, '"one"', None, '"two"']},
        {
            "tags": ['"one"', None, None, None],
            "times": ["Wed, 21 Oct 2015 07:28:00 GMT"] * 2 + ["Wed, 21 Oct 2015 07:28:01 GMT"] * 2,
        },
    ],
    ids=["behind one that says nothing", "from weak to weak", "behind two that say nothing", "by its time only"],
)
def test_etags_that_say_that_it_was_changed(local, changes):
    """Are an error, whatever came between."""
    with (
        serving(Tagged, data=content(local[0]), **changes) as address,
        pytest.raises(ShardError, match="was changed while it was read"),
    ):
        list(samples(f"{address}/x.tar", connections=1))


def test_an_index_of_offsets_that_does_not_end():
    """It is not read until the memory is full."""
    with (
        serving(Answers, data=bytes(65 << 20), kind="no lengths") as address,
        pytest.raises(ShardError, match=f"more than {64 << 20} bytes"),
    ):
        len(wp.IndexedShards(f"{address}/x.tar"))
