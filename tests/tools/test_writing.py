"""The functions of wds_pipes.tools that write: the same as the commands, without a command line."""

import importlib
import inspect
import pkgutil

import pytest
from commands import outputs, run_command

from wds_pipes import tools
from wds_pipes.testing import make_shards


def test_a_function_does_what_its_command_does(tmp_path):
    """And returns a report, whose text is a sentence."""
    make_shards(tmp_path / "in", shards=3, samples=4, fields=("txt", "cls"))
    for name, arguments, options, changes in (
        ("shuffle", [], ["--seed", 3, "--max-samples", 5], {"seed": 3, "max_samples": 5}),
        ("filter", [], ["--fields", "cls"], {"fields": ["cls"]}),
        ("export", [], ["--to", "jsonl"], {"kind": "jsonl"}),
    ):
        told = run_command(name, *arguments, tmp_path / "in", tmp_path / f"{name}-command", *options).stdout
        report = getattr(tools, name)(str(tmp_path / "in"), tmp_path / f"{name}-function", **changes)
        assert outputs(tmp_path / f"{name}-function") == outputs(tmp_path / f"{name}-command")
        assert f"{report}\n" == told.replace("-command", "-function")
        assert report.complete
        again = getattr(tools, name)(str(tmp_path / "in"), tmp_path / f"{name}-function", **changes, jobs=2)
        assert (again.written, again.skipped) == ([], report.written)


def test_nothing_is_written_if_only_a_report_is_wanted(tmp_path):
    urls = make_shards(tmp_path / "in", shards=2, samples=3)
    report = tools.reshard(urls, tmp_path / "out", shards=3, dry_run=True)
    assert report.says == {f"shard-{number:06d}.tar": "2 samples" for number in range(3)}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": 0}, "--task and --tasks belong together"),
        ({"task": 8, "tasks": 8}, "the last is --task 7"),
        ({"engine": "ray", "jobs": 2}, "as many tasks run as the cluster has CPUs"),
        ({"shards": 2, "max_samples": 2}, "so --max-samples would be ignored"),
    ],
)
def test_options_that_do_not_fit(options, message, tmp_path):
    urls = make_shards(tmp_path / "in", shards=1, samples=3)
    with pytest.raises(ValueError, match=message):
        tools.reshard(urls, tmp_path / "out", **options)
    for function in (tools.reshard, tools.repair):
        with pytest.raises(TypeError, match="there is no option 'job'; the options of jobs are jobs, engine"):
            function(urls, tmp_path / "out", job=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "arguments", "options", "message"),
    [
        (
            "join",
            ["in"],
            {"partners": ["other"], "missing": "Drop"},
            "missing must be one of 'raise', 'drop', 'keep', not 'Drop'",
        ),
        (
            "join",
            ["in"],
            {"partners": ["other"], "prefer": "Last"},
            "prefer must be one of 'first', 'last', not 'Last'",
        ),
        ("map", ["module:function", "in"], {"on_error": "Skip"}, "on_error must be one of 'raise', 'skip', not 'Skip'"),
        ("mix", ["in"], {"exhausted": "all"}, "exhausted must be one of 'stop', 'drop', not 'all'"),
        ("export", ["in"], {"kind": "csv"}, "kind must be one of 'jsonl'"),
        ("convert", ["in"], {"kind": "csv"}, "kind must be one of 'tfrecord'"),
        ("reshard", ["in"], {"shards": 1, "engine": "Ray"}, "engine must be one of 'ray', not 'Ray'"),
        ("reshard", ["in"], {"shards": 1, "jobs": 0}, "jobs must be"),
        ("filter", ["in"], {"every": 0, "fields": ["cls"]}, "every must be"),
    ],
)
def test_choices_that_do_not_exist(name, arguments, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        getattr(tools, name)(*arguments, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


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
