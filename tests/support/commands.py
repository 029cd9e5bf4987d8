"""``wds-pipes`` called in the test's process, and what it has written."""

import os
import stat
from pathlib import Path

import fsspec
from click.testing import CliRunner

from wds_pipes.cli import main


def run_command(*arguments, code=0, stdin=None):
    """Call it, which must end with a code, or with one of several; return click's result."""
    result = CliRunner().invoke(main, list(map(str, arguments)), input=stdin)
    assert result.exit_code in (code if isinstance(code, tuple) else (code,)), result.output
    return result


def refused(*arguments, code=2):
    """The message of a command that must end with this code, in one line."""
    result = run_command(*arguments, code=code)
    written = result.output if result.stderr_bytes is None else result.stderr  # None: click before 8.2
    return " ".join(written.split())


def assert_readable(folder):
    """All files have the permissions of any new file, with which others may read them."""
    umask = os.umask(0)
    os.umask(umask)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in Path(folder).rglob("*") if path.is_file()}
    assert set(modes.values()) == {0o666 & ~umask}, modes


def outputs(folder):
    """The files that a command has written to a directory, by their names in it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and ".wds-pipes" not in path.parts
    }


def stored(store, folder):
    """As ``outputs``, of a directory in a store of the tests."""
    fs = fsspec.filesystem("s3", **store.storage_options)
    fs.invalidate_cache()
    url = f"{store.url}/{folder}/".removeprefix("s3://")
    return {name.removeprefix(url): fs.cat_file(name) for name in fs.find(url) if ".wds-pipes" not in name}
