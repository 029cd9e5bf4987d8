"""Figures and their bars: the bounds that they must meet."""

import sys

MISSED = []


def beside_bar(what: str, value: float, bound: float, *, least: bool = False) -> str:
    """A figure beside its bar, which is an upper bound, or with ``least`` a lower one."""
    met = value >= bound if least else value <= bound
    if not met:
        MISSED.append(what)
    return f"{what} {value:.3f} ({'at least' if least else 'at most'} {bound:g}){'' if met else ' MISSED'}"


def bar(what: str, value: float, bound: float, *, least: bool = False) -> None:
    """Print a figure beside its bar on a line of its own."""
    print(" ", beside_bar(what, value, bound, least=least))


def exit_if_missed() -> None:
    """Exit with 1 if a figure has missed its bar."""
    if MISSED:
        sys.exit(f"missed: {', '.join(MISSED)}")
