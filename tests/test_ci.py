"""The constraints, the scripts of ``.ci/``, the workflow and the hooks name what is there."""

import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = [Requirement(line) for line in (ROOT / ".ci/constraints.txt").read_text().splitlines()]
PYTHONS = [word.split(" :: ")[2] for word in PYPROJECT["project"]["classifiers"] if ":: Python :: " in word]


def text(name):
    return (ROOT / name).read_text()


@pytest.mark.parametrize("python", PYTHONS)
def test_each_package_of_the_extras_and_groups_has_one_version(python):
    """Run .ci/constraints.py where one has none."""
    extras, groups = PYPROJECT["project"]["optional-dependencies"], PYPROJECT["dependency-groups"]
    lists = [PYPROJECT["project"]["dependencies"], *extras.values(), *groups.values()]
    here = {"python_version": python}
    named = [canonicalize_name(Requirement(line).name) for lines in lists for line in lines]
    found = [each.name for each in PINNED if each.marker is None or each.marker.evaluate(here)]
    assert sorted(set(named) - set(found)) == ["wds-pipes"]
    assert len(set(found)) == len(found)


def test_the_constraints_are_versions_only():
    """No address, no folder, and no build of one machine."""
    for each in PINNED:
        [bound] = each.specifier
        assert (each.url, bound.operator) == (None, "=="), str(each)
        assert re.fullmatch(r"[\w.]+", bound.version), str(each)


def test_the_workflow_runs_each_python_that_the_script_knows():
    job = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]["run"]
    assert job["strategy"]["matrix"]["python"] == PYTHONS
    assert job["steps"][-1]["run"] == "bash .ci/run ${{ matrix.python }}"
    assert f"versions=({' '.join(PYTHONS)})" in text(".ci/run")


def test_the_site_is_built_as_contributing_says():
    [line] = re.findall(r"(?m)^\.venv/bin/(python -m sphinx .*)$", text("tutorials/docs/contributing.md"))
    steps = yaml.safe_load(text(".github/workflows/docs.yml"))["jobs"]["publish"]["steps"]
    assert line in [step.get("run") for step in steps]
    assert {"path": line.split()[-1]} in [step.get("with") for step in steps]


def test_the_script_installs_as_the_two_lines_of_the_readme():
    [block] = re.findall(r"(?ms)^```sh\n(.*?)^```", text("README.md"))
    commands = [part for line in block.splitlines() for part in line.split(" && ")]
    installing = [part.replace(".venv/bin/pip install", '"$bin/pip" install -q') for part in commands]
    installing = [part for part in installing if "pip" in part and "install" in part]
    assert len(installing) == 3
    assert all(part in text(".ci/run") for part in installing)


def test_the_scripts_and_tests_that_are_named_exist():
    for name in ("run", "lowest", "newest"):
        said = text(f".ci/{name}")
        for path in re.findall(r"(?<![\w/])(?:\.ci|tests)/[\w/.]*\w", said):
            assert (ROOT / path).exists(), f".ci/{name} names {path}"
    for name in ("packages.txt", "quick.txt"):
        for line in text(f".ci/{name}").splitlines():
            path, _, test = line.partition("::")
            assert (ROOT / path).exists(), f".ci/{name} names {path}"
            assert f"def {test}(" in text(path) if test else True


def test_the_hooks_are_programs_of_the_group_dev():
    [local] = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    for hook in local["hooks"]:
        program = Path(shlex.split(hook["entry"])[0])
        assert program.parent == Path(".venv/bin")
        assert shutil.which(program.name, path=Path(sys.executable).parent)
        assert program.name in PYPROJECT["dependency-groups"]["dev"]


def test_contributing_leads_to_the_page():
    [target] = re.findall(r"\]\((.*?)\)", text(".github/CONTRIBUTING.md"))
    assert (ROOT / ".github" / target).exists()
