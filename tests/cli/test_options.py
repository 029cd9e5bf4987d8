"""What the options of all commands have in common."""

import contextlib
import os
import signal
import struct
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from commands import outputs, refused, run_command
from tars import put, tar

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


def test_a_command_that_does_not_exist_is_compared_with_those_that_do():
    assert "Did you mean 'verify'?" in CliRunner().invoke(main, ["verfy"]).output
    assert CliRunner().invoke(main, ["xyz"]).output.endswith("Error: No such command 'xyz'.\n")


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
    """Of 80 columns, of which click leaves two free."""
    for name in COMMANDS:
        shown = CliRunner().invoke(main, [*name.split(), "--help"], terminal_width=78).stdout
        assert len(shown.splitlines()) <= 50, name


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


def test_the_options_of_a_store_are_written_for_a_shell(tmp_path, monkeypatch):
    """JSON, not a dict of Python."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    told = refused("ls", "s3://b/x.tar", "--storage-options", '{"endpoint_url":"http://127.0.0.1:9"}', code=1)
    assert """: check your credentials; for public data pass --storage-options '{"anon": true}', for buckets""" in told


FUNCTIONS = """
def same(sample):
    return sample


def length(sample):
    return {"json": sample["txt"].strip() + "more"}


def read(sample):
    return {"json": sample["json"]["caption"]}


def odd(sample):
    return {"zzz": {1, 2}}
"""


@pytest.fixture(scope="module")
def bad_inputs(tmp_path_factory):
    """What commands refuse, and outputs of two commands."""
    folder = tmp_path_factory.mktemp("bad")
    make_shards(folder / "d", shards=1, samples=2, fields=("txt", "json"))
    large = struct.pack(">I4sIIBBBBB", 13, b"IHDR", 60_000, 60_000, 8, 2, 0, 0, 0)
    files = {
        "pickles": [("a.pkl", b"x")],
        "texts": [("a.cls", b"cat")],
        "large": [
            (
                "a.png",
                b"\x89PNG\r\n\x1a\n"
                + large
                + struct.pack(">II4sI", zlib.crc32(large[4:]), 0, b"IDAT", zlib.crc32(b"IDAT")),
            )
        ],
        "none": [("README", b"x")],
        "repeated": [("a.txt", b"x"), ("b.txt", b"x"), ("a.json", b"{}")],
        "dotted": [("a.v0.jpg", b"x"), *((f"b{number}.v.txt", b"x") for number in range(3))],
    }
    for name, members in files.items():
        put(folder / f"{name}.tar", tar(members))
    for name in ("cut.tar", "-rf.tar"):
        put(folder / name, tar([(f"{number}.txt", b"x") for number in range(4)])[:1800])
    put(folder / "joined.tar", 2 * tar([("a.txt", b"x")]))
    put(folder / "empty.json", b'{"shardlist": [], "wids_version": 1}')
    put(folder / "table.csv", b"key,text\n" + b"a,b\n" * 100)
    put(folder / "table.jsonl", b'{"id": "a"}\n')
    put(folder / "refused_here.py", FUNCTIONS.encode())
    return folder


@pytest.mark.filterwarnings("default:no sample had field")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("map refused_here:same pickles.tar out --decode basic", "with wds-pipes filter --drop-fields\n"),
        (
            "map refused_here:same texts.tar out --decode basic",
            "A field of this name is an integer: name a text txt.",
        ),
        (
            "map refused_here:same texts.tar out --decode basic",
            "or leave such samples out with wds-pipes repair --de",
        ),
        ("map refused_here:same large.tar out --decode pil", "60000 x 60000 pixels, more than 67108864. Correct it"),
        ("map refused_here:same d out --decode zip", ", yml\n"),
        ("map refused_here:length d out", ". Fields are bytes, which --decode basic decodes\n"),
        ("map refused_here.py:same d out", "Name it refused_here:same, without .py\n"),
        ("head none.tar", "Rename them, or pass another --key-split."),
        ("head pickles.tar", "1 byte, not decoded: unpickling runs code from the data\n"),
        ("info empty.json", "empty.json does not list shards: name the shards\n"),
        ("verify dotted.tar", "Read with --key-split last-dot, or write keys"),
        ("info pipe:cat", "would run a shell command: read the command's output from '-'."),
        ("info cut.tar --all", "Write or fetch it again. To keep its whole samples: wds-pipes repair cut.tar NEW\n"),
        ("sort cut.tar out", "Write or fetch it again. To keep its whole samples: wds-pipes repair cut.tar NEW\n"),
        ("sort -- -rf.tar out", "To keep its whole samples: wds-pipes repair ./-rf.tar NEW\n"),
        ("verify -- -rf.tar", "wds-pipes repair ./-rf.tar NEW\n"),
        ("export cut.tar out --to jsonl", "To keep its whole samples: wds-pipes repair cut.tar NEW\n"),
        (
            "head d --fields cap",
            "had none of the fields 'cap'; they have 'json', 'txt'. Correct the names of --fields",
        ),
        ("head d --fields txt,jsson", "no sample had field 'jsson'. Did you mean 'json', which --fields leaves out?\n"),
        ("map refused_here:odd d out", "for 'zzz' and set: pass bytes, or use one of "),
        ("map refused_here:same d out --decode zip", "unknown spec 'zip': use one of l, l8"),
        ("index s3://b/x.tar --offsets", "written to a directory: pass --offsets-to DIRECTORY, and copy it beside"),
        ("index repeated.tar -o out.json", "or pass --on-repeated-key ignore to wds-pipes index, to take the pieces"),
        ("verify repeated.tar", "or pass --on-repeated-key ignore to wds-pipes index, to take the pieces"),
        ("repair joined.tar out --json", "If archives were joined, pass --concatenated to wds-pipes repair. Otherwise"),
        ("concat d -", "a file is not written to '-': name a file\n"),
        ("cache ls", "pass --directory DIRECTORY, or set WDS_PIPES_CACHE_DIR\n"),
        ("sort d out --by json:none", "no value 'json:none': name another value, or leave the sample out with wds-pip"),
    ],
)
def test_what_to_do_is_said_in_words_of_commands(command, message, bad_inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(bad_inputs)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("WDS_PIPES_CACHE_DIR", raising=False)
    output = run_command(*command.replace(" out", f" {tmp_path / 'out'}").split(), code=(0, 1, 2)).output
    assert message in output


@pytest.mark.parametrize(
    ("commands", "message"),
    [
        (
            ("reshard d", "reshard d --max-samples 1"),
            "--max-samples was 100000, and is now 1. Write to another directory, or pass --overwrite to ",
        ),
        (("map refused_here:same d", "map refused_here:read d"), "the function was 'refused_here:same, code "),
    ],
)
def test_what_distinguishes_two_jobs_is_an_option(commands, message, bad_inputs, tmp_path, monkeypatch):
    monkeypatch.chdir(bad_inputs)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before, now = [command.split() for command in commands]
    run_command(*before, tmp_path)
    assert f"has the outputs of another job: {message}" in refused(*now, tmp_path)


@pytest.mark.slow
def test_a_refused_table_leaves_nothing_behind(bad_inputs, tmp_path):
    """No traceback of what was reading it, when the interpreter ends."""
    command = [sys.executable, "-m", "wds_pipes", "create", bad_inputs / "table.csv", tmp_path / "out", "--key", "none"]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.stderr == f"Error: {bad_inputs / 'table.csv'} has no column 'none'; it has: key, text\n"


@pytest.mark.parametrize("moment", ["import", "call"])
def test_sigterm_is_no_error_of_a_function(moment, tmp_path, monkeypatch):
    """Though it ends a command by a SystemExit, as a function may raise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    make_shards("d", shards=3, samples=2)
    name = f"ended_at_{moment}"
    end = "signal.raise_signal(signal.SIGTERM)"
    Path(f"{name}.py").write_text(f"import signal\ndef f(sample): {end}\n{end if moment == 'import' else ''}\n")
    ended = run_command("map", f"{name}:f", "d", "out", code=128 + signal.SIGTERM)
    assert ended.output == ""


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


@pytest.mark.parametrize("when", ["import of click", "import of the function", "at exit"])
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
