"""Many texts in little memory, which worker processes share."""

from __future__ import annotations

import mmap
import os
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from operator import lt
from posixpath import commonprefix
from typing import TYPE_CHECKING, Any, overload

from wds_pipes.io.urls import redact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_BLOCK = 1 << 12  # texts that are packed, unpacked or changed at a time
_AT_A_TIME = 1 << 20  # bytes that are searched at a time
_MOST_COPIED = 1 << 16  # more bytes are shared with a worker than copied to it
# Characters that mean nothing in a URL, and the slash.
_PLAIN = b"\0/-._ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_PORT = re.compile(r"^([^/:]+):[0-9]+(?=/)")  # of a host


class SharedBytes:
    """Bytes that workers share with the process that starts them. With spawn or forkserver, a
    worker maps them instead of getting a copy, where the system can do that.

    Attributes:
        data: the bytes. They may grow until a worker is started.
    """

    def __init__(self, data: bytes = b"") -> None:
        self.data: Any = bytearray(data)  # in a worker: a mmap
        self._file: int | None = None  # what workers map

    def __reduce__(self) -> tuple[Any, ...]:
        # imports sockets, a fifth of the time that ``wds_pipes.tar`` takes
        from multiprocessing.context import get_spawning_popen
        from multiprocessing.reduction import DupFd

        if len(self.data) <= _MOST_COPIED or get_spawning_popen() is None or not hasattr(os, "memfd_create"):
            return type(self), (bytes(self.data),)
        if self._file is None:
            self._file = os.memfd_create("wds_pipes")
            with open(self._file, "wb", closefd=False) as file:
                file.write(self.data)
        return _mapped, (type(self), DupFd(self._file))

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def _mapped(kind: type[SharedBytes], file: Any) -> SharedBytes:
    shared, descriptor = kind(), file.detach()
    shared.data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    os.close(descriptor)
    return shared


class PackedInts(SharedBytes, Sequence[int]):
    """Integers in 8 bytes each."""

    def add(self, numbers: Iterable[int]) -> None:
        """Add numbers at the end."""
        self.data += array("q", numbers).tobytes()

    def __len__(self) -> int:
        return len(self.data) // 8

    def __getitem__(self, number: Any) -> Any:
        return memoryview(self.data).cast("q")[number]

    def __iter__(self) -> Iterator[int]:
        return iter(memoryview(self.data).cast("q"))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.int64]:
        import numpy as np  # which writing tars does not need

        there: npt.NDArray[np.int64] = np.asarray(memoryview(self.data).cast("q"), dtype)
        return there.copy() if copy else there


class Packed(Sequence[str]):
    """Texts in one buffer, without the directory that they have in common, up to its slash. So
    10**6 URLs of shards take the bytes of their names, and five more for each.

    Args:
        texts: the first texts; ``add`` adds others, before one is requested.

    Attributes:
        folder: this directory, or the beginning of the URLs up to it; may be empty.

    Raises:
        ValueError: a text contains a NUL.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._shared, self.folder = SharedBytes(), ""
        texts = iter(texts)
        while block := list(islice(texts, _BLOCK)):
            self.add(block)

    def add(self, texts: Sequence[str]) -> None:
        """Add texts at the end."""
        joined, data = "\0" + "\0".join(texts), self._shared.data
        if joined.count("\0") != len(texts):
            wrong = next(text for text in texts if "\0" in text)
            raise ValueError(f"{wrong!r:.80} is no name of a file: it contains a NUL")
        common = commonprefix([min(texts), max(texts), *([self.folder] if data else [])])
        common = common[: common.rfind("/") + 1]
        if data and common != self.folder:
            data[:] = data.replace(b"\0", _encoded(f"\0{self.folder[len(common) :]}"))
        data += _encoded(joined).replace(_encoded(f"\0{common}"), b"\0")
        self.folder = common

    @cached_property
    def plain(self) -> bool:
        """Whether the texts are paths or URLs that have, after their common directory, no character
        that means something in a URL, and no empty name or one that begins with a dot. Then
        ``redact`` and ``identify`` change that directory only.
        """
        protocol, _, folder = self.folder.rpartition("://")
        known = ":" not in folder
        if protocol:
            known = "/" in folder and _is_plain(_encoded(protocol + _PORT.sub(r"\1", folder)))
        data = self._shared.data
        return known and _is_plain(data) and not any(data.find(odd) >= 0 for odd in (b"//", b"/.", b"\0/", b"\0."))

    @cached_property
    def _starts(self) -> array[int]:
        """Where each text begins in the buffer; at the end, where another one would."""
        import numpy as np  # which writing tars does not need

        data, starts = self._shared.data, array("I")
        for at in range(0, len(data), _AT_A_TIME):
            zeros = np.flatnonzero(np.frombuffer(data[at : at + _AT_A_TIME], np.uint8) == 0)
            starts.frombytes((zeros + (at + 1)).astype(np.uintc).tobytes())
        starts.append(len(data) + 1)
        return starts

    def __getstate__(self) -> dict[str, Any]:
        return {"_shared": self._shared, "folder": self.folder, "plain": self.plain}

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        numbers = range(len(self))[number]
        if isinstance(numbers, int):
            return self.folder + _decoded(self._bytes(numbers, numbers + 1)[1:])
        if numbers.step != 1:
            return [self[one] for one in numbers]
        return [self.folder + text for text in _decoded(self._bytes(numbers.start, numbers.stop)).split("\0")[1:]]

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BLOCK):
            yield from self[start : start + _BLOCK]

    @cached_property
    def shown(self) -> Packed:
        """URLs as samples and messages show them."""
        return self if self.plain else Packed(map(redact, self))

    def number_of(self, text: str) -> int | None:
        """Return the number of a text, the first one if it comes several times; None: it is not
        here.
        """
        numbers = self._numbers
        if text not in numbers:
            number = bisect_left(self, text) if self._is_sorted else len(self)
            numbers[text] = number if number < len(self) and self[number] == text else None
        return numbers[text]

    def repeated(self) -> list[int]:
        """Return the numbers of the texts that came before in the list, in order.

        A list in order, as that of a pattern is, costs 0.1 s for 10**6 texts, and any other 0.5 s.
        """
        import numpy as np  # which writing tars does not need

        last, ascending = b"", True
        for texts in self._blocks():
            ascending = ascending and (last < texts[0] or not last) and all(map(lt, texts, texts[1:]))
            last = texts[-1]
        if ascending:
            return []
        hashes = np.fromiter((hash(text) for texts in self._blocks() for text in texts), np.int64, len(self))
        order = np.argsort(hashes, kind="stable")
        same = np.flatnonzero(np.diff(hashes[order]) == 0)
        # the hashes of different texts may be equal
        pairs = ((int(order[place + 1]), int(order[place])) for place in same.tolist())
        return sorted(number for number, before in pairs if self[number] == self[before])

    def _blocks(self) -> Iterator[list[bytes]]:
        """Yield the texts without their directory, many at a time."""
        for start in range(0, len(self), _BLOCK):
            yield bytes(self._bytes(start, min(start + _BLOCK, len(self)))).split(b"\0")[1:]

    @cached_property
    def _is_sorted(self) -> bool:
        return all(one <= other for one, other in pairwise(self))

    @cached_property
    def _numbers(self) -> dict[str, int | None]:
        """The numbers of all texts; if these are sorted, of those that were requested."""
        return {} if self._is_sorted else {text: number for number, text in reversed(list(enumerate(self)))}

    def _bytes(self, start: int, stop: int) -> Any:
        """Return some texts without their directory, with a NUL before each."""
        return self._shared.data[self._starts[start] - 1 : self._starts[max(start, stop)] - 1]

    def changed(self, change: Callable[[str], str]) -> Iterator[bytes]:
        """Yield what a function makes of each text, many at a time, with a NUL between them. Of
        ``plain`` texts, the function only changes the directory.
        """
        folder = change(f"{self.folder}_")[:-1] if self.plain else ""
        for start in range(0, len(self), _BLOCK):
            if self.plain:
                texts = _decoded(self._bytes(start, min(start + _BLOCK, len(self)))).replace("\0", f"\0{folder}")[1:]
            else:
                texts = "\0".join(map(change, self[start : start + _BLOCK]))
            yield texts.encode("utf-8", "surrogateescape")


def _is_plain(data: bytes) -> bool:
    return not data.translate(None, _PLAIN)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
