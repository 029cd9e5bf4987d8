"""Which shards, in which order."""

import pytest
from tars import put

from wds_pipes.stage import Lane, Stream
from wds_pipes.stages import ShardList
from wds_pipes.testing import check_resume

URLS = [f"x-{number}.tar" for number in range(7)]


def order(stage, epoch=0, number=0, of=1) -> list[str]:
    return list(stage.open(Lane(stage.seed, epoch, number, of)).items)


@pytest.mark.parametrize("shuffle", [False, True])
def test_resume_is_exact(shuffle):
    assert [len(epoch) for epoch in check_resume(lambda: Stream(ShardList("x-{0..6}.tar", shuffle=shuffle)), epochs=3)] == [7, 7, 7]


def test_the_order_is_the_list_s_without_shuffle():
    assert order(ShardList(URLS)) == order(ShardList(URLS), epoch=5) == URLS


def test_shuffled_order_is_a_function_of_seed_and_epoch():
    """Golden: a change would be a change of everybody's order."""
    shuffled = ShardList(URLS, shuffle=True, seed=7)
    assert order(shuffled) == order(ShardList(URLS, shuffle=True, seed=7))
    orders = {tuple(order(ShardList(URLS, shuffle=True, seed=seed), epoch)) for seed in (-(1 << 63), -1, 0, 7, (1 << 63) - 1) for epoch in range(3)}
    assert len(orders) == 15
    assert all(sorted(one) == URLS for one in orders)
    assert [url[2] for url in order(shuffled)] == list("4031265")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("of", [1, 2, 3, 7, 9])
def test_lanes_deal_every_shard_once(shuffle, of):
    """And their parts together are in the order of the whole."""
    stage = ShardList(URLS, shuffle=shuffle)
    lanes = [order(stage, 3, number, of) for number in range(of)]
    whole = order(stage, 3)
    assert all(lane == whole[number::of] for number, lane in enumerate(lanes))


def test_a_shard_twice_in_the_list_is_given_twice():
    assert order(ShardList(["x.tar", "x.tar"])) == ["x.tar", "x.tar"]


def test_the_fingerprint_is_of_the_list_without_secrets():
    """New credentials are no new list; another order is."""
    prints = [ShardList(urls).shards()[1] for urls in (["s3://k:1@b/x"], ["s3://k:2@b/x"], ["s3://b/x"], ["s3://b/y"], ["a", "b"], ["b", "a"], ["ab"])]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 5


def test_the_state_names_the_next_shard_for_people(tmp_path):
    """Short, without secrets, and fit for JSON whatever bytes the name has."""
    stream = Stream(ShardList(["s3://k:secret@b/x.tar", "\udcff" * 300]))
    assert stream.state_dict()["lanes"]["0"]["url"] == "s3://b/x.tar"
    next(iter(stream))
    shown = stream.state_dict()["lanes"]["0"]["url"]
    assert len(shown) == 200
    assert shown.isascii()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": 1.5}, TypeError),
        ({"seed": True}, TypeError),
        ({"seed": -(1 << 63) - 1}, ValueError),
        ({"seed": 1 << 63}, ValueError),
        ({"urls": []}, ValueError),
    ],
)
def test_wrong_arguments(options, error):
    with pytest.raises(error, match=next(iter(options)) if "seed" in options else "empty"):
        ShardList(**{"urls": URLS, **options})


def test_patterns_are_expanded(tmp_path):
    for name in "ba":
        put(tmp_path / f"{name}.tar", b"")
    assert order(ShardList(tmp_path / "*.tar")) == order(ShardList(tmp_path)) == [str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]
