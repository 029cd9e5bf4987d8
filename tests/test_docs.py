"""The documentation builds without a warning, and every public name is in it."""

import importlib
import pkgutil
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import wds_pipes

TUTORIALS = Path(__file__).parents[1] / "tutorials"
PUBLIC_WITHOUT_LISTS = ("checkpoint", "lightning", "testing")  # modules without __all__ that users import from


def public():
    """Every public name with its object."""
    names = ["wds_pipes", *(f"wds_pipes.{module.name}" for module in pkgutil.iter_modules(wds_pipes.__path__))]
    for module in map(importlib.import_module, names):
        own = [name for name, value in vars(module).items() if name[0] != "_" and getattr(value, "__module__", None) == module.__name__]
        for name in getattr(module, "__all__", own if module.__name__.rpartition(".")[2] in PUBLIC_WITHOUT_LISTS else []):
            yield f"{module.__name__}.{name}", getattr(module, name)


@pytest.mark.slow
def test_it_builds_without_a_warning_and_has_every_public_name(tmp_path):
    sphinx = pytest.importorskip("sphinx.util.inventory")
    command = [
        sys.executable,
        "-P",
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        tmp_path / "trees",
        "-c",
        TUTORIALS / "docs",
        TUTORIALS,
        tmp_path / "docs",
    ]
    built = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert built.returncode == 0, built.stderr
    with open(tmp_path / "docs" / "objects.inv", "rb") as file:
        inventory = sphinx.InventoryFile.load(file, "", lambda *parts: "/".join(parts))
    described = [name for kind, names in inventory.items() if kind.startswith("py:") for name in names]
    known = {id(pydoc.locate(name)) for name in described}
    missing = sorted(name for name, value in public() if id(value) not in known)
    assert not missing
    assert len(list(public())) > 60
    assert "wds_pipes.stages.ShuffleBuffer" in described
    shown = "".join(page.read_text() for page in (tmp_path / "docs" / "docs").glob("*.html"))
    assert "STEPS" not in shown
    assert "Rules:" not in shown
    assert all(f"{script.stem}.html" in shown for script in TUTORIALS.glob("[0-9]*.ipynb"))
