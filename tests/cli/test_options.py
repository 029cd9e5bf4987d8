"""What the options of all commands have in common."""

import contextlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from commands import outputs, refused, run_command

import wds_pipes
from wds_pipes.cli import main
from wds_pipes.testing import make_shards

# Options that mean something else in another command; their help says what.
OTHERWISE = {"--by", "--decode", "--from", "--ignore", "--key", "--key-split", "--value", "-o"}


def commands(group=main, name=""):
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        if isinstance(command, click.Group):
            yield from commands(command, f"{name}{each} ")
        else:
            yield f"{name}{each}", command


COMMANDS = dict(commands())


def options(command):
    return [option for option in command.params if isinstance(option, click.Option)]


def test_an_option_takes_the_same_in_all_commands():
    found = {}
    for name, command in COMMANDS.items():
        for option in options(command):
            choices = tuple(getattr(option.type, "choices", ()))
            form = (option.is_flag, option.multiple, option.metavar, choices, type(option.type).__name__)
            found.setdefault(option.opts[0], {}).setdefault(form, []).append(name)
    different = {name: forms for name, forms in found.items() if len(forms) > 1 and name not in OTHERWISE}
    assert not different, "give it the same form everywhere, or another name"


def test_all_commands_that_read_urls_can_be_told_how_to_reach_them():
    for name, command in COMMANDS.items():
        arguments = {argument.name for argument in command.params if isinstance(argument, click.Argument)}
        if arguments & {"urls", "source", "sources"}:
            assert "storage_options" in {option.name for option in options(command)}, name


def test_every_command_has_an_example_and_every_option_a_help():
    """A sentence that can be understood without the documentation of the Python functions."""
    for name, command in COMMANDS.items():
        assert command.name == name.split()[-1]
        assert name in {"cache ls", "cache clear"} or f"Example:\n  wds-pipes {name}" in command.epilog
        for option in options(command):
            assert option.help, f"{name} {option.opts[0]}"
            assert option.help[0].isupper(), option.help
            assert not option.help.startswith("As in "), f"{name} {option.opts[0]}: say what it does"
            for word in ("may be repeated", "Repeatable"):
                assert word not in option.help, f"{name} {option.opts[0]}: write it as 'repeatable'"


def test_the_help_of_a_command_fits_a_screen():
    for name in COMMANDS:
        assert len(run_command(*name.split(), "--help").stdout.splitlines()) <= 50, name


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["head"], "txt,cls"),
        (["cat"], "txt;cls"),
        (["filter", "d", "out"], " TXT, .cls ,txt"),
        (["export", "d", "out", "--to", "jsonl"], "txt,cls"),
    ],
)
def test_names_of_fields_are_read_alike(command, written, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_shards("d", shards=1, samples=2, fields=("txt", "cls", "json"))
    done = run_command(*command, *(["d"] if len(command) == 1 else []), "--fields", written)
    found = b"".join(outputs("out").values()) if len(command) > 1 else done.stdout_bytes
    assert b"txt" in found
    assert b"cls" in found
    assert b"weight" not in found  # which is in json
    assert "names of fields" in run_command(*command, "d", "--fields", "txt,,cls", code=2).stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            'ls s3://bucket/x.tar --storage-options {"endpoint_url":"http://127.0.0.1:9"}',
            """for public data pass --storage-options '{"anon": true}', for buckets""",
        ),
        ("head d --fields cap", "Error: all 2 samples had none of the fields 'cap'; they have 'cls', 'txt'. Correct"),
        ("map functions_here:odd d out", "and set: pass bytes, or use one of"),
        ("index s3://b/x.tar --offsets", "written to a directory, --offsets-to DIRECTORY:"),
    ],
)
def test_messages_name_options_of_commands(command, message, tmp_path, monkeypatch):
    """Not the arguments of Python that messages of the package name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    make_shards("d", shards=1, samples=2, fields=("txt", "cls"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    Path("functions_here.py").write_text("def odd(sample):\n    return {'zzz': {1, 2}}\n")
    assert message in refused(*command.split(), code=(1, 2))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_report_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    make_shards(tmp_path / "d", shards=1, samples=2)
    full = open("/dev/full", "w")  # closing it would fail
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as ended:
        main(["info", str(tmp_path / "d")])
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        full.close()
    assert ended.value.code == 1
    assert "No space left on device" in capsys.readouterr().err


def test_ctrl_c_says_what_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    make_shards("d", shards=1, samples=2)
    Path("interrupting.py").write_text("def interrupt(sample): raise KeyboardInterrupt\n")
    made = run_command("map", "interrupting:interrupt", "d", "out", code=130)
    assert made.stderr == "what is finished is kept: run the same command again to go on\nAborted!\n"


INTERRUPTED = """
import atexit, os, signal, time


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def same(sample):
    return sample


if os.environ["WHEN"] == "at exit":
    atexit.register(interrupt)
else:
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("half a library") from None
"""


@pytest.mark.parametrize("when", ["import of click", "at exit"])
def test_ctrl_c_is_one_line_at_any_moment(tmp_path, when):
    """Also where a library makes another error of it, as numpy does when it is imported."""
    make_shards(tmp_path / "d", shards=1, samples=2)
    name = "click" if when == "import of click" else "functions_here"
    (tmp_path / f"{name}.py").write_text(INTERRUPTED)
    with open(Path(__file__).parents[2] / "pyproject.toml", "rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["wds-pipes"].partition(":")
    command = [sys.executable, "-c", f"from {module} import {function}; {function}()"]
    ended = subprocess.run(
        [*command, "map", "functions_here:same", "d", "out"],
        check=False,
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "WHEN": when, "PYTHONPATH": f"{tmp_path}:{Path(wds_pipes.__file__).parents[1]}"},
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (130, "Aborted!\n")
