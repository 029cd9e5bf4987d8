"""A source of one's own over numbered rows: a table of a database."""

import itertools
import json
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from pipelines import keys_of

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.testing import check_resume


class Rows(wp.RowSource):
    """The rows of a table, as somebody would write it."""

    order_options = ("table",)

    def __init__(self, path, table="texts", *, seed=0):
        self.path, self.table = path, table
        with closing(sqlite3.connect(path)) as connection:
            [(count,)] = connection.execute(f"SELECT count(*) FROM {table}")
        super().__init__(count, seed=seed)

    def read(self, start, stop):
        query = f"SELECT key, txt FROM {self.table} ORDER BY key LIMIT ? OFFSET ?"
        with closing(sqlite3.connect(self.path)) as connection:
            for key, text in connection.execute(query, (stop - start, start)):
                yield {"__key__": key, "txt": text}


rows = wp.register_stage(Rows)


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "train.sqlite"
    with closing(sqlite3.connect(path)) as base, base:
        for name, count in (("texts", 23), ("others", 23), ("some", 6), ("few", 1), ("none", 0)):
            base.execute(f"CREATE TABLE {name} (key TEXT, txt TEXT)")
            base.executemany(
                f"INSERT INTO {name} VALUES (?, ?)", [(f"{number:03d}", f"text {number}") for number in range(count)]
            )
    return str(path)


@pytest.mark.parametrize("name", ["some", "few", "none"])
def test_it_resumes_exactly(name, table):
    [first, *_] = check_resume(lambda: rows(table, name))
    assert keys_of(first) == sorted(keys_of(first))
    assert len(first) == len(rows(table, name)) == {"some": 6, "few": 1, "none": 0}[name]
    check_resume(lambda: rows(table, name).shuffle_buffer(4).map_samples(dict).batch_samples(3))


def test_lanes_have_each_row_once_also_on_another_number(table):
    def loader(lanes):
        options = {"collate": "list", "epoch_end": "exact"}
        return wp.PipeLoader(rows(table).shuffle_buffer(3), batch_size=2, lanes=lanes, **options)

    def flat(batches):
        return [sample["__key__"] for batch in batches for sample in batch]

    whole = [f"{number:03d}" for number in range(23)]
    assert len(loader(2)) == 12
    for first, second in ((2, 4), (4, 2), (2, 2)):
        source, rest = loader(first), loader(second)
        came = list(itertools.islice(source, 4))
        rest.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert sorted(flat([*came, *rest])) == whole


def test_it_is_a_node_and_a_source_of_mix(table):
    assert keys_of(list(nodes.Rows(table))) == keys_of(list(rows(table)))
    check_resume(lambda: wp.mix({"a": rows(table, "some"), "b": rows(table, "few")}, exhausted="repeat"))


def test_a_state_of_other_rows_is_refused(table):
    pipe = rows(table)
    next(iter(pipe))
    for other in (rows(table, "others"), rows(table, "few")):
        with pytest.raises(wp.StateError, match=r"step 1 of its pipeline was rows\(count=23, table='texts'\), and"):
            other.load_state_dict(pipe.state_dict())
    state = pipe.state_dict()
    state["lanes"]["0"]["position"][0]["next"] = 24
    pipe.load_state_dict(state)
    with pytest.raises(wp.StateError, match="damaged"):
        next(iter(pipe))


def test_rows_that_are_gone_are_an_error(table, tmp_path):
    path = tmp_path / "gone.sqlite"
    shutil.copy(table, path)
    pipe = rows(str(path))
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("DELETE FROM texts WHERE key = '022'")
    with pytest.raises(wp.SampleError, match=r"read\(22, 23\) of rows yielded fewer than 1 row"):
        list(pipe)


@pytest.mark.parametrize(
    ("wrong", "error", "said"),
    [
        (
            lambda start, stop: range(30),
            wp.SampleError,
            r"read\(0, 1\) of wrong yielded more than 1 row: .* rows 0 to 0",
        ),
        (lambda start, stop: range(start, 30), wp.SampleError, r"read\(0, 1\) of wrong yielded more than 1 row"),
        (lambda start, stop: range(start, stop - 1), wp.SampleError, r"read\(0, 1\) of wrong yielded fewer than 1 row"),
        (lambda start, stop: None, TypeError, r"read\(\) of wrong returned None: it must yield the rows"),
    ],
)
def test_a_read_that_ignores_what_it_is_asked_for_is_an_error(wrong, error, said):
    """One that always begins at row 0 would yield that row again and again, and resume exactly."""

    class Wrong(wp.RowSource):
        def read(self, start, stop):
            return wrong(start, stop)

    with pytest.raises(error, match=said):
        list(wp.register_stage(Wrong)(30))


class Counted(wp.RowSource):
    """A source that declares no order_options."""

    def read(self, start, stop):
        return iter(range(start, stop))


def test_its_count_need_not_be_declared():
    """Each state has it."""
    check_resume(lambda: wp.register_stage(Counted)(5))


def test_a_class_without_read_is_named():
    class Empty(wp.RowSource):
        pass

    with pytest.raises(TypeError, match=r"Empty defines no read\(self, start, stop\)"):
        wp.register_stage(Empty)(3)


def test_a_dataset_with_numbers_is_a_source(tmp_path):
    """Such as one of torch's, or an array."""

    class Numbers(wp.RowSource):
        def __init__(self, values):
            self.values = values
            super().__init__(len(values))

        def read(self, start, stop):
            return iter(self.values[start:stop])

    make = wp.register_stage(Numbers)
    values = torch.arange(9000)  # more than one row in a block
    assert [int(value) for value in make(values)] == list(range(9000))
    loader = wp.PipeLoader(make(values), batch_size=1000, lanes=3)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(9000))


def test_one_row_in_place_of_a_list_is_refused(table):
    """Its keys would be the rows."""

    class OneRow(wp.RowSource):
        order_options = ()

        def read(self, start, stop):
            return {"__key__": str(start)}

    with pytest.raises(TypeError, match=r"read\(\) of one_row returned .* \[row\]"):
        next(iter(wp.register_stage(OneRow)(2)))
