"""The picture of the demo: the losses of the three runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from wds_pipes.cli.demo.runs import Step


def draw_losses(path: Path, whole: Sequence[Step], killed: Sequence[Step], resumed: Sequence[Step]) -> Path | None:
    """Draw the losses of the three runs, with the crash and the resume.

    Returns:
        the path of the picture; None if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ModuleNotFoundError:
        return None
    crash, resume = killed[-1].step, resumed[0].step - 1
    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle("Killed in mid-epoch and resumed from the last checkpoint")
    everything, close = figure.subplots(1, 2, width_ratios=[2, 1])
    for axes, first, last, style in ((everything, 0, len(whole), "-"), (close, resume - 5, crash + 5, ".-")):
        for name, steps, look in (
            ("without interruption", whole, {"color": "0.8", "linewidth": 7}),
            ("until it was killed", killed, {"color": "tab:red", "linewidth": 3.5, "markersize": 16}),
            ("after it was resumed", resumed, {"color": "tab:blue", "linewidth": 1.5, "markersize": 8}),
        ):
            shown = [step for step in steps if first <= step.step <= last]
            axes.plot([step.step for step in shown], [step.loss for step in shown], style, label=name, **look)
        axes.axvline(
            resume, color="tab:blue", linestyle="--", linewidth=1, label=f"checkpoint of step {resume}: resumed here"
        )
        axes.axvline(crash, color="tab:red", linestyle="--", linewidth=1, label=f"killed (SIGKILL) after step {crash}")
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    ends = [step.step + 0.5 for step, after in pairwise(whole) if step.epoch != after.epoch]
    for place, end in enumerate(ends):
        everything.axvline(end, color="0.5", linestyle=":", linewidth=1, label=None if place else "end of an epoch")
    everything.set_ylabel("loss")
    everything.set_title("The whole training")
    everything.legend()
    close.set_title("Around the crash")
    figure.savefig(path, dpi=120)
    return path
