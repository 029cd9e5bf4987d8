"""Measures all rows, round by round, each measurement in a process of its own."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil

import wds_pipes
from peers.adapters.base import adapter_of, lacking
from peers.data import KINDS
from peers.rows import COLUMNS, STATE

TIMEOUT_SECONDS = 90.0  # of a measurement
LOOK_SECONDS = 0.25  # between two measurements of the memory, each of which takes some milliseconds
GRACE_SECONDS = 5.0  # for the end of a process that has written its result


def compare(rows, data, work, pythons, *, rounds, seconds=0.8):
    """Measure rows, which take turns, and return the results as ``report`` writes them.

    Args:
        rows: what to measure.
        data: the shards, which are made if they do not exist.
        work: a directory for converted data and results.
        pythons: the interpreters of rows, by their names; the others run in this environment.
        rounds: how often each measurement is made.
        seconds: how long a measurement of single samples takes.
    """
    here = machine()
    say("making the shards")
    data.make()
    link_packages(work)

    def measured(row, what, timeout_seconds=TIMEOUT_SECONDS):
        reason = lacking(adapter_of(row.adapter), what)
        if row.only and what != "prepare" and not what.startswith(row.only):
            reason = "as the row before"
        if reason:
            return {"reason": reason}
        job = {"adapter": row.adapter, "packages": row.packages, "measurement": what, "seconds": seconds}
        job |= {"data": asdict(data), "work": os.path.join(work, re.sub(r"\W", "-", row.name))}
        folder = os.path.join(work, "whole" if row.with_package else "bare")
        return run(job, work, folder, pythons.get(row.name, sys.executable), timeout_seconds)

    say("preparing the rows")
    results = {}
    for row in rows:
        say(f"  {row.name}")
        ready = measured(row, "prepare", timeout_seconds=600)
        saved = ready if "reason" in ready else measured(row, STATE)
        results[row.name] = {what: [ready] if "reason" in ready else [] for what in COLUMNS} | {STATE: [saved]}
        if "reason" in saved:
            results[row.name]["resume"] = [saved]
    for number in range(rounds):
        for what, title in COLUMNS.items():
            say(f"round {number + 1} of {rounds}: {title}")
            for row in rows[:: -1 if number % 2 else 1]:
                found = results[row.name][what]
                if not any("reason" in result for result in found):
                    found.append(measured(row, what))
    return {
        "format": 1,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": here,
        "version": importlib.metadata.version("wds_pipes"),
        "data": {kind: {"samples": data.count(kind), "bytes": data.bytes(kind)} for kind in KINDS},
        "plan": {"rounds": rounds, "seconds": seconds, "timeout_seconds": TIMEOUT_SECONDS},
        "rows": [
            {
                "name": row.name,
                "reads": row.reads,
                "versions": versions(results[row.name]),
                "cells": {what: cell(results[row.name][what]) for what in (*COLUMNS, STATE)},
            }
            for row in rows
        ],
    }


def say(line):
    print(line, flush=True)


def versions(results):
    """The versions of a row's libraries, as the first process with a result has seen them."""
    return next((one["versions"] for found in results.values() for one in found if "versions" in one), {})


def cell(results):
    """Make one cell of the results of all rounds."""
    for result in results:
        if "reason" in result:
            return {"reason": result["reason"]}
    values = [result["value"] for result in results]
    peak = int(statistics.median(result["peak_bytes"] for result in results))
    found = {"values": values, "median": statistics.median(values), "peak_bytes": peak or None}
    outcomes = [result["outcome"] for result in results if "outcome" in result]
    if outcomes:
        found["outcome"] = next((outcome for outcome in outcomes if outcome != "exact"), "exact")
    return found


def link_packages(work):
    """Make the folders of the packages that rows see. Those of other libraries do not see this
    package, which would register its steps.
    """
    peers, package = Path(__file__).parent.absolute(), Path(wds_pipes.__file__).parent
    for name, folders in (("bare", [peers]), ("whole", [peers, package])):
        os.mkdir(os.path.join(work, name))
        for folder in folders:
            os.symlink(folder, os.path.join(work, name, folder.name))


def run(job, work, folder, python, timeout_seconds):
    """Run a measurement with the packages of a folder; the result has ``value`` and ``peak_bytes``,
    or ``reason``.
    """
    result_path, log = Path(work, "result"), Path(work, "log")
    result_path.unlink(missing_ok=True)
    paths = [folder]
    if python == sys.executable and "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HF_"))}
    # Libraries leave caches and locks in their homes and in the directory for temporary files.
    own = {"TMPDIR": work, "HF_HOME": work, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment = {**kept, **own, "PYTHONPATH": os.pathsep.join(paths)}
    with open(log, "wb") as output:
        process = psutil.Popen(
            [python, "-m", "peers.measuring", json.dumps(job), result_path],
            env=environment,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        status, peak = watch(process, result_path, timeout_seconds)
    if result_path.exists():
        return {**json.loads(result_path.read_text()), "peak_bytes": peak}
    if status is None:
        return {"reason": f"no result after {timeout_seconds:g} s"}
    lines = log.read_text(errors="replace").strip().splitlines() or ["it wrote nothing"]
    return {"reason": f"ended with {status}: {lines[-1]}"[:300]}


def watch(process, result, timeout_seconds):
    """Wait for a process, and end all that it started.

    Returns:
        Its exit status, None if it was killed; and the peak memory of all its processes together in
        bytes, with shared pages divided among those that share them.
    """
    deadline, peak = time.monotonic() + timeout_seconds, 0
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if result.exists():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            peak = max(peak, sum(map(memory, session(process.pid))))
            with contextlib.suppress(psutil.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        return process.poll(), peak
    finally:
        for member in session(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


def session(leader):
    """Yield the processes of a session, also those whose parent has ended."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == leader:
                yield process


def memory(process):
    """The proportional memory of a process in bytes; 0 if it has ended."""
    with contextlib.suppress(psutil.Error):
        return getattr(process.memory_full_info(), "pss", 0)  # only Linux has it
    return 0


def machine():
    """What the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return {
        "processor": found[1] if found else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
