"""What a codec is, and the codecs of users: registered ones, and those of installed packages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from wds_pipes.errors import mended

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "wds_pipes.codecs"  # of the entry points of packages with codecs

T = TypeVar("T")


class NotAllowedError(Exception):
    """A field is not decoded for safety, not because it is damaged. This error is never skipped."""


def not_allowed(why: str = "") -> NotAllowedError:
    """Return the error for a field that only unpickling decodes, for a reason."""
    return mended(
        NotAllowedError,
        f"{why}unpickling runs code from the data",
        mend="Pass allow_pickle=True only if you trust the author of the shards, or leave the field out with fields=",
        mend_cli="Leave the field out with wds-pipes filter --drop-fields",
    )


TOO_LARGE = "it unpacks to more than {} bytes"

Decoder = Callable[[bytes], Any]
Handler = Callable[[str, bytes], Any]  # fn(key, data), where key is the field's name after a dot
Encoder = Callable[[Any], bytes]

# Images are recognised by content, whatever the field is called.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "GIF", "BMP", "PPM")  # Pillow's names
# What files of these formats begin with. Other files may, too: Pillow decides.
IMAGE_STARTS = (b"\xff\xd8", b"\x89PNG", b"RIFF", b"II", b"MM", b"GIF", b"BM", b"P")
PACKED = ("gz", "bz2", "xz", "zst")
MAX_DECODED_BYTES = 1 << 30
MAX_PACKED = 2  # layers of gz, bz2, xz and zst that are unpacked


@dataclass(frozen=True, eq=False)
class Codec:
    """How the fields with some extensions are decoded and encoded.

    ``wds_pipes.testing.check_codec`` encodes and decodes the example. A package offers a codec by
    an entry point of the group ``wds_pipes.codecs``, whose name is the extension::

        [project.entry-points."wds_pipes.codecs"]
        dcm = "my_package.codecs:dicom"         # dicom = wp.Codec("dcm", read, write)

    It is imported in the process that meets the first field with this extension, so it is there in
    every worker. ``register_codec`` is for code that is no package.

    Args:
        extensions: the last parts of the names of fields, as in ``"dcm;dicom"``.
        decode: a function of the bytes that returns the object. If it imports a package that is
            missing, it should raise ImportError, which is never skipped.
        encode: a function of the object that returns bytes; None: such fields are written from
            bytes.
        package: the package to install, if it is not a dependency of wds_pipes.
        media_type: such as ``"application/dicom"``.
        example: an object that ``encode`` takes, or a function without arguments that returns one.
        lossy: whether the decoded example differs from the example in its values.

    Raises:
        TypeError: an argument has another type.
        ValueError: an extension has a dot, or is one of compression (gz, bz2, xz, zst).
    """

    extensions: str
    decode: Decoder | None = None
    encode: Encoder | None = None
    _: KW_ONLY
    package: str | None = None
    media_type: str | None = None
    example: Any = None
    lossy: bool = False

    def __post_init__(self) -> None:
        for name in split_names(self.extensions):
            if "." in name:
                raise ValueError(f"an extension is the last part of a name, without a dot, unlike {name!r}")
            if name in PACKED:
                raise ValueError(f"fields that end in .{name} are decompressed, so no codec can have this extension")
        for role, function in (("decode", self.decode), ("encode", self.encode)):
            if function is not None and not callable(function):
                raise TypeError(f"{role} must be a function, not {function!r:.80}")

    @property
    def names(self) -> tuple[str, ...]:
        """The extensions, one by one."""
        return split_names(self.extensions)


def split_names(text: Any) -> tuple[str, ...]:
    """Return the extensions that ``"flac;.WAV"`` names, in lower case and without dots before them.

    Raises:
        TypeError: it is not a string of names.
    """
    if not isinstance(text, str) or not all(map(str.strip, text.split(";"))):
        raise TypeError(f"extensions are named by a string such as 'flac;wav', not {text!r:.80}")
    return tuple(name.strip().lower().lstrip(".") for name in text.split(";"))


def by_extension(given: Mapping[Any, Any], role: str) -> dict[str, Any]:
    """Read the functions or codecs that a caller passes by extension.

    Args:
        given: as in ``{"seg.png": fn, "flac;wav": codec}``.
        role: ``"decode"`` or ``"encode"``: which function of a codec is meant.

    Raises:
        TypeError: a key is not a string, or a value is neither a function nor a codec that has one.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        function = getattr(value, role) if isinstance(value, Codec) else value
        if not isinstance(name, str) or not callable(function):
            kind = "a decoder" if role == "decode" else "an encoder"
            raise TypeError(f"{kind} is given as {{'ext': function}}, not {name!r}: {value!r:.80}")
        found.update(dict.fromkeys(split_names(name), function))
    return found


def of_longest_extension(values: Mapping[str, T], name: str) -> T | None:
    """Return the value of the longest extension with which the name of a field ends, which may have
    several parts, such as ``seg.png``; None if there is none.

    At most as many parts of the name are compared as the longest extension has.
    """
    if not values:
        return None
    most = max(extension.count(".") + 1 for extension in values)
    parts = name.rsplit(".", most)[-most:]
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next((values[ending] for ending in endings if ending in values), None)


def of_packed_name(values: Mapping[str, T], field: str) -> tuple[T | None, str, list[str]]:
    """Return the value for a field, as ``of_longest_extension``; the name of the field without the
    endings of compression after which none was found; and these, the last one first.

    Raises:
        ValueError: there are more than MAX_PACKED.
    """
    name, packed = field.lower(), list[str]()
    while (value := of_longest_extension(values, name)) is None and (ending := name.rpartition(".")[2]) in PACKED:
        packed.append(ending)
        if len(packed) > MAX_PACKED:
            raise ValueError(f"it is packed more than {MAX_PACKED} times by its name, which is not read")
        name = name.rpartition(".")[0]
    return value, name, packed


_registered: dict[str, Codec] = {}


def add_codec(codec: Codec) -> None:
    """Register a codec: see ``register_codec``."""
    _registered.update(dict.fromkeys(codec.names, codec))


def registered_codecs() -> dict[str, Codec]:
    """Return the codecs that are registered now, by extension."""
    return dict(_registered)


@functools.cache
def _plug_ins() -> dict[str, list[EntryPoint]]:
    """The entry points of installed packages, by extension. Nothing is imported."""
    from importlib.metadata import entry_points  # takes longer to import than this whole module

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name.lower(), []).append(point)
    return found


def plug_in(extension: str) -> Codec | None:
    """Return the codec of an installed package for an extension; None if there is none.

    Raises:
        ImportError: it cannot be loaded, is not a codec for this extension, or several packages
            have one.
    """
    points = _plug_ins().get(extension, [])
    if not points:
        return None
    if len(points) > 1:
        raise _broken(extension, points, "several packages offer one")
    try:
        codec = points[0].load()
    except Exception as error:
        raise _broken(extension, points, f"it cannot be imported: {type(error).__name__}: {error}") from error
    if not isinstance(codec, Codec) or extension not in codec.names:
        raise _broken(extension, points, "it is not a wds_pipes.Codec for this extension")
    return codec


def _broken(extension: str, points: Iterable[EntryPoint], why: str) -> ImportError:
    named = " and ".join(
        f"{point.value} of package {point.dist.name} {point.dist.version}" if point.dist else point.value
        for point in points
    )
    return mended(
        ImportError,
        f"the codec for {extension!r}, {named}, cannot be used: {why}",
        mend=f"Correct or uninstall it, or pass a function: {{{extension!r}: function}}",
        mend_cli="Correct or uninstall it",
    )
