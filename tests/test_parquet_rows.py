"""The rows of Parquet files: those of pyarrow, and no more memory than they may take."""

import contextlib
import datetime
import decimal
import io
import itertools
import multiprocessing
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wds_pipes.codecs.pages import Column, columns_of, pages_of
from wds_pipes.codecs.parquet import rows

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


def unpacked(data):
    """How many bytes the pages of each row group unpack to."""
    return [
        sum(column.unpacked for column in group) for group in pages_of(data, columns_of(data, facts(data).num_columns))
    ]


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
        "nothing": pa.array(some([None, None]), pa.list_(pa.null())),
    }


@pytest.mark.slow
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
        found = unpacked(data)
        assert all(0 < found <= group for found, group in zip(found, said, strict=True)), "without their headers"


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY", "PLAIN"])
def test_strings_without_a_dictionary(encoding):
    table = pa.table({"a": [["x", "yz"], []] * 100, "m": pa.array([[("k", "v")]] * 200, pa.map_("string", "string"))})
    encodings = dict.fromkeys(["a.list.element", "m.key_value.key", "m.key_value.value"], encoding)
    data = written(table, use_dictionary=False, column_encoding=encodings)
    assert list(rows(data, MIB)) == table.to_pylist()


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
    "no string": pa.nulls(3_000_000, pa.string()),
    "empty string": pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 3_000_000), pa.array([""])),
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
    assert sum(unpacked(data)) < MIB
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match=f"it unpacks to more than {10 * MIB} bytes"):
        next(rows(data, 10 * MIB))
    assert pa.total_allocated_bytes() < before + MIB


def test_repeated_values_that_pyarrow_does_not_count():
    """Of a column that has the path of another one, or of another type."""
    values = repeated("x" * 100_000)
    lists = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
    other = pa.StructArray.from_arrays([pa.array([["q"]])], ["b"])
    data = written(pa.table([lists, other], ["a.b", "a"]), compression="zstd", store_schema=False)
    with pytest.raises(ValueError, match=r"column 'a\.b\.list\.element' may repeat a large value"):
        next(rows(data, 10 * MIB))
    data = written(pa.table({"a": lists}), compression="zstd", store_schema=False)
    assert len(next(rows(data, 20 * MIB))["a"]) == 150
    if hasattr(pa, "json_"):  # from pyarrow 19 on
        texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1" * 100_000] * 150))
        table = pa.table({"a": pa.ListArray.from_arrays(pa.array([0, 150], pa.int32()), texts)})
        data = written(table, compression="zstd", store_schema=False)
        with pytest.raises(ValueError, match=r"column 'a\.list\.element' may repeat a large value"):
            next(rows(data, 10 * MIB))


def test_a_footer_with_too_few_values_of_a_list(monkeypatch):
    """Those of its pages count, which pyarrow reads."""
    count = 1_000_000
    table = pa.table({"a": pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.repeat(7, count))})
    data = written(table, compression="zstd", store_schema=False, write_statistics=False, data_page_size=MIB)
    place = len(data) - facts(data).serialized_size - 8
    lying = data[:place] + data[place:].replace(varint(count, 3), varint(10, 3))
    assert facts(lying).row_group(0).column(0).num_values == 10
    monkeypatch.delattr(parquet.ParquetFile, "iter_batches")
    for content in (data, lying):
        with pytest.raises(ValueError, match=f"it unpacks to more than {MIB} bytes"):
            next(rows(content, MIB))


def field(delta, kind, value):
    return bytes([delta << 4 | kind]) + value


def header(*, kind=0, unpacked=8, packed=0, values=8, of_values=5, more=b""):
    """The header of a page."""
    return b"".join((
        field(1, 5, varint(kind, 1)),
        field(1, 5, varint(unpacked, 5)),
        more or field(1, 5, varint(packed, 5)),
        field(of_values - 3, 12, field(1, 5, varint(values, 5)) + b"\0"),
        b"\0",
    ))  # fmt: skip


def footer(values, start=0, groups=1):
    """What the footer says of a file with one column."""
    return [[Column(start, values, 0)]] * groups


def test_headers_of_pages():
    """All pages up to the last value, also those without values."""
    two = header(values=5, packed=3) + b"abc" + header(kind=1, unpacked=100) + header(values=3, kind=3, of_values=8)
    assert [found[:2] for [found] in pages_of(two + header(unpacked=1000), footer(8))] == [(116, 8)]
    assert [found[:2] for [found] in pages_of(b"", footer(0))] == [(0, 0)]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        header()[:-1],
        header(packed=-1),
        header(unpacked=-5),
        header(values=-1),
        header(values=(1 << 32) + 8),  # which another reader may cut to 8
        header(more=field(15, 5, b"\0") + field(0, 5, b"\x04" + varint(64, 5))),  # field 2 twice
        header(more=field(0, 6, b"\x06" + varint(0, 5))),  # 64 bits
        header(of_values=8),  # of a page of another type
        header(kind=3),
        header(packed=100),
        field(1, 12, b"") * 100,
        field(1, 9, b"\xfc" + varint(1 << 40, 6)),
        field(1, 11, b"\0"),
        b"\x15" + b"\xff" * 20,
    ],
)
def test_damaged_headers(data):
    with pytest.raises(ValueError, match=r"the header of its page at byte \d+ is damaged"):
        pages_of(data, footer(9))


def test_pages_of_several_columns():
    """They would take any time to read."""
    data = header(values=0, unpacked=0) * 50 + header()
    assert len(pages_of(data, footer(8))) == 1
    with pytest.raises(ValueError, match="its columns have the same pages"):
        pages_of(data, footer(8, groups=3))


def test_a_dictionary_is_counted_as_often_as_its_values_come():
    """Not once in each of many batches."""
    table = pa.table({"a": [["x" * 10_000] if not number else [] for number in range(10_000)]})
    assert len(list(rows(written(table, compression="zstd"), 400_000))) == 10_000
    table = pa.table({"a": pa.array(["x" * 10_000, *["y"] * 9999]).dictionary_encode()})
    assert len(list(rows(written(table, compression="zstd"), 400_000))) == 10_000


def read_damaged(seed):
    """Read files of which some bytes are others."""
    rng, whole = random.Random(seed), written(pa.table(columns(20)), compression="zstd", row_group_size=9)
    for _ in range(400):
        content = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            content[-rng.randrange(1, len(content) // rng.choice((1, 3)))] = rng.randrange(256)
        with contextlib.suppress(ValueError, OSError, LookupError, NotImplementedError, pa.ArrowException):
            list(rows(bytes(content), 10 * MIB))


def test_a_damaged_file_does_not_end_the_process():
    """As pyarrow does where the metadata of a column are read that are damaged; and before version
    17 also where the pages are, as with this seed.
    """
    child = multiprocessing.get_context("spawn").Process(target=read_damaged, args=(30,))
    child.start()
    child.join()
    assert child.exitcode == 0


@given(st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes(data):
    """They are pages, or damaged: no other error comes."""
    pages = header(values=3, packed=2) + b"ab" + header(values=5, kind=3, of_values=8)
    content = bytearray(data.draw(st.binary(max_size=60)) if data.draw(st.booleans()) else pages)
    for _ in range(data.draw(st.integers(0, 3)) if content else 0):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        [found] = pages_of(bytes(content), footer(8, start=data.draw(st.integers(-5, 60))))[0]
        assert found.values >= 8
