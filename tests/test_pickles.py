"""pt fields: what ``torch.save`` writes of tensors and plain objects is read, and no call in a file
takes more memory than the file explains.
"""

import _codecs
import io
import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_pipes.codecs.arrays import decode_torch
from wds_pipes.codecs.names import NotAllowedError

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # torch itself uses it


def saved(value, zipped=True):
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def loaded(data):
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class Calls:
    """Is pickled as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def trained():
    """The states of a model and its optimizer after a step."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def with_attribute(tensor):
    tensor.note = "x"
    return tensor


def rare():
    """Tensors that torch means to change or to remove."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        zeros = torch.zeros(3, dtype=torch.long)
        return {
            "quantized": torch.quantize_per_tensor(torch.randn(3, 3), 0.1, 0, torch.quint8),
            "quantized by channels": torch.quantize_per_channel(
                torch.randn(3, 3), torch.ones(3), zeros, 0, torch.qint8
            ),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
        }


VALUES = rare() | {
    "states": trained(),
    "parameter": with_attribute(torch.nn.Parameter(torch.ones(2))),
    "attribute": with_attribute(torch.ones(2)),
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "negated": torch.randn(2, dtype=torch.complex64).conj().imag,
    "expanded": torch.ones(1).expand(1000, 3),
    "views": [torch.arange(10)[5:], torch.arange(10).view(2, 5).t(), torch.empty(0, 3), torch.tensor(3)],
    "types": [torch.float32, torch.strided, torch.device("cpu"), torch.Size([1, 2])],
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "bytes": [b"abc\xff", bytearray(b"abc\xff"), bytearray(), "üñ"],
    "numbers": [True, None, 1.5, 10**30, -(10**30), -5, 70_000, 1 + 2j, (1, 2, 3, 4, 5), {1, 2}],
    "dicts": [Counter("aab"), OrderedDict(a=(1,), b=[2]), {(1, 2): {"a": {}}}],
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", VALUES)
def test_what_torch_loads_is_decoded(name, zipped):
    data = saved(VALUES[name], zipped)
    assert str(decode_torch(data)) == str(loaded(data))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(min_size=1),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(plain, st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_plain_objects_come_back(value, zipped):
    data = saved(value, zipped)
    assert repr(decode_torch(data)) == repr(loaded(data)) == repr(value)


def hex_again_and_again():
    text = Calls(_codecs.encode, "a" * 100, "latin1")
    for _ in range(40):
        text = Calls(_codecs.encode, text, "hex")
    return text


N = 10**12
ONE = torch.zeros(1).untyped_storage()
BOMBS = {
    "bytearray": Calls(bytearray, N),
    "bytearray of a tensor, which is a number": Calls(bytearray, torch.tensor(N)),
    "a tensor": Calls(torch.Tensor, N),
    "a typed tensor": Calls(torch.FloatTensor, N),
    "a storage": Calls(torch.UntypedStorage, N),
    "a tensor beyond its storage": Calls(torch._utils._rebuild_tensor_v2, ONE, 0, (N,), (1,), False, OrderedDict()),
    "a tensor that repeats": Calls(torch._utils._rebuild_tensor_v2, ONE, 0, (N,), (0,), False, OrderedDict()),
    "a set of a tensor": Calls(set, torch.ones(1).expand(1000)),
    "text that doubles": hex_again_and_again(),
    "a call in a call": Calls(torch._tensor._rebuild_from_type_v2, bytearray, bytearray, (N,), {}),
}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", BOMBS)
def test_a_call_that_could_take_any_memory_is_not_made(name, zipped):
    with pytest.raises(ValueError, match="what torch.save does not write, which could take any memory"):
        decode_torch(saved({"a": BOMBS[name]}, zipped))


def test_bytearray_is_not_reached_by_another_name():
    """torch translates the names of Python 2."""
    data = saved(Calls(bytearray, N))
    assert b"c__builtin__\nbytearray\n" in data
    for other in (b"c__builtin__\nbytearray\n", b"cbuiltins\nbytearray\n"):
        with pytest.raises(ValueError, match="calls builtins.bytearray"):
            decode_torch(with_pickle(b"\x80\x02" + other + b"\x8a\x06" + N.to_bytes(6, "little") + b"\x85R."))


def with_pickle(content):
    """A zip of ``torch.save`` with another pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(saved(1))) as plain, zipfile.ZipFile(file, "w") as changed:
        for name in plain.namelist():
            changed.writestr(name, content if name.endswith("/data.pkl") else plain.read(name))
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"\x80\x02R.", b"\x80\x02h\x05.", b"\x80\x02X\xff\0\0\0a."])
def test_a_damaged_pickle_is_an_error_that_may_be_skipped(content):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - pickletools and torch have their own
        decode_torch(with_pickle(content))
    assert not isinstance(caught.value, NotAllowedError)


def test_what_torch_does_not_write_is_refused():
    with pytest.raises(NotAllowedError):
        decode_torch(with_pickle(pickle.dumps({"a": 1}, protocol=4)))


@given(st.sampled_from(list(VALUES)), st.integers(0, 10_000), st.integers(0, 255))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_changed_byte_is_an_error_or_what_torch_loads(name, place, byte):
    with zipfile.ZipFile(io.BytesIO(saved(VALUES[name]))) as archive:
        content = bytearray(archive.read(next(each for each in archive.namelist() if each.endswith("/data.pkl"))))
    content[place % len(content)] = byte
    data = with_pickle(bytes(content))
    try:
        value = decode_torch(data)
    except Exception:
        return
    assert str(value) == str(loaded(data))
