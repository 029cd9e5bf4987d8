"""All code that the documentation shows, in all ways to run it: the README in one script and each
tutorial, under fork, forkserver and spawn, and as notebooks.

    python tests/bench/documents.py
    python tests/bench/documents.py --ways spawn notebook --only 07 README

Prints a line for each; exit code 1 if one failed. It takes a quarter of an hour; the tests run what
differs most.
"""

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))

from documents import TUTORIALS, run_notebook, run_script, snippets, write_data
from nbclient.exceptions import CellExecutionError

WAYS = ("fork", "forkserver", "spawn", "notebook")


def failure(path, way):
    """Run one in one way: what went wrong, or nothing."""
    with tempfile.TemporaryDirectory() as directory:
        if way == "notebook":
            try:
                run_notebook(path)
            except CellExecutionError as error:
                return str(error)
            return ""
        if path.name == "README.py":
            write_data(pathlib.Path(directory))
        done = run_script(path, way, directory)
        return f"exit code {done.returncode}\n{done.stderr}" if done.returncode else ""


def main(ways, only):
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        readme = pathlib.Path(directory, "README.py")
        readme.write_text(snippets()[0])  # the others continue in the same session
        for path in [readme, *TUTORIALS]:
            for way in ways if not only or any(path.name.startswith(start) for start in only) else ():
                if path == readme and way == "notebook":
                    continue
                start = time.perf_counter()
                wrong = failure(path, way)
                failed += bool(wrong)
                print(
                    f"{path.stem:30} {way:12} {time.perf_counter() - start:5.0f} s  {'FAILED' if wrong else 'ok'}",
                    flush=True,
                )
                if wrong:
                    print(wrong)
    print(f"failed={failed}")
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="what they begin with, such as 07 or README"
    )
    options = parser.parse_args()
    sys.exit(main(options.ways, options.only))
