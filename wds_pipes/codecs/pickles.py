"""What a pickle of ``torch.save`` would call, found without calling it.

``torch.load(weights_only=True)`` calls only functions that run no code of the file. But with a few
bytes, some of them take any memory: ``bytearray(n)``, ``torch.Tensor(n)``, or ``encode(text,
"hex")`` of its own result, again and again. So this module follows the operations of the pickle
first. It knows text, whole numbers, tuples of these, and the names of functions; of all other
values, only how they came to be.
"""

from __future__ import annotations

import enum
import math
import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.codecs.names import MAX_DECODED_BYTES

_MOST_ELEMENTS = MAX_DECODED_BYTES // 8  # of a tensor that repeats the elements of its storage
_CONSTANTS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1"}
# These take memory for what they get, so it must be in the file, not the result of another call.
_BUILDS = {
    "builtins.set", "builtins.complex", "collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device",
    "torch.serialization._get_layout",
}  # fmt: skip


class _Value(enum.Enum):
    IN_FILE = "in the file"  # a list, a dict, a set, a float, None, True or False
    BYTES = "bytes of a text in the file"
    MADE = "the result of any other call"


class _Function(NamedTuple):
    name: str


class _Storage(NamedTuple):
    elements: int


def check_calls(file: BinaryIO, most: int) -> None:
    """Check what the pickle that begins at the position of ``file`` would call.

    Args:
        file: the file, which is left after the pickle.
        most: how many elements its storages may have.

    Raises:
        ValueError: a call may take more memory than the file has bytes, by any factor; or it is no
            pickle.
        pickle.UnpicklingError: it has operations that ``torch.save`` does not write.
    """
    stack: list[Any] = []
    outer: list[list[Any]] = []  # the stacks before each mark
    memo: dict[int, Any] = {}
    argument: Any
    try:
        for operation, argument, _ in pickletools.genops(file):
            match operation.name:
                case "PROTO" | "STOP":
                    pass
                case "GLOBAL":
                    stack.append(_Function(_name(*argument.split(" ", 1))))
                case name if name in _CONSTANTS:
                    stack.append(argument)
                case "NONE" | "NEWTRUE" | "NEWFALSE" | "BINFLOAT" | "SHORT_BINSTRING":
                    stack.append(_Value.IN_FILE)
                case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET":
                    stack.append(_Value.IN_FILE)
                case "MARK":
                    outer.append(stack)
                    stack = []
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE":
                    items, stack = tuple(stack), outer.pop()
                    stack.append(items)
                case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                    count = int(name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                case "APPENDS" | "SETITEMS":
                    stack = outer.pop()
                case "APPEND" | "BUILD":
                    stack.pop()
                case "SETITEM":
                    del stack[-2:]
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "BINPERSID":
                    stack.append(_storage(stack.pop(), most))
                case "REDUCE" | "NEWOBJ":
                    arguments, function = stack.pop(), stack.pop()
                    stack.append(_call(function, arguments))
                case name:
                    raise pickle.UnpicklingError(f"torch.save writes no {name}")
    except (IndexError, KeyError) as error:
        raise ValueError(f"its pickle is damaged: {error!r}") from error


def _name(module: str, name: str) -> str:
    """The name of a function, as torch finds it."""
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    return f"{IMPORT_MAPPING.get(module, module)}.{name}"


def _storage(key: Any, most: int) -> _Storage:
    """The storage that a key names: ``("storage", type, key, location, elements, ...)``."""
    elements = key[4] if isinstance(key, tuple) and len(key) > 4 else None
    if not isinstance(elements, int) or not 0 <= elements <= most:
        raise ValueError(f"it names a storage of {elements} elements, and is itself smaller")
    return _Storage(elements)


def _call(function: Any, arguments: Any) -> _Value:
    """The result of a call; ValueError if it may take any memory."""
    name = function.name if isinstance(function, _Function) else "a value"
    while name == "torch._tensor._rebuild_from_type_v2" and isinstance(arguments, tuple) and len(arguments) == 4:
        name, arguments = getattr(arguments[0], "name", "a value"), arguments[2]  # what it calls itself
    first, *others = arguments if isinstance(arguments, tuple) and arguments else [None]
    if name == "_codecs.encode":
        allowed = isinstance(first, str) and others == ["latin1"]
    elif name == "builtins.bytearray":
        allowed = arguments == () or first is _Value.BYTES or isinstance(first, str)
    elif name in _BUILDS:
        allowed = isinstance(arguments, tuple) and _Value.MADE not in arguments
    elif name.startswith("torch._utils._rebuild_tensor") or name == "torch._utils._rebuild_qtensor":
        allowed = len(others) >= 3 and _fits(first, *others[:3])
    else:  # torch decides by its list, of which these constructors take the size of what they make
        allowed = name != "a value" and not (name.startswith("torch.") and name.endswith(("Tensor", "Storage")))
    if not allowed:
        raise ValueError(f"it calls {name} with what torch.save does not write, which could take any memory")
    return _Value.BYTES if name == "_codecs.encode" else _Value.MADE


def _fits(storage: Any, offset: Any, size: Any, stride: Any) -> bool:
    """Whether a tensor lies within its storage, and does not repeat its elements without limit."""
    if not (isinstance(storage, _Storage) and _are_counts((offset,)) and _are_counts(size) and _are_counts(stride)):
        return False
    last: int = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=False))
    elements = math.prod(size)
    return elements == 0 or (last < storage.elements and elements <= max(storage.elements, _MOST_ELEMENTS))


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(value, int) and value >= 0 for value in values)
