"""``wds-pipes info``."""

from importlib.metadata import version

import pytest
from click.testing import CliRunner

from wds_pipes.cli import main
from wds_pipes.codecs import images


def run(*arguments):
    return CliRunner().invoke(main, ["info", *arguments])


def test_codecs_says_what_decodes_each_format(monkeypatch):
    monkeypatch.setattr(images, "simplejpeg", lambda: None)
    lines = run("--codecs").output.splitlines()
    assert lines[0] == f"JPEG  pillow {version('pillow')}"
    assert [line.split()[0] for line in lines[1:5]] == ["PNG", "WEBP", "TIFF", "GIF"]
    assert "with: pip install 'wds_pipes[images]'" in lines[-1]


@pytest.mark.parametrize(("arguments", "message"), [("", "pass --codecs"), ("--codecs a.tar", "leave out URLS")])
def test_what_to_show_has_to_be_named(arguments, message):
    result = run(*arguments.split())
    assert (result.exit_code, message in result.output) == (2, True)
