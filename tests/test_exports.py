"""The public names: sorted, there, documented, and as lazy as promised."""

import subprocess
import sys

import wds_pipes as wp


def test_all_is_sorted_and_complete():
    assert wp.__all__ == sorted(wp.__all__)
    assert all(getattr(wp, name).__doc__ for name in wp.__all__)
    public = {name for name, value in vars(wp).items() if not name.startswith("_") and not isinstance(value, type(sys))}
    assert (public - {"TYPE_CHECKING", "Any"}) | {"ShardCache"} == set(wp.__all__)  # that one is loaded when it is asked for


def test_errors_survive_pickling():
    import pickle

    error = wp.DecodeError("no", url="a.tar", key="k", field="jpg")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.url, again.key, again.field) == (wp.DecodeError, "no", "a.tar", "k", "jpg")


def test_importing_is_lazy():
    """Neither torchdata nor fsspec nor Pillow is imported before something needs it."""
    code = "import sys, wds_pipes; print(sorted({'torchdata', 'fsspec', 's3fs', 'PIL', 'matplotlib', 'webdataset'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
