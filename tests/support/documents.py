"""The code of the documentation, and the ways in which users run it.

Jupyter is imported where it is needed, not by each process that collects tests.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import warm

from wds_pipes.tools.demo.trial import write_images

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "tutorials").glob("[0-9]*.py"))
PROGRAMS = [path for path in sorted((ROOT / "tutorials").glob("*.py")) if path not in TUTORIALS]  # what tutorials run


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

    For each, the names of the one before are deleted, and the environment and the directory are
    new.
    """

    def __init__(self) -> None:
        self.manager = None

    def run(self, path: Path):
        """Run a tutorial beside its programs; returns it with its outputs.

        A cell that fails raises CellExecutionError.
        """
        import jupytext
        from nbclient import NotebookClient
        from nbformat.v4 import new_code_cell

        notebook = jupytext.read(path)
        # Not in tmp_path, whose name is too long for the sockets of worker processes.
        with tempfile.TemporaryDirectory() as directory:
            for program in PROGRAMS:
                shutil.copy(program, directory)
            environment = {**os.environ, "TMPDIR": directory, "IPYTHONDIR": f"{directory}/ipython"}
            client = NotebookClient(notebook, timeout=300, kernel_name="python3", km=self.manager)
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
import os, tempfile
os.environ.clear()
os.environ.update({environment!r})
tempfile.tempdir = None
del os, tempfile
"""
