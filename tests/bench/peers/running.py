"""Measures all rows, round by round, each measurement in a process of its own."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import wds_pipes
from peers import processes
from peers.adapters.base import LACKING, Adapter, adapter_of
from peers.data import KINDS, Data
from peers.rows import MEASUREMENTS, QUICK, ROWS, STATE, Row


@dataclass(frozen=True)
class Environment:
    """Where a row runs.

    Args:
        python: the interpreter of its environment.
        reason: why there is none.
    """

    python: str = sys.executable
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """How long to measure.

    Args:
        rounds: how often each measurement is made; the rows take turns.
        seconds: how long a measurement of single samples takes.
        timeout_seconds: when a measurement is given up.
    """

    rounds: int = 3
    seconds: float = 0.8
    timeout_seconds: float = 90.0

    @classmethod
    def quick(cls) -> Plan:
        """One round, for a look at the form of the results."""
        return cls(rounds=1, seconds=0.05)


def chosen(names: Sequence[str], quick: bool) -> tuple[Row, ...]:
    """Return the rows with these names; without names all rows, or with ``quick`` those that every
    environment for development has.
    """
    if names:
        return tuple(row for row in ROWS if row.name in names)
    return QUICK if quick else ROWS


def compare(
    rows: Sequence[Row],
    data: Data,
    work: str,
    plan: Plan,
    *,
    environments: Mapping[str, Environment] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure rows and return the results as ``report`` writes them.

    Args:
        rows: what to measure.
        data: the shards, which are made if they do not exist.
        work: a directory for converted data.
        plan: how long to measure.
        environments: where rows run, by their names; the others run in this environment.
        report: is called with a line for each step.
    """
    here = machine()
    report("making the shards")
    data.make()
    with tempfile.TemporaryDirectory() as scratch:
        runner = _Runner(data, work, scratch, plan, environments or {})
        found: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in rows:
            ready = runner.measure(row, "prepare", timeout_seconds=600)
            report(f"{row.name}: {ready.get('reason', 'prepared')}")
            whole = [ready] if "reason" in ready else [runner.measure(row, STATE.name)]
            found[row.name, STATE.name] = whole
            for each in MEASUREMENTS:
                no_state = each.name == "resume" and "reason" in whole[0]
                found[row.name, each.name] = whole if "reason" in ready or no_state else []
        for number in range(plan.rounds):
            for each in MEASUREMENTS:
                report(f"round {number + 1} of {plan.rounds}: {each.title}")
                for row in rows[:: -1 if number % 2 else 1]:
                    results = found[row.name, each.name]
                    if not any("reason" in result for result in results):
                        results.append(runner.measure(row, each.name))
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": here,
        "version": importlib.metadata.version("wds_pipes"),
        "data": {kind: {"samples": data.count(kind), "bytes": data.bytes(kind)} for kind in KINDS},
        "plan": asdict(plan),
        "rows": [
            {
                "name": row.name,
                "reads": row.reads,
                "versions": runner.versions.get(row.name, {}),
                "cells": {each.name: _summed(found[row.name, each.name]) for each in (*MEASUREMENTS, STATE)},
            }
            for row in rows
        ],
    }


def _summed(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Make one cell of the results of all rounds."""
    failed = next((result for result in results if "reason" in result), None)
    if failed is not None:
        return {"reason": failed["reason"]}
    values = [result["value"] for result in results]
    peaks = [result["peak_bytes"] for result in results if result["peak_bytes"]]
    return {
        "values": values,
        "median": statistics.median(values),
        "peak_bytes": int(statistics.median(peaks)) if peaks else None,
        **({"outcome": outcomes} if (outcomes := _outcomes(results)) else {}),
    }


def _outcomes(results: Sequence[dict[str, Any]]) -> str:
    """Say how resumes came out: the worst of them, if not all were exact."""
    found = [result["outcome"] for result in results if "outcome" in result]
    return max(found, key=lambda outcome: (outcome != "exact", outcome), default="")


class _Runner:
    """Runs single measurements."""

    def __init__(
        self, data: Data, work: str, scratch: str, plan: Plan, environments: Mapping[str, Environment]
    ) -> None:
        self._data, self._work, self._scratch, self._plan = data, work, scratch, plan
        self._environments = environments
        self.versions: dict[str, dict[str, str]] = {}  # of the libraries of each row
        # Rows of other libraries do not see this package, which would register its steps.
        own = os.path.dirname(os.path.abspath(__file__))
        for name, folders in (("bare", [own]), ("whole", [own, os.path.dirname(wds_pipes.__file__)])):
            os.mkdir(os.path.join(scratch, name))
            for folder in folders:
                os.symlink(folder, os.path.join(scratch, name, os.path.basename(folder)))

    def measure(self, row: Row, what: str, timeout_seconds: float | None = None) -> dict[str, Any]:
        """Take one measurement; the result has ``value`` and ``peak_bytes``, or ``reason``."""
        if (reason := _known_reason(row, what)) is not None:
            return {"reason": reason} if reason else {"value": 0.0, "peak_bytes": None}
        place = self._environments.get(row.name, Environment())
        if place.reason:
            return {"reason": place.reason}
        job, result, log = (os.path.join(self._scratch, name) for name in ("job", "result", "log"))
        Path(result).unlink(missing_ok=True)
        work = os.path.join(self._work, "".join(letter if letter.isalnum() else "-" for letter in row.name))
        details = {
            "adapter": row.adapter,
            "packages": row.packages,
            "measurement": what,
            "data": asdict(self._data),
            "work": work,
            "seconds": self._plan.seconds,
        }
        Path(job).write_text(json.dumps(details))
        most = timeout_seconds or self._plan.timeout_seconds
        command = [place.python, "-m", "peers.measuring", job, result]
        with open(log, "wb") as output:
            status, peak = processes.run(
                command,
                env=self._variables(row, place),
                cwd=self._scratch,
                log=output,
                result=result,
                timeout_seconds=most,
            )
        if os.path.exists(result):
            found = json.loads(Path(result).read_text())
            self.versions.setdefault(row.name, found.pop("versions", {}))
            return {**found, "peak_bytes": peak}
        if status is None:
            return {"reason": f"no result after {most:g} s"}
        lines = Path(log).read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
        return {"reason": f"ended with {status}: {lines[-1]}"[:300]}

    def _variables(self, row: Row, place: Environment) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
        paths = [os.path.join(self._scratch, "whole" if row.with_package else "bare")]
        if place.python == sys.executable and "PYTHONPATH" in os.environ:
            paths.append(os.environ["PYTHONPATH"])
        path = os.pathsep.join(paths)
        # Libraries leave caches and locks in their homes and in the directory for temporary files.
        scratch = {"TMPDIR": self._scratch, "HF_HOME": self._scratch}
        return {**kept, **scratch, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}


def _known_reason(row: Row, what: str) -> str | None:
    """Say why a row has no figure where that is known without a process; None if it is not known,
    and nothing if there is nothing to do.
    """
    kind = adapter_of(row.adapter)
    if what == "prepare":
        return "" if kind.prepare is Adapter.prepare else None
    if row.only and not what.startswith(row.only):
        return "as the row before"
    if what == "decoded threads" and kind.no_threads:
        return kind.no_threads
    if what == "decoded workers" and kind.no_workers:
        return kind.no_workers
    name = "resumable" if what in ("save", "resume") else what.split(maxsplit=1)[0]
    return LACKING[name] if getattr(kind, name) is getattr(Adapter, name) else None


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"processor": name, "cores": cores, "python": platform.python_version(), "load_before": load}
