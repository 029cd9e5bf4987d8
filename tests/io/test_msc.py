"""Shards in a store that NVIDIA's multi-storage-client reaches, through fsspec."""

import json

import pytest

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards


def test_msc(tmp_path, monkeypatch):
    """Patterns, reading, and a resume at every position; the profile is a directory."""
    pytest.importorskip("multistorageclient")
    make_shards(tmp_path / "shards", shards=3, samples=4)
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.json").write_text(json.dumps({"profiles": {"mine": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))

    def make():
        return wp.ShardList("msc://mine/shards/*.tar").open_shards().load_tar().group_by_key()

    assert [sample["__key__"] for sample in make()] == [f"{number:08d}" for number in range(12)]
    check_resume(make)
