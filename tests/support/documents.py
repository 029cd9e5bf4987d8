"""The code of the documentation, and the ways in which users run it.

``python tests/support/documents.py NOTEBOOK...`` runs tutorials again, and stores what they print.
Jupyter is imported where it is needed, not by each process that collects tests.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import warm

from wds_pipes.tools.demo.trial import write_images

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.ipynb"))
PROGRAMS = sorted((ROOT / "tutorials").glob("*.py"))  # what tutorials run


def cells_of(path: Path, kind: str) -> list[str]:
    """The cells of a tutorial that are ``"code"``, or ``"markdown"``."""
    cells = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == kind]


def snippets() -> list[str]:
    """The README's code."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def write_data(directory: Path) -> None:
    """The data that the README's code reads: the shards of the demo."""
    (directory / "wds-pipes-demo").mkdir()
    write_images(directory / "wds-pipes-demo" / "shards", 3072)


def run_script(path: Path, start_method: str, directory: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script from a directory that is not its own; it and all processes that it starts use
    that start method. A forkserver imports torch once, and not each worker.
    """
    Path(directory, "sitecustomize.py").write_text(
        f"import multiprocessing\n\nmultiprocessing.set_start_method({start_method!r}, force=True)\n"
        "multiprocessing.set_forkserver_preload(['wds_pipes.datapipes', 'wds_pipes.loader.pipe_loader'])\n"
    )
    python_path = os.pathsep.join([directory, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory() as temporary:  # a short name: the sockets of workers are there
        environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": python_path, "MPLBACKEND": "Agg"}
        environment["PYTHONSAFEPATH"] = "1"
        return warm.run(path, *arguments, directory=directory, environment=environment)


class Notebooks:
    """Runs tutorials as notebooks, one after another in one kernel: so torch is imported once.

    For each, the names of the one before are deleted, and the environment, the directory and the
    logging are new.
    """

    def __init__(self) -> None:
        self.manager = None

    def run(self, path: Path):
        """Run a tutorial beside its programs; returns it with its outputs.

        A cell that fails raises CellExecutionError.
        """
        import nbformat
        from nbclient import NotebookClient
        from nbformat.v4 import new_code_cell

        notebook = nbformat.read(path, as_version=4)
        # Not in tmp_path, whose name is too long for the sockets of worker processes.
        with tempfile.TemporaryDirectory() as directory:
            for program in PROGRAMS:
                shutil.copy(program, directory)
            environment = {**os.environ, "TMPDIR": directory, "IPYTHONDIR": f"{directory}/ipython"}
            environment["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # pictures are outputs
            options = {"timeout": 300, "kernel_name": "python3", "record_timing": False, "coalesce_streams": True}
            client = NotebookClient(notebook, km=self.manager, **options)
            notebook.cells.insert(0, new_code_cell(START.format(directory=directory, environment=environment)))
            try:
                client.execute(env=environment, cleanup_kc=False)
                self.manager = client.km
            except Exception:
                self.manager = client.km
                self.close()  # it may still run the cell, which is not to fail the next tutorial
                raise
            finally:
                if client.kc:
                    client.kc.stop_channels()
        del notebook.cells[0]
        notebook.metadata.pop("language_info", None)  # the version of this Python
        for number, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
            cell.execution_count = number
            cell.outputs = [without_places(output, number) for output in cell.outputs]
        return notebook

    def close(self) -> None:
        """End the kernel."""
        if self.manager:
            from jupyter_core.utils import run_sync

            run_sync(self.manager.shutdown_kernel)(now=True)
            self.manager = None


START = """
import os, tempfile
os.chdir({directory!r})
%reset -f
import logging, os, tempfile
os.environ.clear()
os.environ.update({environment!r})
tempfile.tempdir = None
logging.root.handlers.clear()
logging.getLogger("wds_pipes").setLevel(logging.NOTSET)
del logging, os, tempfile
"""


def without_places(output, number):
    """An output of a cell without what only this machine and this run have: where the temporary
    directory, the checkout and the packages are, ports, places in memory and what the clock says.
    """
    import nbformat

    if output.output_type == "execute_result":
        output.execution_count = number
    text = json.dumps(output, ensure_ascii=False)
    for pattern, shown in PLACES.items():
        text = re.sub(pattern, shown, text)
    return nbformat.from_dict(json.loads(text))


PLACES = {
    rf"{re.escape(tempfile.gettempdir())}/tmp\w{{8}}(/tmp\w{{8}})?": "/tmp/tutorial",
    rf"{re.escape(str(ROOT))}/": "",
    r"(?<=[\"' ])/[^\"' ]*/site-packages/": "site-packages/",
    r"(?<=127\.0\.0\.1:)\d+": "8000",
    r"(?<=localhost:)\d+": "8000",
    r"(?<= at 0x)[0-9a-f]{6,}": "7f0000000000",
    r"\b20\d\d-\d\d-\d\d \d\d:\d\d:\d\d\b": "2026-01-01 12:00:00",
}


def store(paths: list[Path]) -> None:
    """Run tutorials, and write them with what they print."""
    import nbformat

    runner = Notebooks()
    for path in paths:
        notebook = runner.run(path)
        for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        nbformat.write(notebook, path)
    runner.close()


if __name__ == "__main__":
    store(list(map(Path, sys.argv[1:])))
