"""The ports of public training scripts in tutorials/10_moving_from_webdataset.py resume exactly,
and have as many lines as it says. The tutorial itself runs them in one process.
"""

import ast
import io
import pickle
import re
import tokenize

import ports
import pytest
from launch import launch

STEPS = 24
LINES = {
    "open_clip": ["read", "has_caption_and_image", "tokens", "get_wds_dataset"],
    "timm": ["read", "with_target", "image_and_target", "reader_wds"],
    "diffusers": ["read", "wanted", "prepare", "text_to_image"],
    "ResNet": ["make_sample", "image_loader"],
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    directory = tmp_path_factory.mktemp("photos")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        ports.use_photos()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ports.PORTS)
def test_a_port_resumes_with_workers(name, photos, monkeypatch):
    """The same lanes in this process and, after the cut, in two workers. The loader can be pickled,
    as it must be for workers that are not forked.
    """
    monkeypatch.chdir(photos)
    make, cut = getattr(ports, name), 3 + 5 * ports.PORTS.index(name)
    whole, _ = ports.train(make(lanes=2), STEPS)
    head, saved = ports.train(make(lanes=2), cut)
    loader = pickle.loads(pickle.dumps(make(num_workers=2, multiprocessing_context="fork")))
    rest, _ = ports.train(loader, STEPS - cut, saved)
    assert head + rest == whole
    assert len(set(whole)) == STEPS


def test_open_clip_on_two_ranks(photos):
    """Over the ends of epochs of 10 batches, cut in the second."""
    launch(2, ports.train_on_ranks, photos, STEPS, 13, timeout_seconds=120)


def lines_of(functions):
    """How many lines have code: not only a comment or a part of a docstring."""
    text = ports.CHAPTER.read_text()
    lines = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            own = range(node.lineno, node.end_lineno + 1)
            if ast.get_docstring(node):
                own = set(own) - set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
            lines |= set(own)
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return len({token.start[0] for token in tokens if token.type not in blank} & lines)


@pytest.mark.parametrize("name", LINES)
def test_the_numbers_of_lines_stand_in_the_chapter(name):
    told = re.search(rf"^# \| {name}[^|]*\| (\d+) \| (\d+) \|$", ports.CHAPTER.read_text(), re.MULTILINE)
    assert int(told[2]) == lines_of(LINES[name])
