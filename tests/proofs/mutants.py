"""Whether the tests notice a changed program: random mutants of core, stages, tar, io, codecs and
loader.

    python tests/proofs/mutants.py [--rounds 100] [--minutes M] [--seed N] [--map FILE]
                                    [--only core/chain.py]

First the fast tests run once under coverage, which says for each line which of them run it; with
--map FILE this is kept for the next time. A round is two mutants at once: each changes one place in
a copy of the package (a comparison, a constant, a condition, an operator, a call that is left out)
and runs the quickest of the tests that run its line, up to 60, until one fails. Prints the
survivors, for a reader to judge: some change nothing that a user could see. Exit code 1 if fewer
than 85 % were noticed. ``all`` leaves it out: it takes an hour.
"""

import ast
import copy
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from amount import parser, rounds
from coverage import Coverage
from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "stages", "tar", "io", "codecs", "loader")
AT_ONCE, MOST_TESTS, MOST_SECONDS, LEAST_SHARE = 2, 60, 600, 0.85
TESTS_SECONDS = 40  # of the tests of a mutant, as long as they took for the map
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
OPERATORS |= {ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}


def changed(node):
    """What may stand for a node, or None; annotations and texts are not changed."""
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            node.ops[0] = COMPARISONS[type(op)]()
        case ast.BinOp(left=ast.Name() | ast.Constant() | ast.JoinedStr(), op=op) if not isinstance(
            op, ast.Add | ast.Sub
        ):
            return None
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            node.op = OPERATORS[type(op)]()
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.Constant(value=bool()):
            node.value = not node.value
        case ast.Constant(value=int()):
            node.value += 1
        case ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
        case ast.AugAssign(op=op):
            node.op = ast.Sub() if isinstance(op, ast.Add) else ast.Add()
        case _:
            return None
    return node


def places(path):
    """The places in a file where a mutant can be made: (line, how many nodes come before it)."""
    tree, found = ast.parse(path.read_text()), []
    left_out = {
        id(inner)
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in left_out and hasattr(node, "lineno") and changed(copy.deepcopy(node)) is not None:
            found.append((node.lineno, number))
    return found


def mutate(text, number):
    """A text with the node of this number changed."""
    tree = ast.parse(text)
    target = list(ast.walk(tree))[number]

    class Swap(ast.NodeTransformer):
        def visit(self, node):
            return changed(node) if node is target else self.generic_visit(node)

    return ast.unparse(ast.fix_missing_locations(Swap().visit(tree)))


def tests_by_line(file):
    """For each file and line, the tests that run it; the fast tests run if there is no map yet."""
    if not file.exists():
        settings = file.with_suffix(".ini")
        settings.write_text("[run]\nsource = wds_pipes\n")
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", f"--data-file={file}"]
        times = f"--junitxml={file.with_suffix('.xml')}"
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        arguments = ["-m", "pytest", "-p", Path(__file__).stem, "-n", "0", times, "tests"]
        subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
    found = {}
    data = sqlite3.connect(file)
    query = "SELECT path, context, numbits FROM line_bits JOIN file ON file.id = file_id "
    for path, context, bits in data.execute(query + "JOIN context ON context.id = context_id"):
        if context:
            for line in numbits_to_nums(bits):
                found.setdefault((os.path.relpath(path, ROOT), line), set()).add(context)
    return found


def pytest_runtest_setup(item):
    """As a plugin of pytest, for a map: coverage's own contexts do not see tests of Hypothesis."""
    Coverage.current().switch_context(f"{item.module.__name__.rpartition('.')[2]}.{item.originalname}")


def seconds_of_tests(file):
    """How long each test function took for a map, with all its cases, as coverage names it."""
    seconds = Counter()
    for case in ET.parse(file.with_suffix(".xml")).iter("testcase"):
        module, function = case.get("classname").rpartition(".")[2], case.get("name").partition("[")[0]
        seconds[f"{module}.{function}"] += float(case.get("time"))
    return seconds


def quickest(contexts, seconds):
    """Tests to run: the quickest ones, and at least one."""
    chosen, total = [], 0
    for context in sorted(contexts, key=lambda context: (seconds[context], context))[:MOST_TESTS]:
        total += seconds[context]
        if chosen and total > TESTS_SECONDS:
            break
        chosen.append(node_id(context))
    return chosen


def node_id(context):
    """The argument of pytest for a test that coverage names ``tests.x.test_y.test_z``."""
    folder, _, name = context.rpartition(".")
    for path in ROOT.glob(f"tests/**/{folder.rpartition('.')[2]}.py"):
        return f"{path.relative_to(ROOT)}::{name}"
    return None


def survives(path, number, tests):
    """Whether these tests pass with a mutant of a line."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(
            ROOT, f"{directory}/copy", ignore=shutil.ignore_patterns(".git", "build", "*.egg-info", ".venv")
        )
        target = Path(directory, "copy", path)
        target.write_text(mutate(target.read_text(), number))
        environment = {**os.environ, "PYTHONPATH": f"{directory}/copy", "TMPDIR": directory}
        command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "--timeout", "60", "-p", "no:cacheprovider", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=f"{directory}/copy",
                env=environment,
                capture_output=True,
                timeout=MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main():
    known = parser(__doc__, 100)
    known.add_argument("--map", type=Path, help="keeps which tests run which line")
    known.add_argument("--only", default="", help="files whose paths hold this")
    options = known.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as directory:
        file = options.map or Path(directory) / "map"
        runs = tests_by_line(file)
        seconds = seconds_of_tests(file)
    files = [
        path for folder in FOLDERS for path in (ROOT / "wds_pipes" / folder).rglob("*.py") if options.only in str(path)
    ]
    every = [(str(path.relative_to(ROOT)), *place) for path in sorted(files) for place in places(path)]
    rng.shuffle(every)
    of_file = {}  # for lines that run when their module is imported
    for (path, _), contexts in runs.items():
        of_file.setdefault(path, set()).update(contexts)

    def attempt(place):
        path, line, number = place
        contexts = runs.get((path, line))
        if contexts is None:
            others = sorted(of_file.get(path, ()))
            contexts = random.Random(line).sample(others, min(MOST_TESTS, len(others)))
        tests = quickest(filter(node_id, contexts), seconds)
        return place, bool(tests), not tests or survives(path, number, tests)

    tried, left = 0, []
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for turn in rounds(options):
            for (path, line, _), run, survived in threads.map(attempt, every[turn * AT_ONCE :][:AT_ONCE]):
                tried += 1
                if survived:
                    left.append(path)
                    before = (ROOT / path).read_text().splitlines()[line - 1].strip()
                    print(f"{path}:{line}{'' if run else ' (no fast test runs it)'}: {before}", flush=True)
    share = 1 - len(left) / tried
    print(f"mutants={tried} noticed={tried - len(left)} share={share:.2f} seed={options.seed}")
    return int(share < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
