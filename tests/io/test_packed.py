"""A list of many shards takes little memory, and is the list that was passed."""

import pickle

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wds_pipes as wp

# of names without the characters that stand for several shards
NAMES = st.text(
    st.one_of(st.characters(exclude_characters="\0{}*?[]:%#~$/", codec="utf-8"), st.just("\udc80")),
    min_size=1,
    max_size=8,
)
PATHS = st.lists(st.one_of(NAMES, st.sampled_from(["a", "b", "train", "x.tar", ".."])), min_size=1, max_size=4)
URLS = st.builds(
    str.__add__,
    st.sampled_from(["", "/", "s3://bucket/", "file:///", "http://localhost:8000/"]),
    PATHS.map("/".join).map("{}.tar".format),
)
SEVERAL = [*(f"/data/a/{number}.tar" for number in range(3000)), "/data/b/0.tar", "/data/a/x"]


@settings(max_examples=60, deadline=None)
@given(st.lists(URLS, min_size=1, max_size=6, unique=True))
@example(SEVERAL)
def test_shards_come_as_they_were_passed(urls):
    """In order, also in a process that gets the list as a pickle; and a state names its shard."""
    pipe = wp.ShardList(urls, empty_check=False)
    for listed in (pipe, pickle.loads(pickle.dumps(pipe))):
        assert [one.url for one in listed] == urls
        listed.load_state_dict(pipe.state_dict())


def test_a_name_with_a_nul_is_refused():
    with pytest.raises(ValueError, match="contains a NUL"):
        wp.ShardList(["a", "b\0c"])


@pytest.mark.parametrize(
    "folder", ["s3://bucket/", "https://host/d/", "http://127.0.0.1:8000/d/", "http://a:b@host:80/"]
)
def test_a_signed_list_is_the_same_list(folder):
    """A long list of plain URLs is looked at as a whole, and one of signed URLs one by one."""
    plain = [f"{folder}{number}.tar" for number in range(3)]
    state = wp.ShardList(plain, empty_check=False).state_dict()
    signed = wp.ShardList([f"{url}?X-Amz-Signature=1" for url in plain], empty_check=False)
    signed.load_state_dict(state)
    assert {name: signed.state_dict()[name] for name in ("fingerprint", "data")} == {
        name: state[name] for name in ("fingerprint", "data")
    }
