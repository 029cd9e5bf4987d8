"""The numbers of the samples of a view: a range, or an array of 8 bytes a sample.

Numbers with equal steps are always a range, so every n-th of 10**9 samples takes no memory.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = range | npt.NDArray[np.int64]

KINDS = "keys, '@keys.txt', a slice, a range, numbers of samples, or a part of split_by_key()"


def numbers_at(view: Numbers, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples at places of a view: int64, in the shape of ``places``."""
    return places * view.step + view.start if isinstance(view, range) else view[places]


def described(view: Numbers, count: int) -> str | None:
    """Return a text that differs for different views of ``count`` samples; None: the view has all
    of them, in order.
    """
    if isinstance(view, range):
        if view == range(count):
            return None
        content = f"{view.start} {view.step} {len(view)}".encode()
    else:
        content = view.astype("<i8", copy=False).tobytes()
    digest = blake2b(f"{count} ".encode() + content, digest_size=8)
    return f"{len(view)} of {count} samples, fingerprint {digest.hexdigest()}"


def by_numbers(wanted: Any, view: Numbers) -> Numbers:
    """Return the samples at places of a view: those of a slice, a range, integers (negative ones
    count from the end), or an array of bools, which says of each sample whether it is selected.

    Raises:
        IndexError: there is no sample at one of these places.
        TypeError: they are not integers, or an array of bools has another length.
    """
    import numpy as np

    count = len(view)
    if isinstance(wanted, slice):
        return compact(view[wanted])
    if isinstance(wanted, range):
        low, high = sorted((wanted[0], wanted[-1])) if wanted else (0, -1)
        if low < -count or high >= count:
            raise _no_sample(high if high >= count else low, count)
        if low >= 0:
            return compact(
                view[wanted.start : wanted.stop if wanted.stop >= 0 else None : wanted.step] if wanted else range(0)
            )
    given = as_array(wanted) if isinstance(wanted, range) else np.asarray(wanted)
    if given.dtype == bool and given.shape == (count,):
        given = np.flatnonzero(given)
    if given.dtype == bool and given.ndim == 1:
        raise TypeError(f"samples are selected by one bool for each of {count}, and this array has {given.size}")
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"samples are selected by {KINDS}, not by {wanted!r:.80}")
    wrong = given[(given < -count) | (given >= count)]
    if wrong.size:
        raise _no_sample(int(wrong[0]), count)
    given = given.astype(np.int64)  # before the sum, for which 8 bits may be too few
    return compact(numbers_at(view, np.where(given < 0, given + count, given)))


def _no_sample(number: int, count: int) -> IndexError:
    return IndexError(f"there is no sample {number}: there are {count}")


def as_array(view: Numbers) -> npt.NDArray[np.int64]:
    """Return the numbers of a view: int64, shape (samples,)."""
    import numpy as np

    # asarray() of a range would make an object of each number
    return np.arange(view.start, view.stop, view.step) if isinstance(view, range) else view


def compact(view: Numbers) -> Numbers:
    """Return a view as a range if it is one, in one form for equal ones."""
    import numpy as np

    count = len(view)
    if count < 2:
        first = int(view[0]) if count else 0
        return range(first, first + count)
    first, step = int(view[0]), int(view[1]) - int(view[0])
    if isinstance(view, range) or (
        step and int(view[-1]) == first + (count - 1) * step and (np.diff(view) == step).all()
    ):
        return range(first, first + count * step, step)
    return view


def of_view(view: Numbers, found: npt.NDArray[np.int64]) -> Numbers:
    """Return those of some samples that are in a view, in its order. ``found`` is sorted."""
    import numpy as np

    if not isinstance(view, range):
        return compact(view[among(view, found)])
    places, rests = np.divmod(found - view.start, view.step)
    places = places[(rests == 0) & (places >= 0) & (places < len(view))]
    return compact(numbers_at(view, np.sort(places)))


def among(values: npt.NDArray[Any], some: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is among some sorted ones: shape (values,)."""
    import numpy as np

    if not some.size:
        return np.zeros(len(values), bool)
    found: npt.NDArray[np.bool_] = some[np.minimum(np.searchsorted(some, values), len(some) - 1)] == values
    return found


def repeated(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return those of sorted values that come more than once."""
    found: npt.NDArray[np.uint64] = values[1:][values[1:] == values[:-1]]
    return found
