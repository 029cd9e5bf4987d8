"""Errors: their parts, the sentence that is made of them, and pickling."""

import pickle

import pytest

from wds_pipes import errors
from wds_pipes.errors import ShardWarning, WdsError, for_commands, mended, parts, sentence

CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, WdsError) and kind != WdsError
]
FACTS = {
    errors.ShardError: {"url": "a.tar", "offset": 512},
    errors.SampleError: {"url": "a.tar", "key": "k", "offset": 512},
    errors.DecodeError: {"url": "a.tar", "key": "k", "field": "jpg", "offset": 512},
    errors.CacheError: {"path": "/cache"},
}
TOLD = {"what": "is cut", "where": "shard a.tar", "mend": "pass x=True.", "mend_cli": "pass --x."}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_an_error_has_parts_and_makes_one_sentence_of_them(kind):
    """Also after it was pickled, with its facts and notes."""
    facts = next((facts for base, facts in reversed(FACTS.items()) if issubclass(kind, base)), {})
    error = kind(**TOLD, **facts)
    error.add_note("raised there")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    for each in (error, again):
        assert str(each) == "shard a.tar is cut: pass x=True."
        assert for_commands(each) == "shard a.tar is cut: pass --x."
        assert {name: getattr(each, name) for name in (*TOLD, *facts)} == {**TOLD, **facts}
        assert each.__notes__ == ["raised there"]


def test_what_was_set_later_is_pickled_too():
    """Such as that a shard does not exist, which decides how a command ends."""
    error = errors.ShardError("gone")
    error.missing, error.of_data = True, False
    again = pickle.loads(pickle.dumps(error))
    assert (again.missing, again.of_data) == (True, False)


def test_who_expects_classes_of_python_catches_ours():
    assert issubclass(errors.ShardError, OSError)
    assert issubclass(errors.DecodeError, ValueError)
    assert str(errors.ShardError("gone")) == for_commands(errors.ShardError("gone")) == "gone"


@pytest.mark.parametrize("kind", [ValueError, FileExistsError, ImportError, UserWarning, ShardWarning])
def test_an_error_of_python_or_a_warning_is_mended(kind):
    error = mended(kind, "it is there", mend="Pass x=True", mend_cli="Pass --x")
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (str(each), for_commands(each)) == ("it is there. Pass x=True", "it is there. Pass --x")


@pytest.mark.parametrize(
    ("mend", "made"), [("", "it is cut."), ("write it again", "it is cut: write it again"), ("Go.", "it is cut. Go.")]
)
def test_the_remedy_is_a_part_of_the_sentence_or_a_sentence(mend, made):
    assert sentence("it is cut.", mend) == made


def test_an_error_of_an_error_has_the_remedies_of_both():
    inner = mended(ValueError, "it is large", mend="pass most=9", mend_cli="")
    assert parts(inner) == ("it is large", {"mend": "pass most=9", "mend_cli": ""})
    both = {"mend": "pass most=9. Correct it.", "mend_cli": "Correct it."}
    assert parts(inner, "Correct it.") == ("it is large", both)
    assert parts(ValueError("no"), "Go.", "Stay.") == ("no", {"mend": "Go.", "mend_cli": "Stay."})
    same = errors.StateError("odd", mend="use another")
    assert parts(same) == ("odd", {"mend": "use another", "mend_cli": "use another"})
