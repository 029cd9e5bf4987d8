"""Writing, reading and chains of stages work where torch is not installed."""

import json
import textwrap

import pytest
from scripts import run_code

# Runs each program, with a directory of its own, and prints what each has printed.
RUN_ALL = """
    import contextlib, io, json, os, sys

    class NoTorch:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("torch", "torchdata"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoTorch())
    printed, (programs, directory) = {}, sys.argv[1:]
    for name, code in json.loads(programs).items():
        sys.argv = ["-c", f"{directory}/{name}"]
        os.mkdir(sys.argv[1])
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, {"__name__": "__main__"})
        printed[name] = output.getvalue()
    assert "torch" not in sys.modules
    print(json.dumps(printed))
"""

PROGRAMS = {
    "shards_are_written_and_read": (  # With wds_pipes.tar, and by stages whose state goes through JSON.
        """
        import io, json
        import numpy as np
        from wds_pipes.tar import ShardWriter, TarReader, TarWriter, split_key
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import DecodeByExt, GroupByKey, LoadTar, OpenShards, ShardList, ShuffleBuffer, ToTuple

        with ShardWriter(sys.argv[1] + "/s-%d.tar", max_samples=10) as writer:
            for number in range(30):
                writer.write({"__key__": f"{number:03d}", "txt": f"text {number}", "cls": number, "npy": np.arange(3)})
        assert len(writer.shards) == 3
        with open(next(iter(writer.shards)), "rb") as file:
            assert [split_key(member.name) for member in TarReader(file)][0] == ("000", "cls")

        def make():
            samples = GroupByKey(LoadTar(OpenShards(ShardList(sys.argv[1], shuffle=True, seed=3))))
            return Stream(ToTuple(DecodeByExt(ShuffleBuffer(samples, 10)), "txt", "cls"))

        whole = list(make())
        assert sorted(number for _, number in whole) == list(range(30)), whole
        stream = make()
        iterator = iter(stream)
        first = [next(iterator) for _ in range(13)]
        state = json.loads(json.dumps(stream.state_dict()))
        stream.close()
        again = make()
        again.load_state_dict(state)
        assert first + list(again) == whole
        print("done")
        """,
        "done\n",
    ),
    "an_error_of_a_pipe_says_what_to_install": (  # An AttributeError with the mend; names that need no torch exist.
        """
        import wds_pipes
        wds_pipes.TarWriter, wds_pipes.ShardError, wds_pipes.describe_state
        try:
            wds_pipes.ShardList
        except AttributeError as error:
            print(error)
        print(hasattr(wds_pipes, "nonsense"))
        """,
        "wds_pipes.ShardList needs torch, which is not installed: pip install torch\nFalse\n",
    ),
    "the_test_kit_works": (  # make_shards and check_resume.
        """
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
        from wds_pipes.testing import check_resume, make_shards
        urls = make_shards(sys.argv[1], shards=2, samples=3)
        print(len(check_resume(lambda: Stream(GroupByKey(LoadTar(OpenShards(ShardList(urls))))))[0]))
        """,
        "6\n",
    ),
    "shards_are_made_by_the_command": (  # Also in processes, which import what they need.
        """
        import os
        from click.testing import CliRunner
        from wds_pipes.cli import main
        import wds_pipes.tools

        folder = sys.argv[1] + "/in"
        os.mkdir(folder)
        for number in range(4):
            with open(f"{folder}/{number}.txt", "w") as file:
                file.write("text")
        for jobs in "12":
            arguments = [folder, sys.argv[1] + "/out" + jobs, "--max-samples", "2", "-j", jobs]
            result = CliRunner().invoke(main, ["create", *arguments])
            assert result.exit_code == 0, result.output
        print("2 shards, 4 samples" in result.output)
        """,
        "True\n",
    ),
    "an_index_is_made_and_read": (  # By the functions and by the command.
        """
        from click.testing import CliRunner
        from wds_pipes.cli import main
        from wds_pipes.stages import ShardList
        from wds_pipes.tar import index_shards
        from wds_pipes.testing import make_shards
        urls = make_shards(sys.argv[1], shards=2, samples=[3, 4])
        index_shards(urls, sys.argv[1] + "/index.json")
        result = CliRunner().invoke(main, ["index", *urls, "-o", sys.argv[1] + "/again.json"])
        assert result.exit_code == 0, result.output
        assert list(ShardList(sys.argv[1] + "/again.json").facts) == list(ShardList(urls, index=True).facts)
        print(list(ShardList(sys.argv[1] + "/index.json").samples))
        """,
        "[3, 4]\n",
    ),
    "shards_and_states_are_looked_at": (  # By the commands; a file of torch.save says what it needs.
        """
        import json
        from click.testing import CliRunner
        from wds_pipes.cli import main
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
        from wds_pipes.testing import make_shards
        urls = make_shards(sys.argv[1], shards=2, samples=[3, 4], fields=("txt", "cls", "jpg", "npy"))
        stream = Stream(GroupByKey(LoadTar(OpenShards(ShardList(urls)))))
        next(iter(stream))
        with open(sys.argv[1] + "/state.json", "w") as file:
            json.dump({"loader": stream.state_dict()}, file)
        with open(sys.argv[1] + "/state.pt", "w") as file:
            file.write("PK")
        for arguments in (
            ["index", *urls, "--offsets"], ["info", *urls], ["ls", *urls], ["head", *urls], ["cat", *urls],
            ["cat", "--jsonl", "--slice", "1:3", *urls], ["get", "2", *urls], ["get", "00000002", *urls],
            ["verify", "--decode", *urls], ["verify", "-j", "2", *urls], ["state", "show", sys.argv[1] + "/state.json"],
        ):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, (arguments, result.output)
        told = CliRunner().invoke(main, ["state", "show", sys.argv[1] + "/state.pt"]).output
        print(told.count("needs the torch package"))
        """,
        "1\n",
    ),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What each program prints; they run one after another in one process."""
    programs = {name: "import sys\n" + textwrap.dedent(code) for name, (code, _) in PROGRAMS.items()}
    return json.loads(run_code(RUN_ALL, json.dumps(programs), tmp_path_factory.mktemp("without_torch")))


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_works(name, printed):
    assert printed[name] == PROGRAMS[name][1]


def test_info_of_a_local_shard_imports_no_networking_and_no_imaging():
    code = """
        import io, sys, tarfile, tempfile
        from wds_pipes.tools import info

        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(folder + "/a.tar", "w") as shard:
                for name, data in (("0.txt", b"text"), ("0.json", b"[1]")):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))
            assert {name: each.example for name, each in info(folder + "/a.tar").fields.items()} == {
                "txt": "text", "json": "[1]"
            }
        print(sorted({"asyncio", "ssl", "PIL", "wds_pipes.stages", "wds_pipes.core.chain"} & sys.modules.keys()))
    """
    assert run_code(code) == "[]\n"
