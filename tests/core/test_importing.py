"""The package imports quickly, and torch's pipes have the steps whatever the order of imports."""

import pytest
from scripts import run_code

HEAVY = {"torch", "torchdata", "numpy", "fsspec", "s3fs", "PIL", "matplotlib", "webdataset", "asyncio"}


def test_importing_is_lazy():
    """Nothing slow is imported by the package, wds_pipes.tar, the help of the command line, or TAB
    completion.
    """
    code = f"""
        import os, sys
        import wds_pipes, wds_pipes.tar
        print(sorted(({HEAVY!r} | {{"click"}}) & set(sys.modules)))
        from click.testing import CliRunner
        from wds_pipes.cli import main
        for arguments in (["--help"], ["--version"], *([name, "-h"] for name in main.commands)):
            done = CliRunner().invoke(main, arguments, prog_name="wds-pipes")
            assert done.exit_code == 0, done.output
        os.environ |= {{"_WDS_PIPES_COMPLETE": "bash_complete", "COMP_WORDS": "wds-pipes demo --", "COMP_CWORD": "2"}}
        try:
            main(prog_name="wds-pipes")
        except SystemExit as end:
            assert end.code == 0
        print(sorted({HEAVY!r} & set(sys.modules)))
    """
    first, *completed, last = run_code(code).splitlines()
    assert (first, last) == ("[]", "[]")
    assert "plain,--batch-size" in completed


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import wds_pipes; from torch.utils.data.datapipes.iter import IterableWrapper",
        "from torch.utils.data.datapipes.iter import IterableWrapper; import wds_pipes",
    ],
)
def test_torch_pipes_have_the_steps_in_any_order_of_imports(imports, urls):
    code = f"""
        import sys
        {imports}
        members = IterableWrapper(sys.argv[1:]).open_shards().load_tar()
        import inspect, torch
        assert torch.__loader__ is torch.__spec__.loader and inspect.getsource(torch)
        assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("wds_pipes")]
        print(len(list(members.group_by_key())), members.load_tar.__doc__[:30])
    """
    assert run_code(code, *urls) == "14 Read the regular files in the \n"


def test_after_import_waits_for_an_import_that_succeeds(tmp_path):
    """An import that fails can be tried again, and our finder works beside any others."""
    (tmp_path / "host.py").write_text("import os\nif 'HOST' not in os.environ:\n    raise OSError('not yet')\n")
    (tmp_path / "then.py").write_text("import host\nprint('then', vars(host).keys() >= {'os'})\n")
    code = """
        import os, sys
        from wds_pipes.core.importing import after_import
        sys.path.insert(0, sys.argv[1])
        sys.meta_path.insert(0, type("Old", (), {"find_module": lambda self, name, path=None: None})())
        finders = len(sys.meta_path)
        after_import("host", "then")
        after_import("host", "then")
        try:
            import host
        except OSError as error:
            print(error)
        os.environ["HOST"] = "1"
        import host
        print(len(sys.meta_path) == finders)
    """
    assert run_code(code, tmp_path) == "not yet\nthen True\nTrue\n"


@pytest.mark.slow
def test_find_spec_does_not_import():
    """The module stays unimported, and its loader still has the methods of a loader."""
    code = """
        import sys
        import wds_pipes
        from importlib.util import find_spec
        spec = find_spec("torch")
        print("torch" in sys.modules, spec.loader.is_package("torch"), "import" in spec.loader.get_source("torch"))
        import torch
        print("wds_pipes.datapipes" in sys.modules)
    """
    assert run_code(code) == "False True True\nTrue\n"


def test_modules_without_torch_can_be_imported_first():
    """None of them needs another one to be imported before it."""
    code = """
        import importlib, pkgutil, sys
        import numpy, wds_pipes.io, wds_pipes.tar
        inner = [found.name for package in (wds_pipes.io, wds_pipes.tar) for found in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
        for name in ("wds_pipes.core.stage", "wds_pipes.stages", *inner):
            for old in [old for old in sys.modules if old.split(".")[0] == "wds_pipes"]:
                del sys.modules[old]
            importlib.import_module(name)
        print("torch" not in sys.modules and len(inner) > 10)
    """  # noqa: E501
    assert run_code(code) == "True\n"
