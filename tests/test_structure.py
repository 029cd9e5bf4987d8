"""The shape of the package: which module imports which, and where things are."""

import ast
import subprocess
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import wds_pipes
from wds_pipes import stages
from wds_pipes.core.stage import functional_name

ROOT = Path(wds_pipes.__file__).parent
# The folders whose modules a folder may import at import time, besides its own.
BELOW = {
    "browse": {"errors", "core", "io", "codecs", "tar", "loader", "display", "tools", "checkpoint"},
    "tools": {
        *("errors", "core", "io", "codecs", "tar", "stages", "display"),
        *("loader", "datapipes", "indexed", "checkpoint"),
    },
    "core": {"errors"},
    "io": {"errors", "core"},
    "codecs": {"errors", "core", "io"},
    "tar": {"errors", "core", "io"},
    "stages": {"errors", "core", "io", "codecs", "tar"},
    "display": {"errors", "core", "io", "codecs", "stages"},
}


def name_of(path):
    return ".".join(("wds_pipes", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {name_of(path): path for path in ROOT.rglob("*.py")}


def imports_of(tree):
    """The imports that run when a module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            yield from imports_of(node)


@cache
def tree_of(module):
    return ast.parse(MODULES[module].read_text())


@cache
def needed(module):
    """The modules of the package that a module imports when it is imported."""
    found = set()
    for node in imports_of(tree_of(module)):
        names = [alias.name for alias in node.names]
        found |= (
            set(names) if isinstance(node, ast.Import) else {f"{node.module}.{name}" for name in names} | {node.module}
        )
    return {name for name in found if name in MODULES and name not in ("wds_pipes", module)}


def folder_of(module):
    return module.split(".")[1] if module.count(".") else ""


def test_the_top_level_is_small():
    folders = [path for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    assert len(folders) <= 12, "more than 12 folders: put yours into the one whose boundary it belongs to"
    files = [path for path in ROOT.glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= 10, "more than 10 files at the top, where all is public: put yours into a folder"


def test_the_repository_has_no_other_top_level():
    here = Path(__file__).parents[1]
    found = subprocess.run(["git", "ls-files"], cwd=here, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("not a checkout of git")
    top = {name.partition("/")[0] for name in found.stdout.splitlines()}
    expected = {"wds_pipes", "tests", "tutorials", "pyproject.toml", "README.md", "LICENSE"}
    assert {name for name in top if name[0] != "."} == expected


def test_a_folder_lists_its_modules():
    for module, path in MODULES.items():
        if path.name == "__init__.py" and module not in ("wds_pipes", "wds_pipes.cli"):
            steps = {functional_name(getattr(stages, each)) for each in stages.__all__}
            others = {each.stem for each in path.parent.glob("*.py")} - {"__init__"} - steps
            missing = sorted(each for each in others if f"``{each}``" not in path.read_text())
            assert len(others) <= 5 or not missing, f"say in {path.relative_to(ROOT)} what these are for: {missing}"


HOSTS = ("torchdata", "torch.utils.data.datapipes")  # frameworks that may disappear
ON_HOSTS = {"wds_pipes.nodes", "wds_pipes.datapipes.base", "wds_pipes.tools.demo.train"}


def test_frameworks_are_imported_in_their_modules_only():
    for module in MODULES:
        for node in imports_of(tree_of(module)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            names += [f"{names[0]}.{alias.name}" for alias in node.names]
            met = [name for name in names if name.startswith(HOSTS) or name == "torch.utils.data.IterDataPipe"]
            assert not met or module in ON_HOSTS, (
                f"{module} imports {met}, which may go: do it in one of {sorted(ON_HOSTS)}, or inside a function"
            )


def test_no_circle_of_imports():
    try:
        TopologicalSorter({module: needed(module) for module in MODULES}).prepare()
    except CycleError as error:
        pytest.fail(f"these import each other: {' > '.join(error.args[1])}. Move what both need into a third module")


@pytest.mark.parametrize("folder", BELOW)
def test_no_folder_imports_one_above_it(folder):
    for module in MODULES:
        if folder_of(module) == folder:
            up = {folder_of(other) for other in needed(module)} - {folder} - BELOW[folder]
            assert not up, (
                f"{module} imports from {sorted(up)}, and {folder}/ may import from {sorted(BELOW[folder])} only: move "
                "what you need down, or import it inside the function that needs it"
            )


# The modules of the plug-in that all commands may use. A name that changes there is also looked
# for in tools/, cli/ and browse/.
COMMANDS = ("tools", "cli", "browse")
FACE = {
    f"wds_pipes.{module}"
    for module in (
        *("errors", "stages", "tar", "codecs.table", "display.text"),
        *("core.counts", "core.importing", "core.options", "core.order", "core.stream", "core.words"),
        *("io.compression", "io.expand", "io.open", "io.outputs", "io.ranges", "io.threads", "io.urls", "io.versions"),
        *("io.cache.files", "io.cache.shard_cache", "loader.pipe_loader", "stages.fields"),
        *("tar.encoded", "tar.grouping", "tar.headers", "tar.index", "tar.indexing", "tar.keys", "tar.located"),
        *("tar.reader", "tar.samples", "tar.stored", "tar.writer"),
    )
}
# Some commands are about one part of the plug-in, and may use the modules of this part, too.
STATES = "core.digest core.moved core.state"
INSIDE = {
    "browse.fields": "display.pictures",
    "browse.pages": "display.pictures",
    "tools.diagnosing": "core.chain core.stage datapipes io.remote.budget io.remote.queue loader.stats "
    "loader.transport stages.threaded",
    "tools.downloading": "io.locks",
    "tools.looking": "codecs.codec codecs.images codecs.text",
    "tools.reordering": "stages.proportions",
    "tools.rewriting": "stages.decode_by_ext stages.map_samples",
    "tools.states": f"{STATES} core.stage display.states loader.checkpoint_files loader.ledger_file loader.restoring",
    "tools.training": STATES,
}


def used_of_plug_in(module):
    """The modules of the plug-in that a module imports from, also inside functions."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found = {name if name in MODULES else node.module for name in names}
        else:
            found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        yield from (name for name in found if name in MODULES and folder_of(name) not in ("", *COMMANDS))


def test_the_commands_use_the_declared_face_of_the_plug_in():
    used = {name: set(used_of_plug_in(name)) for name in MODULES if folder_of(name) in COMMANDS}
    inside = {f"wds_pipes.{name}": {f"wds_pipes.{each}" for each in INSIDE[name].split()} for name in INSIDE}
    for name, modules in used.items():
        more = modules - FACE - inside.get(name, set())
        assert not more, f"{name} imports from {sorted(more)}: use what a module of FACE has, or declare it there"
    assert {name: modules & used[name] for name, modules in inside.items()} == inside, "no longer used"
    assert set.union(*used.values()) >= FACE, f"no longer used: {sorted(FACE - set.union(*used.values()))}"


def test_private_names_stay_in_their_files():
    for module in MODULES:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.ImportFrom) and node.module in MODULES:
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"{module} imports {private} of {node.module}: give it a public name there"


STEPS = {functional_name(getattr(stages, name)): name for name in stages.__all__}


ASK = "asks which stage this is: let the stage say what you need to know, in wds_pipes.core, and ask for that, not for"


def test_the_kinds_of_partitions_are_told_apart_where_they_are_made_only():
    found = set()
    for module in MODULES.keys() - {"wds_pipes.loader.ranges", "wds_pipes.loader.slices"}:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, (ast.Call, ast.Compare)):
                kinds = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & {"Ranges", "Slices"}
                compares = isinstance(node, ast.Compare) or ast.unparse(node.func) == "isinstance"
                found |= {(module, kind) for kind in kinds if compares}
    assert not found


def test_other_modules_know_no_stage():
    """No other module checks the class of a stage or knows one by its name."""
    for module in MODULES:
        if folder_of(module) in ("stages", "tools", "cli") or module == "wds_pipes":  # whose list of names has mix()
            continue
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                kinds = {
                    name.id if isinstance(name, ast.Name) else name.attr
                    for name in ast.walk(node.args[1])
                    if isinstance(name, (ast.Name, ast.Attribute))
                }
                assert not kinds & set(STEPS.values()), f"{module}:{node.lineno} {ASK} {kinds}"
            if isinstance(node, ast.Compare):
                texts = {
                    part.value
                    for part in ast.walk(node)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                }
                assert not texts & STEPS.keys(), f"{module}:{node.lineno} {ASK} {texts}"
