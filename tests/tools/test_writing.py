"""The functions of wds_pipes.tools that write: the same as the commands, without a command line."""

import importlib
import inspect
import pkgutil

import pytest
from commands import outputs, run_command

from wds_pipes import WdsError, tools
from wds_pipes.testing import make_shards


def test_a_function_does_what_its_command_does(tmp_path):
    """And returns a report, whose text is a sentence."""
    make_shards(tmp_path / "in", shards=3, samples=4)
    told = run_command("shuffle", tmp_path / "in", tmp_path / "command", "--seed", 3, "--max-samples", 5).stdout
    options = {"seed": 3, "max_samples": 5}
    report = tools.shuffle(tmp_path / "in", tmp_path / "function", **options)
    assert outputs(tmp_path / "function") == outputs(tmp_path / "command")
    assert f"{report}\n" == told.replace("command:", "function:")
    again = tools.shuffle(tmp_path / "in", tmp_path / "function", **options)
    assert (again.written, again.skipped) == ([], report.written)
    planned = tools.reshard(tmp_path / "in", tmp_path / "none", shards=3, dry_run=True)
    assert planned.says == {f"shard-{number:06d}.tar": "4 samples" for number in range(3)}
    assert not (tmp_path / "none").exists()


RESHARD, JOIN = ("reshard", ["in"]), ("join", ["in"])


@pytest.mark.parametrize(
    ("call", "options", "message"),
    [
        (RESHARD, {"task": 0}, "--task and --tasks belong together"),
        (RESHARD, {"task": 8, "tasks": 8}, "the last is --task 7"),
        (RESHARD, {"task": 0, "tasks": 0}, "tasks must be at least 1"),
        (RESHARD, {"engine": "ray", "jobs": 2}, "as many tasks run as the cluster has CPUs"),
        (RESHARD, {"engine": "Ray"}, "engine must be one of 'ray', not 'Ray'"),
        (RESHARD, {"jobs": 0}, "jobs must be at least 1"),
        (RESHARD, {"shards": 2, "max_samples": 2}, "so --max-samples would be ignored"),
        (RESHARD, {"shards": 0}, "shards must be at least 1"),
        (RESHARD, {"max_samples": 0}, "max_samples must be at least 1"),
        (RESHARD, {"max_bytes": 0}, "a size must be at least 1 byte"),
        (("create", ["in"]), {"max_samples": 0}, "max_samples must be at least 1"),
        (("convert", ["in"]), {"kind": "parquet", "max_samples": -1}, "max_samples must be at least 1"),
        (("split", ["in"]), {"shares": {"a/b": 0.5, "c": 0.5}}, "letters, digits, '_' and '-', and one is 'a/b'"),
        (JOIN, {"partners": ["in"], "missing": "Drop"}, "missing must be one of 'raise', 'drop', 'keep', not 'Drop'"),
        (JOIN, {"partners": ["in"], "prefer": "Last"}, "prefer must be one of 'first', 'last', not 'Last'"),
        (("map", ["module:function", "in"]), {"on_error": "Skip"}, "on_error must be one of 'raise', 'skip'"),
        (("mix", ["in=1"]), {"exhausted": "all"}, "exhausted must be one of 'stop', 'drop', not 'all'"),
        (("export", ["in"]), {"kind": "csv"}, "kind must be one of 'jsonl'"),
        (("convert", ["in"]), {"kind": "csv"}, "kind must be one of 'tfrecord'"),
        (("filter", ["in"]), {"every": 0, "fields": ["cls"]}, "every must be at least 1"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(call, options, message, tmp_path, monkeypatch):
    """Nothing is written, and none means the default."""
    monkeypatch.chdir(tmp_path)
    make_shards("in", shards=1, samples=3)
    name, arguments = call
    with pytest.raises(ValueError, match=message):
        getattr(tools, name)(*arguments, "out", **options)
    assert not (tmp_path / "out").exists()


def test_an_option_that_does_not_exist(tmp_path):
    for function in (tools.reshard, tools.repair):
        with pytest.raises(TypeError, match="there is no option 'job'; the options of jobs are jobs, engine"):
            function("in", tmp_path / "out", job=2)


def test_data_sets_are_texts_paths_or_lists(tmp_path):
    make_shards(tmp_path / "in", shards=2, samples=3, fields=("txt", "cls"))
    tools.shuffle(tmp_path / "in", tmp_path / "shuffled")
    for number, partners in enumerate((str(tmp_path / "shuffled"), tmp_path / "shuffled", [tmp_path / "shuffled"])):
        report = tools.join(tmp_path / "in", tmp_path / f"joined-{number}", partners=partners, prefer="last")
        assert sum(fact["samples"] for fact in report.facts.values()) == 6


def test_a_function_raises_if_tasks_failed(tmp_path):
    """After the others are done; the report says which."""
    make_shards(tmp_path / "in", shards=3, samples=4, fields=("txt",))
    shard = sorted((tmp_path / "in").glob("*.tar"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:2000])
    with pytest.raises(WdsError, match=f"1 of 3 tasks failed, the first is {shard.name}: shard .*is kept") as error:
        tools.filter(tmp_path / "in", tmp_path / "out", every=2)
    assert (len(error.value.report.written), list(error.value.report.failed)) == (2, [shard.name])
    assert not (tmp_path / "out/index.json").exists()


def test_fields_are_names(tmp_path):
    """In any case, and no text, whose letters would be taken for names."""
    make_shards(tmp_path / "in", shards=1, samples=2, fields=("txt", "cls"))
    tools.filter(str(tmp_path / "in"), tmp_path / "out", drop_fields=["TXT"])
    assert {*next(tools.head(str(tmp_path / "out"), count=1)).fields} == {"cls"}
    for function, option in ((tools.filter, "fields"), (tools.filter, "drop_fields"), (tools.export, "fields")):
        kind = {"kind": "jsonl"} if function is tools.export else {}
        with pytest.raises(TypeError, match=f"{option} must be a list of names, not 'txt'"):
            function(str(tmp_path / "in"), tmp_path / "other", **{option: "txt"}, **kind)
    assert not (tmp_path / "other").exists()


def test_a_public_name_is_no_module():
    """Also when the modules were imported, whose names would come first."""
    for module in pkgutil.iter_modules(tools.__path__):
        importlib.import_module(f"wds_pipes.tools.{module.name}")
    assert [name for name in tools.__all__ if inspect.ismodule(getattr(tools, name))] == []
