"""A web server that lies about lengths, ranges and ends: exact bytes or an error in time; never
wrong bytes, a short shard in silence, or a hang.
"""

import pytest
from lies import Case, Trials
from remote import content
from servers.lying import Lie
from serving import Quiet, serving

import wds_pipes as wp

pytestmark = pytest.mark.filterwarnings("ignore")  # of shards without an end-of-archive mark


def cases():
    """Those that have gone wrong, or differ in kind; ``tests/proofs/lying_server.py`` has all."""
    lies = [
        Lie("close", "inside", "ignored"),
        Lie("chunked", "inside", "ignored"),
        Lie("unended", "inside", "ignored", once=True),
        Lie("1.0", "boundary", "ignored"),
        Lie("close", "late", "unsized"),
        Lie("right", "whole", "unsized"),
        Lie("right", "inside", "short"),
        Lie("right", "drip", "honoured"),
        Lie("right", "silent", "honoured", once=True),
        Lie("unended", "silent", "ignored"),
        Lie("right", "whole", "shifted", once=True),
        Lie("right", "whole", "mislabelled"),
        Lie("long", "whole", "oversized"),
    ]
    for number, lie in enumerate(lies):
        for index in (None, "right", "short", "long"):
            cached = (number + len(index or "")) % 3 == 0
            yield Case(lie, index, cached, connections=1 if number % 2 else 8)


def test_no_lie_is_believed(tmp_path):
    """All in parallel; one that hangs has no outcome."""
    wanted, trials = list(cases()), Trials(tmp_path)
    with trials.server:
        outcomes = trials.read_all(wanted, threads=26, seconds=60)
    assert [case for case in wanted if case not in outcomes] == []
    assert {case: outcome for case, outcome in outcomes.items() if outcome.kind == "WRONG"} == {}
    honest = [
        case
        for case in wanted
        if case.index in (None, "right") and (case.lie.once or case.lie.ranges in ("unsized", "short"))
    ]
    assert [outcomes[case].kind for case in honest if case.lie[:2] == ("right", "whole")].count("exact") >= 3


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("framing", ["1.0", "close"])
def test_an_end_that_nothing_vouches_for(tmp_path, framing, cached):
    """Neither a length nor an end mark: without an end-of-archive mark, the shard was cut."""
    trials = Trials(tmp_path)
    with trials.server:
        cut = trials.read(Case(Lie(framing, "boundary", "ignored"), None, cached=cached, connections=8))
        whole = trials.read(Case(Lie(framing, "whole", "ignored"), None, cached=False, connections=1))
    assert cut.kind == "error"
    assert "is cut: it has no end-of-archive mark" in cut.words
    assert whole.kind == "exact"


def test_a_byte_now_and_then_is_no_progress(tmp_path):
    """A server that drips fails as one that is silent does."""
    trials = Trials(tmp_path)
    dripping = [
        Case(Lie("right", "drip", "honoured"), index, cached=False, connections=count)
        for index, count in ((None, 1), ("right", 8))
    ]
    with trials.server:
        outcomes = trials.read_all(dripping, threads=2, seconds=60)
    assert [outcomes[case].kind for case in dripping] == ["error", "error"]


class Endless(Quiet):
    """Sends ``data`` and then the same for ever."""

    data = after = b""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        try:
            self.wfile.write(self.data)
            while True:
                self.wfile.write(self.after)
        except OSError:  # the client has had enough
            pass


@pytest.mark.parametrize("after", [b"\0" * (1 << 20), b"\1" * (1 << 20)], ids=["zeros", "others"])
@pytest.mark.parametrize("concatenated", [False, True])
def test_a_shard_that_goes_on_for_ever(after, concatenated, local, monkeypatch):
    """It is an error, and with on_error="skip" the search for another header ends."""
    monkeypatch.setattr("wds_pipes.tar.reader._MOST_ZEROS", 1 << 23)
    monkeypatch.setattr("wds_pipes.tar.reader.LEAST_SEARCHED", 1 << 23)
    options = {"concatenated": concatenated, "max_member_bytes": 1 << 20}
    with serving(Endless, data=content(local[0]), after=after) as address:
        pipe = wp.ShardList(f"{address}/0.tar").open_shards()
        with pytest.raises(wp.ShardError, match="bytes of zeros, so its end|data after its end-of-archive mark"):
            list(pipe.load_tar(**options))
        whole = list(pipe.load_tar(**options, on_error="skip"))
    assert [bool(member.name) for member in whole][-2:] == [True, False]
