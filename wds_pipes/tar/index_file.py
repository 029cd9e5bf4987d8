"""Write an index of shards in the wids format, and read what an earlier run has written there.

Beside what wids knows, an entry has what tells whether it is still right: ``version``, that of the
shard when it was read, and ``idx_md5sum`` and ``dali_md5sum``, the MD5s of the indexes that were
written with it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from wds_pipes.io.compression import TAR_NAME
from wds_pipes.io.outputs import read_small, target_of, write_small
from wds_pipes.io.urls import at_home, local_path, plain, redact, with_variables
from wds_pipes.tar.index_formats import MAX_INDEX_BYTES, ShardFacts, place_of

_KIND = b"wids-shard-index-v1"
_MD5 = re.compile(r"[0-9a-f]{32}")
# How the samples were found, if it is another rule than the usual one: see ``index_shards``.
_RULES = {"key_split": "first-dot", "on_repeated_key": "raise"}


class Entry(NamedTuple):
    """What is known of a shard.

    Attributes:
        facts: its samples, size and MD5.
        version: that of the shard when it was read, as ``version_of`` returns it.
        offsets: the MD5 of its indexes of offsets and keys.
        dali: the MD5 of its index of DALI.
    """

    facts: ShardFacts
    version: str | None = None
    offsets: str | None = None
    dali: str | None = None


class IndexFile(NamedTuple):
    """The content of an index that ``write_index`` has written.

    Attributes:
        entries: by the names of the shards in it.
        rules: how the samples were found: ``key_split`` and ``on_repeated_key``.
    """

    entries: dict[str, Entry]
    rules: dict[str, str]


def check_output(output: str | os.PathLike[str], *, remote: bool = False) -> str:
    """The path of an index to write, with ``remote`` also its URL; ValueError if it is another one,
    or has no existing directory.
    """
    if not isinstance(output, (str, os.PathLike)):
        raise TypeError(f"an index is named by a path, not {output!r:.80}")
    if TAR_NAME.fullmatch(os.path.basename(os.fspath(output))):
        raise ValueError(f"{redact(os.fspath(output))} is the name of a shard: name the index, such as index.json")
    if remote and local_path(target := target_of(output)) is None:
        return target
    path = local_path(at_home(with_variables(os.fspath(output))))
    if path is None or not path or path.endswith("/"):
        raise ValueError(
            f"an index is written to a local file, not to {redact(os.fspath(output))!r}: write it there and copy it"
        )
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"the directory of index {path!r} does not exist: make it first")
    return path


def check_is_index(path: str) -> None:
    """Refuse to replace a file that is no index, also no damaged one.

    Raises:
        ValueError: it is another file.
    """
    if not os.path.lexists(path):
        return
    content = b"a directory, a pipe or a device"
    if os.path.isfile(path):
        with open(path, "rb") as file:
            content = file.read(MAX_INDEX_BYTES)
    try:
        known = _KIND in content or isinstance(json.loads(content)["shardlist"], list)
    except (ValueError, LookupError, TypeError, RecursionError):
        known = False
    if content.strip() and not known:
        raise ValueError(f"{path} is another file than an index: name another one to write, or remove it first")


def write_index(
    path: str,
    entries: Mapping[str, Entry],
    rules: Mapping[str, str] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write an index of shards by their URLs; the file appears when it is complete."""
    shardlist = []
    named = {name_in(path, url): entry for url, entry in entries.items()}
    if len(named) < len(entries):
        raise ValueError(
            "two shards have one name without the credentials in their URLs, so an index cannot "
            "tell them apart: give them other names"
        )
    for name, ((samples, size, digest), version, offsets, dali) in named.items():
        entry = {
            "url": name,
            "md5sum": digest,
            "nsamples": samples,
            "filesize": size,
            "version": version,
            "idx_md5sum": offsets,
            "dali_md5sum": dali,
        }
        shardlist.append({field: value for field, value in entry.items() if value is not None})
    unusual = {name: rule for name, rule in (rules or {}).items() if rule != _RULES[name]}
    if any("version" in entry for entry in shardlist):  # of the shards at this place, not of copies
        unusual["place"] = place_of(path)
    content = {"__kind__": _KIND.decode(), "wids_version": 1, **unusual, "shardlist": shardlist}
    write_small(path, (json.dumps(content, indent=1) + "\n").encode("ascii"), storage_options)


def read_index(path: str, storage_options: dict[str, Any] | None = None) -> IndexFile:
    """Read an index that ``write_index`` has written. Of a file that is missing, damaged or in
    another format, nothing is known.
    """
    try:
        content = json.loads((read_small(path, storage_options, most=MAX_INDEX_BYTES + 1) or b"")[:MAX_INDEX_BYTES])
        rules = {name: content.get(name, usual) for name, usual in _RULES.items()}
        found = {entry["url"]: entry for entry in content["shardlist"]}
        if len(found) < len(content["shardlist"]):
            found = {}
        return IndexFile({name: _entry(entry) for name, entry in found.items()}, rules)
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return IndexFile({}, dict(_RULES))


def _entry(entry: dict[str, Any]) -> Entry:
    counts = [entry.get(name) for name in ("nsamples", "filesize")]
    texts = [entry.get(name) for name in ("md5sum", "idx_md5sum", "dali_md5sum")]
    version = entry.get("version")
    samples, size = (count if type(count) is int and count >= 0 else None for count in counts)
    md5, offsets, dali = (text if isinstance(text, str) and _MD5.fullmatch(text) else None for text in texts)
    whole = samples is not None and size is not None and md5 is not None and isinstance(version, str)
    return Entry(ShardFacts(samples, size, md5), version if whole else None, offsets, dali)


def name_in(index: str, url: str) -> str:
    """The name of a shard in an index.

    It is relative for a shard in the directory of the index or below; otherwise it is complete.
    """
    path = local_path(url)
    if path is None:
        folder = plain(index).rpartition("/")[0] + "/"
        return plain(url).removeprefix(folder) if local_path(index) is None else plain(url)
    path, folder = os.path.abspath(path), os.path.dirname(os.path.abspath(index))
    inside = path.startswith(os.path.join(folder, ""))
    return (os.path.relpath(path, folder) if inside else path).replace(os.sep, "/")
