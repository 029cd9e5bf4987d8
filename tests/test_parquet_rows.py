"""The rows of Parquet files: those of pyarrow, and no more memory than they may take."""

import datetime
import decimal
import io
import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_pipes.codecs.parquet import rows, unpacked_bytes

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

MIB = 1 << 20
NO_LIMIT = 1 << 40


def written(table, **options):
    file = io.BytesIO()
    parquet.write_table(table, file, **options)
    return file.getvalue()


def facts(data):
    return parquet.ParquetFile(io.BytesIO(data)).metadata


def columns(count):
    """Columns of many types, some with lists of strings."""
    rng = random.Random(1)

    def text():
        return rng.choice([None, "", "ü", "x" * rng.randrange(30)])

    def some(*choices):
        return [rng.choice(choices) for _ in range(count)]

    strings, when, price = pa.list_(pa.string()), datetime.datetime(2020, 1, 1), decimal.Decimal("1.50")
    inner = pa.struct([("q", strings), ("z", pa.list_(pa.struct([("t", pa.large_string())]))), ("p", pa.string())])
    return {
        "numbers": pa.array(some(None, 3, -4), pa.int16()),
        "strings": pa.array([rng.choice([None, [], [text(), text()]]) for _ in range(count)], strings),
        "bytes": pa.array(some([], [b"a", b"a"]), pa.large_list(pa.binary())),
        "fixed": pa.array(some([], [b"abcd", None]), pa.list_(pa.binary(4))),
        "decimals": pa.array(some([], [price]), pa.list_(pa.decimal128(20, 2))),
        "times": pa.array(some([], [when]), pa.list_(pa.timestamp("us"))),
        "map": pa.array(some(None, [], [("k", ["v", None])]), pa.map_(pa.string(), strings)),
        "struct": pa.array([rng.choice([None, {"q": ["x"], "z": [{"t": text()}]}]) for _ in range(count)], inner),
        "nested": pa.array([[[text()], []] for _ in range(count)], pa.list_(strings)),
        "pairs": pa.array(some(["a", "b"]), pa.list_(pa.string(), 2)),
        "categories": pa.array([text() for _ in range(count)]).dictionary_encode(),
        "categories of numbers": pa.array(some(5, 6)).dictionary_encode(),
        "list.of": pa.ListArray.from_arrays(
            pa.array(range(count + 1), pa.int32()), pa.array([text() for _ in range(count)]).dictionary_encode()
        ),
        "nothing": pa.array(some([None]), pa.list_(pa.null())),
    }


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_the_rows_are_those_of_pyarrow(version, compression, use_dictionary):
    """In small and large groups, with pages of any size, and a dictionary that is given up."""
    table = pa.table(columns(200))
    for size, (pages, most) in itertools.product((7, 1000), ((100, 20), (MIB, MIB))):
        data = written(
            table,
            compression=compression,
            use_dictionary=use_dictionary,
            data_page_version=version,
            row_group_size=size,
            data_page_size=pages,
            write_batch_size=50,
            dictionary_pagesize_limit=most,
            store_schema=size == 7,
        )
        assert list(rows(data, NO_LIMIT)) == parquet.read_table(io.BytesIO(data)).to_pylist()
        said = [facts(data).row_group(number).total_byte_size for number in range(facts(data).num_row_groups)]
        found = unpacked_bytes(data, facts(data))
        assert all(0 < found <= group for found, group in zip(found, said, strict=True)), "without their headers"


def test_a_file_without_rows():
    assert list(rows(written(pa.table({"a": pa.array([], pa.list_(pa.string()))})), 0)) == []


def varint(number, size):
    """A signed number of Thrift, in so many bytes."""
    number, found = number << 1, bytearray()
    for place in range(size):
        found.append(number >> 7 * place & 127 | (128 if place < size - 1 else 0))
    return bytes(found)


def test_a_footer_that_says_too_little(monkeypatch):
    """What pages unpack to is known before one is unpacked."""
    data = written(pa.table({"a": ["x" * (20 * MIB)]}), compression="zstd", use_dictionary=False)
    said = facts(data).row_group(0).total_byte_size
    lying = data.replace(varint(said, 4), varint(1000, 4))
    assert (len(lying), facts(lying).row_group(0).total_byte_size) == (len(data), 1000)
    assert len(data) < 10_000
    assert [len(row["a"]) for row in rows(lying, 30 * MIB)] == [20 * MIB]
    monkeypatch.delattr(parquet.ParquetFile, "iter_batches")
    with pytest.raises(ValueError, match=f"it unpacks to more than {10 * MIB} bytes"):
        next(rows(lying, 10 * MIB))


def repeated(value):
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 150), pa.array([value]))


LONG = {
    "string": repeated("x" * 100_000),
    "bytes": repeated(b"x" * 100_000),
    "fixed": repeated(pa.scalar(b"x" * 100_000, pa.binary(100_000))),
    "null": pa.nulls(1_500_000, pa.int64()),
}


@pytest.mark.parametrize("within", ["list", "struct", "map"])
@pytest.mark.parametrize("kind", LONG)
def test_one_row_that_repeats_a_value(kind, within):
    """A list of a value in a dictionary, which is in the file once; or of no value at all."""
    values, offsets = LONG[kind], pa.array([0, len(LONG[kind])], pa.int32())
    if within == "map":
        column = pa.MapArray.from_arrays(offsets, pa.repeat(7, len(values)), values)
    else:
        column = pa.ListArray.from_arrays(offsets, values)
    column = pa.StructArray.from_arrays([column], ["q"]) if within == "struct" else column
    data = written(pa.table({"a": column}), compression="zstd", store_schema=False)
    assert sum(unpacked_bytes(data, facts(data))) < MIB
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=f"it unpacks to more than {10 * MIB} bytes"):
        next(rows(data, 10 * MIB))
    assert pa.total_allocated_bytes() < before + MIB


def test_a_dictionary_is_counted_as_often_as_its_values_come():
    """Not once in each of many batches."""
    table = pa.table({"a": [["x" * 10_000] if not number else [] for number in range(10_000)]})
    assert len(list(rows(written(table, compression="zstd"), 400_000))) == 10_000
    table = pa.table({"a": pa.array(["x" * 10_000, *["y"] * 9999]).dictionary_encode()})
    assert len(list(rows(written(table, compression="zstd"), 400_000))) == 10_000


GIVEN = [written(pa.table(columns(20)), compression="zstd", store_schema=False, row_group_size=9)]


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_changed_bytes(data):
    """They are an error, or the rows that pyarrow finds, and as many as the file has."""
    content = bytearray(GIVEN[0])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = list(rows(bytes(content), 10 * MIB))
    except (ValueError, OSError, pa.ArrowException, UnicodeError):
        return
    assert found == parquet.ParquetFile(io.BytesIO(content), pre_buffer=False).read(use_threads=False).to_pylist()
