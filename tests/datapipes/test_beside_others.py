"""The package beside others that make methods of torch's pipes, as torchdata 0.9 and WeNet do, and
beside other loaders of shards, whichever are installed.
"""

import subprocess
import sys
from importlib.util import find_spec

import pytest

LOADERS = {
    "webdataset": "webdataset",
    "litdata": "litdata",
    "streaming": "streaming",
    "megatron": "megatron.energon",
    "torchdata.datapipes": "torchdata.datapipes.iter",
}
# They have registered a name of ours, and one that we do not have.
REGISTERED = """
from torch.utils.data import IterDataPipe, functional_datapipe

@functional_datapipe("each_again")
class Repeats(IterDataPipe):
    def __init__(self, source, times):
        self.source, self.times = source, times

    def __iter__(self):
        for item in self.source:
            yield from [item] * self.times

if "repeat" not in IterDataPipe.functions:  # torchdata 0.9 is not there
    functional_datapipe("repeat")(Repeats)
"""
ASSERTED = """
from torch.utils.data.datapipes.iter import IterableWrapper

theirs, ours = IterableWrapper([1, 2]), wds_pipes.ShardList(["a.tar"])
assert not isinstance(theirs.repeat(2), wds_pipes.WdsPipe)
assert list(theirs.repeat(2)) == [1, 1, 2, 2]
assert isinstance(ours.repeat(2), wds_pipes.WdsPipe)
assert type(ours.each_again(2)) is Repeats
assert isinstance(theirs.open_shards(), wds_pipes.WdsPipe)  # nobody else has this name
assert isinstance(theirs.map(str).open_shards(), wds_pipes.WdsPipe)
assert "open_shards" in dir(theirs)
"""


def is_there(module):
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("first", ["others", "ours, used later", "ours"])
def test_a_name_of_another_package_stays_on_its_own_pipes(first):
    """In any order of the imports, which never fail."""
    loaders = "".join(f"import {name}\n" for module, name in LOADERS.items() if is_there(module))
    ours = {"ours": "import wds_pipes, wds_pipes.datapipes\n"}.get(first, "import wds_pipes\n")
    imports = loaders + REGISTERED + ours if first == "others" else ours + loaders + REGISTERED
    subprocess.run([sys.executable, "-W", "ignore", "-c", imports + ASSERTED], check=True)
