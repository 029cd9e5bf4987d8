"""What is shown of pipelines and samples: the chain as it was written, a graph that programs
read, HTML that is safe and small; never a secret.
"""

import base64
import html.parser
import io
import pickle
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data.datapipes.datapipe import IterDataPipe
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes.display import show
from wds_pipes.testing import make_shards


@pytest.fixture
def pattern(tmp_path, monkeypatch):
    """Four shards by a pattern relative to the working directory."""
    make_shards("." if monkeypatch.chdir(tmp_path) else tmp_path, shards=4, samples=3, fields=("jpg", "cls", "txt"))
    return "shard-{000000..000003}.tar"


def chain(pattern, **options):
    return wp.ShardList(pattern, **options).open_shards().load_tar().group_by_key()


def double(sample):
    return sample


def augment(sample, rng):
    return sample


class Parsed(html.parser.HTMLParser):
    """The tags and texts of HTML, whose tags must all be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.images, self._open = [], [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "img":
            self.images.append(dict(attributes)["src"])
        else:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def pictures(self):
        return [Image.open(io.BytesIO(base64.b64decode(source.partition(";base64,")[2]))) for source in self.images]


# Pipelines


ONE, STEPS = "ShardList('shard-{000000..000003}.tar' (4 shards)", ".open_shards().load_tar().group_by_key()"


@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (
            lambda pattern: (
                chain(pattern, shuffle=True, seed=7)
                .shuffle_buffer(1000, seed=None)
                .decode_by_ext("rgb8", {"seg.png": len}, on_error="skip")
                .map_samples(augment)
                .filter_samples(lambda sample: True)
                .to_tuple("jpg;png", "cls")
                .batch_samples(size=8, drop_last=False, collate="list")
            ),
            f"{ONE}, shuffle=True, seed=7){STEPS}.shuffle_buffer(1000).decode_by_ext('rgb8', {{'seg.png': len}}, "
            "on_error='skip').map_samples(augment).filter_samples(lambda).to_tuple('jpg;png', 'cls')"
            ".batch_samples(8, collate='list')",
        ),
        (
            lambda pattern: wp.mix(
                {"a": chain(pattern).interleave_shards(2), "b": chain(pattern, seed=1)},
                {"a": 9, "b": Fraction(1, 2)},
                exhausted="drop",
            ).shuffle_buffer(5),
            f"mix({{'a': {ONE}){STEPS}.interleave_shards(2), 'b': {ONE}, seed=1){STEPS}}}, "
            "weights={'a': 9, 'b': Fraction(1, 2)}, exhausted='drop').shuffle_buffer(5)",
        ),
        (
            lambda pattern: wp.PipeLoader(chain(pattern), batch_size=4, num_workers=2, collate="list"),
            f"PipeLoader({ONE}){STEPS}, batch_size=4, num_workers=2, collate='list')",
        ),
    ],
)
def test_repr_is_the_chain_with_what_was_chosen(build, expected, pattern):
    assert repr(build(pattern)) == str(build(pattern)) == expected


def test_repr_of_torch_pipes_before_between_and_after_ours():
    pipe = IterableWrapper(["a.tar"], deepcopy=False).open_shards().map(double).load_tar().batch(4, drop_last=True)
    assert repr(pipe) == (
        "IterableWrapper(['a.tar'], deepcopy=False).open_shards().map(double).load_tar().batch(4, drop_last=True)"
    )
    assert repr(show(pipe.shuffle(buffer_size=10))) == f"{pipe!r}.shuffle(buffer_size=10)"


def test_a_long_list_and_one_that_can_be_read_only_once_are_short(tmp_path):
    paths = make_shards(tmp_path, shards=40, samples=0)
    for urls in (paths, iter(paths), tuple(paths)):
        text = repr(wp.ShardList(urls, samples_per_shard=[0] * 40))
        assert text.startswith(("ShardList(['", "ShardList(('"))
        assert re.search(r", \.\.\.[\])] \(40 shards\), samples_per_shard=\[0, 0, 0, \.\.\.\]\)$", text)
        assert len(text) < 400
    long = repr(wp.ShardList("https://host/" + "a" * 5000 + "-{0..9}.tar"))
    assert len(long) < 130
    assert long.endswith("-{0..9}.tar' (10 shards))")


def every_view(pipe):
    return [repr(pipe), pipe._repr_html_(), repr(show(pipe))]


def test_secrets_are_in_none_of_the_views_nor_in_what_is_pickled_for_them():
    options = {
        "key": "SECRET",
        "secret": "SECRET",
        "client_kwargs": {"headers": {"Authorization": "Bearer SECRET"}},
        "anon": False,
        "password": 7357123,
    }
    pipe = wp.ShardList(
        ["https://me:SECRET@host/a.tar?sig=SECRET", "s3://b/c?X-Amz-Signature=SECRET&v=1"], storage_options=options
    )
    pipe = pipe.open_shards(storage_options=options, allow_pipe=True)
    alone = wp.ShardList("pipe:curl -H SECRET https://me:SECRET@host/{0..3}.tar").open_shards()
    torchs = IterableWrapper(["https://me:SECRET@host/a.tar?token=SECRET"]).open_shards()
    for each in (pipe, alone, torchs, wp.mix({"a": pipe})):
        for view in every_view(each):
            assert "SECRET" not in view
            assert "7357123" not in view
    assert "'anon': False" in repr(pipe)
    assert "https://host/a.tar?..." in repr(pipe)
    assert b"SECRET" not in pickle.dumps(pipe._call)


def test_repr_of_foreign_objects_is_not_called(pattern):
    class Loud:
        def __repr__(self):
            raise AssertionError

        def __call__(self, sample):
            return sample

    pipe = chain(pattern).map_samples(Loud()).filter_samples(torch.nn.Identity())
    assert repr(pipe).endswith(".map_samples(Loud(...)).filter_samples(Identity(...))")


class Untouchable(IterDataPipe):
    """A pipe that may not be iterated."""

    def __init__(self, weights):
        self.weights = weights

    def __iter__(self):
        raise AssertionError


def test_nothing_is_iterated_or_opened():
    pipe = Untouchable(np.zeros((1000, 1000))).open_shards().load_tar()
    assert repr(pipe) == "Untouchable(<ndarray float64 (1000, 1000)>).open_shards().load_tar()"
    assert every_view(wp.ShardList("https://nowhere.invalid/a.tar").open_shards().load_tar())


def test_a_users_own_stage_is_shown_with_its_arguments(pattern):
    class PickSome(wp.Stage):
        """Some. Not all."""

        def __init__(self, source, *which, password="", table=None, **more):
            super().__init__(source)

        def run(self):
            yield from self.source.items

    wp.register_stage(PickSome)
    pipe = wp.ShardList(pattern).pick_some(1, "b", password="SECRET", table=torch.zeros(2, 3), other=[1, 2, 3, 4])
    assert repr(pipe).endswith(
        ".pick_some(1, 'b', password='...', table=<Tensor float32 (2, 3)>, other=[1, 2, 3, ...])"
    )
    assert "Some. Not all" in pipe._repr_html_()


@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
def test_html_of_a_pipe_lists_its_steps_with_their_help(pattern):
    pipe = wp.mix({"<script>": chain(pattern), "b": chain(pattern).shuffle_buffer(3)}).to_tuple("<b>")
    page = Parsed(pipe._repr_html_())
    assert "script" not in page.tags
    assert page.tags.count("ol") == 3
    assert {"<script>", "to_tuple('<b>')", "shuffle_buffer(3)", "Shuffle samples within a moving window"} <= set(
        page.texts
    )
    assert Parsed(show(IterableWrapper([1]).shuffle())._repr_html_()).texts[0] == "IterableWrapper([1])"


# Samples


def encoded(array, form="PNG"):
    file = io.BytesIO()
    Image.fromarray(array).save(file, form)
    return file.getvalue()


def test_a_sample_of_bytes_shows_its_image_and_describes_the_rest():
    picture = np.zeros((600, 300, 3), np.uint8)
    picture[:, :, 0] = 255
    sample = {
        "__key__": "a<b",
        "__url__": "https://me:SECRET@host/a.tar",
        "JPG": b"",
        "seg.png": encoded(picture),
        "cls": b"3",
        "jpg": b"no image",
    }
    view = show(sample)
    page = Parsed(view._repr_html_())
    [drawn] = page.pictures()
    assert drawn.size == (96, 192)
    assert np.abs(np.array(drawn.convert("RGB").getpixel((50, 100))) - [255, 0, 0]).max() < 3
    assert "a<b" in page.texts
    assert "SECRET" not in repr(view) + view._repr_html_()
    assert repr(view).splitlines()[3] == f"seg.png  {len(sample['seg.png']):,} bytes"
    assert set(sample) == {"__key__", "__url__", "JPG", "seg.png", "cls", "jpg"}


RED = np.zeros((40, 20, 3), np.uint8) + np.array([255, 0, 0], np.uint8)


@pytest.mark.parametrize(
    "value",
    [
        RED,
        Image.fromarray(RED),
        Image.fromarray(RED).convert("CMYK"),
        RED.astype(np.float32) / 255,
        torch.from_numpy(RED).permute(2, 0, 1),
        torch.from_numpy(RED).permute(2, 0, 1).bfloat16() / 255,
        torch.from_numpy(RED).permute(2, 0, 1).float().div(255).requires_grad_(),
        [Image.fromarray(RED)],
        RED[None],
        np.concatenate([RED, np.full((40, 20, 1), 255, np.uint8)], axis=2),
    ],
)
def test_each_form_of_an_image_is_drawn(value):
    [drawn] = Parsed(show({"image": value})._repr_html_()).pictures()
    assert drawn.size == (20, 40)
    assert abs(np.array(drawn.convert("RGB").getpixel((5, 5))).astype(int) - [255, 0, 0]).max() < 3


@pytest.mark.parametrize(
    ("item", "lines"),
    [
        (
            {"cls": b"7", "bin": b"\x00\x01", "txt": b"x" * 40},
            ["cls  1 byte: 7", "bin  2 bytes", "txt  40 bytes"],
        ),
        (
            (torch.tensor([3, 1]), np.array([0.5]), np.zeros((2, 2)), torch.tensor(0.5)),
            [
                "0  Tensor int64 (2,) [3, 1]",
                "1  ndarray float64 (1,) 0.5",
                "2  ndarray float64 (2, 2)",
                "3  Tensor float32 () 0.5",
            ],
        ),
        (
            (torch.arange(64), ["a cat"] * 64),
            [
                "0  Tensor int64 (64,) [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...]",
                "1  list of 64: ['a cat', 'a cat', 'a cat', ...]",
            ],
        ),
        (
            {"json": {"key": "a", "list": [1, 2, 3, 4], "token": None}},
            ["json  {'key': 'a', 'list': [1, 2, 3, ...], 'token': None}"],
        ),
        (3, ["  3"]),
        ("text", ["  text"]),
        ({}, []),
    ],
)
def test_the_text_of_a_sample(item, lines):
    assert repr(show(item)).splitlines() == lines


def test_output_is_bounded_and_escaped():
    noise = np.random.default_rng(0).integers(0, 256, (2000, 2000, 3), np.uint8)
    sample = {
        f"<field {number}>": noise if number < 20 else "<script>alert(1)</script>" * 10000 for number in range(200)
    }
    sample["nested"] = {"a": [[[[[["deep"]]]]]]}
    view = show(sample)
    page = Parsed(view._repr_html_())
    assert "script" not in page.tags
    assert len(page.images) == 16
    assert len(view._repr_html_()) < 16 * 192 * 192 * 5
    assert len(repr(view)) < 50_000
    assert "and 151 more fields" in repr(view)


def test_control_characters_are_written_out():
    """Escape sequences could rename a window or hide the text after them. Ordinary text of all
    languages stays.
    """
    text = "cat \x1b]0;title\x07 \x9b2J \u202egpj.exe\r\n\tdog \udcff größe 日本 👩\u200d👧\xa0x"
    view = show({"txt\x1b[2J": text, "list": ["\x1b[31m"], "__key__": "\x1bc"})
    for form in (repr(view), view._repr_html_()):
        assert not {"\x1b", "\x07", "\x9b", "\u202e", "\r", "\udcff"} & set(form)
        assert "cat \\x1b]0;title\\x07 \\x9b2J \\u202egpj.exe\\r\n\tdog \\udcff größe 日本 👩\u200d👧\xa0x" in form
    assert repr(view).startswith("txt\\x1b[2J")
    for item in ("\x1b[2J", ["\x1b[2J"], {"\x1b": 1}):
        assert "\x1b" not in repr(show(item))


def test_a_huge_image_is_not_decoded_to_show_it():
    header = b"P5 60000 60000 255\n"
    assert Parsed(show({"pgm": header + bytes(100)})._repr_html_()).images == []
