"""One field for a page: its text, its picture, or a player.

Rules:
1. What a field is decided by its content where that is an image, and by its name otherwise.
2. Nothing that could run code is decoded. What cannot be decoded is shown by the reason.
3. Text is cut. It is not escaped: the templates do that.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from typing import Any, NamedTuple

from wds_pipes.browse.data import Budget, ShardView
from wds_pipes.codecs.table import IMAGE, ROWS, SPECS
from wds_pipes.core.words import bytes_shown, plain, plural
from wds_pipes.display.pictures import LARGE, SMALL, Picture, as_numbers, of_array, of_image, range_of
from wds_pipes.display.text import cut, shape_of
from wds_pipes.display.text import shown as in_words
from wds_pipes.errors import for_commands
from wds_pipes.io.compression import unreadable
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tools.files import LABEL
from wds_pipes.tools.looking import Decoders, Describer
from wds_pipes.tools.reading import Found, Member

BUDGET = 1 << 26  # bytes of fields that a page reads
_LARGEST = {SMALL: 1 << 24, LARGE: 1 << 25}  # bytes of a field that is read whole, by the size of its picture
_TEXT = {SMALL: 200, LARGE: 20_000}  # characters of a text
MOST_NAME = 300  # characters of a key, or of the name of a field
_PATH = 4096  # characters of the name of a file
_HEAD = 256  # bytes that are shown as they are
_PARTS = 8  # arrays of a field that are drawn
# The formats with a player, and the content types with which they are sent.
MEDIA = {name: row.media_type for name, row in ROWS.items() if row.asked in SPECS and row.media_type}


class Shown(NamedTuple):
    """A field of a sample for a page.

    Attributes:
        number: its number in the sample.
        name: its name.
        size: its size, in words.
        kind: what it is, such as ``"JPEG image"``.
        text: its content, or what it is in a line.
        pictures: pictures of it.
        player: ``"audio"``, ``"video"`` or ``""``.
        problem: why it cannot be shown; "": nothing is wrong.
        raw: its first bytes, as lines of hexadecimal numbers and text.
        header: what its tar header says.
    """

    number: int
    name: str
    size: str
    kind: str = ""
    text: str = ""
    pictures: tuple[Picture, ...] = ()
    player: str = ""
    problem: str = ""
    raw: str = ""
    header: tuple[tuple[str, str], ...] = ()


class Fields:
    """Shows the fields of the samples of one page.

    Args:
        view: the open shard.
        side: the longer side of pictures in pixels: ``SMALL`` for a grid, ``LARGE`` for a page of
            one sample, which also shows the first bytes and the header of a field.
        budget: what the page may take. Fields that do not fit are not shown.
    """

    def __init__(self, view: ShardView, side: int = SMALL, budget: Budget | None = None) -> None:
        self._view, self._side, self._left, self._budget = view, side, BUDGET, budget or Budget()
        self._describer, self._decoders = Describer(_TEXT[side]), Decoders()

    def of(self, sample: Found, numbers: range) -> list[Shown]:
        """Return some fields of a sample, by their numbers in it."""
        found = []
        for number in numbers:
            member = sample.members[number]
            shown = Shown(number, plain(cut(member.field, MOST_NAME)) or "(no name)", bytes_shown(member.size))
            try:
                self._budget.check()
                found.append(self._show(shown, member))
            except unreadable() as error:
                found.append(shown._replace(kind="bytes", problem=_line(error)))
        return found

    def _show(self, found: Shown, member: Member) -> Shown:
        """Return a field with what can be shown of it."""
        if self._side == LARGE:
            raw = _dump(self._view.read(member, _HEAD))
            found = found._replace(raw=raw, header=self._header(member))
        extension = member.field.rpartition(".")[2]
        if extension in MEDIA:
            media, _, form = MEDIA[extension].partition("/")
            return found._replace(kind=f"{form.removeprefix('x-')} {media}", player=media)
        if member.size > min(_LARGEST[self._side], self._left):
            return found._replace(kind="bytes", problem="It is too large to be shown: download it.")
        self._left -= member.size
        data = self._view.read(member)
        if len(data) < member.size:
            return found._replace(kind="bytes", problem="The shard ends inside of it.")
        if (unpacked := _unpacked(data)) > self._budget.unpacked:
            why = f"It unpacks to {bytes_shown(unpacked)}, too much to be shown: download it."
            return found._replace(kind="bytes", problem=why)
        self._budget.unpacked -= unpacked
        described = self._describer.describe(member.field, data)
        found = found._replace(kind=described.kind, text=described.text)
        if described.kind.endswith(" image") or extension in IMAGE:
            try:
                return found._replace(pictures=(of_image(data, self._side),))
            except Exception as error:  # whatever Pillow raises
                return found._replace(text="", problem=_line(error))
        if described.kind in ("bytes", "undecodable"):
            if described.text != found.size:  # it says why it was not decoded
                return found._replace(text="", problem=described.text)
            return found._replace(text=_text_of(data[: 4 * _TEXT[self._side]], described.text)[: _TEXT[self._side]])
        if member.field == LABEL and described.kind == "integer":
            return found._replace(text=cut(self._view.data.class_named(self._view.shard, found.text), MOST_NAME))
        if described.kind in ("text", "integer", "number") and self._side == SMALL:
            return found
        return self._decoded(found, member.field, data)

    def _decoded(self, found: Shown, name: str, data: bytes) -> Shown:
        """Return a field with its arrays drawn, or with its whole text."""
        value = self._decoders.decode(name, data)
        arrays = value if isinstance(value, dict) else {"": value}
        lines, pictures = [], list[Picture]()
        for part, array in list(arrays.items())[:_PARTS]:
            if (shape := shape_of(array)) is None:
                continue
            numbers = as_numbers(array)
            least, most = (0.0, 0.0) if numbers is None else range_of(numbers)
            values = "" if numbers is None else f", {least:.4g} to {most:.4g}"
            lines.append(f"{f'{part}: ' if part else ''}{shape}{values}")
            try:
                pictures.append(of_array(array, self._side if self._side == SMALL else LARGE // 2))
            except Exception:  # there is nothing to draw
                continue
        if lines:
            return found._replace(text=plain("\n".join(lines)), pictures=tuple(pictures))
        small = self._side == SMALL
        return found._replace(
            text=plain(cut(_whole(value, None if small else 2, _TEXT[self._side]), _TEXT[self._side]))
        )

    def _header(self, member: Member) -> tuple[tuple[str, str], ...]:
        """Return what the header of a member says, in words."""
        place = f"byte {member.start:,} to {member.end:,}, data from {member.offset:,} on"
        block = self._view.bytes_at(member.offset - BLOCK, BLOCK)
        rows = [("name", plain(cut(member.name, _PATH))), ("place", place), ("size", plural(member.size, "byte"))]
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError:  # the data does not follow its header, as in a sparse file
            return tuple(rows)
        owner = f"{info.uname or info.uid}:{info.gname or info.gid}"
        rows += [("mode", f"{info.mode:o}"), ("time", str(info.mtime)), ("owner", plain(owner))]
        if member.offset - BLOCK != member.start:
            rows.append(("extended", f"{member.offset - BLOCK - member.start:,} bytes of extended headers before it"))
        return tuple(rows)


def _unpacked(data: bytes) -> int:
    """The bytes to which a zip, such as an npz, says that it unpacks; 0: it is none."""
    if data[:2] != b"PK":
        return 0
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile:  # its decoder says so
        return 0


def _whole(value: Any, indent: int | None, most: int) -> str:
    """Return a decoded value as text: JSON, of which all that follows a number of characters may be
    missing, or an object in words.
    """
    if isinstance(value, str):
        return value
    parts, size = list[str](), 0
    try:
        # in parts, since a small nested value takes many times as much text with an indent
        for part in json.JSONEncoder(indent=indent, ensure_ascii=False).iterencode(value):
            parts.append(part)
            size += len(part)
            if size > most:
                break
        return "".join(parts)
    except (TypeError, ValueError, RecursionError):
        return in_words(value, limit=_TEXT[SMALL])


def _text_of(data: bytes, otherwise: str) -> str:
    """Return bytes as text if they are text, such as SVG."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if error.start < len(data) - 4:  # not only the last character is cut
            return otherwise
        text = data[: error.start].decode()
    return plain(text) if text and "\0" not in text else otherwise


def _dump(data: bytes) -> str:
    """Return bytes as lines of hexadecimal numbers and characters."""
    lines = []
    for start in range(0, len(data), 16):
        row = data[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        lines.append(f"{start:04x}  {row.hex(' '):<47}  {text}")
    return "\n".join(lines)


def _line(error: Exception) -> str:
    return plain(" ".join(f"It cannot be shown: {type(error).__name__}: {for_commands(error)}".split())[:300])
