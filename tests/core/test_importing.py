"""The package imports quickly, and torch's pipes have the steps."""

import pytest
from scripts import run_code

HEAVY = {"torch", "torchdata", "numpy", "fsspec", "s3fs", "PIL", "matplotlib", "webdataset", "asyncio"}


def test_importing_is_lazy():
    """Nothing slow is imported by the package, wds_pipes.tar, the list of commands, commands that
    need none of it, or TAB completion; and torch by the help of none.
    """
    code = f"""
        import os, sys
        import wds_pipes, wds_pipes.tar
        print(sorted(({HEAVY!r} | {{"click"}}) & set(sys.modules)))
        from click.testing import CliRunner
        from wds_pipes.cli import main
        for arguments in (["--help"], ["--version"], *([name, "-h"] for name in ("cache", "demo", "doctor", "index"))):
            done = CliRunner().invoke(main, arguments, prog_name="wds-pipes")
            assert done.exit_code == 0, done.output
        os.environ |= {{"_WDS_PIPES_COMPLETE": "bash_complete", "COMP_WORDS": "wds-pipes demo --", "COMP_CWORD": "2"}}
        try:
            main(prog_name="wds-pipes")
        except SystemExit as end:
            assert end.code == 0
        print(sorted({HEAVY!r} & set(sys.modules)))
        for name in main.list_commands(None):
            assert CliRunner().invoke(main, [name, "-h"]).exit_code == 0
        print("torch" in sys.modules)
    """
    first, *completed, light, torch = run_code(code).splitlines()
    assert (first, light, torch) == ("[]", "[]", "False")
    assert "plain,--batch-size" in completed


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        "import wds_pipes, torch, wds_pipes.datapipes; from torch.utils.data.datapipes.iter import IterableWrapper",
        "from torch.utils.data.datapipes.iter import IterableWrapper; import wds_pipes",
    ],
)
def test_torch_pipes_have_the_steps(imports, urls):
    """With wds_pipes.datapipes, or with wds_pipes alone after torch."""
    code = f"""
        import sys
        {imports}
        members = IterableWrapper(sys.argv[1:]).open_shards().load_tar()
        print(len(list(members.group_by_key())), members.load_tar.__doc__[:30])
    """
    assert run_code(code, *urls) == "14 Read the regular files in the \n"
