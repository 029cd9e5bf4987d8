"""Draw from several sources in exact proportions.

The order of draws is R. Tijdeman's ("The chairman assignment problem", Discrete Mathematics 32,
1980) in its earliest-deadline form. Let n sources have shares s_i that sum to 1, and phases e_i
that sum to 0 and are smaller than 1/m, where m = 2n - 2. After t draws, source i should have been
drawn y_i(t) = s_i * t + e_i times. Its draw number j is allowed when y_i >= j - 1 + 1/m, and is
overdue when y_i > j - 1/m. Of the draws that are allowed, the one with the earliest deadline is
taken.

This never fails. Consider the draws of source i that must lie between p and q: the last one has a
number below y_i(q) + 1/m, and the first one a number above y_i(p) + 1 - 1/m. For fewer than n
sources together these are less than (q - p) + 2 (n - 1) / m = (q - p) + 1 draws, so at most q - p.
For all n sources, the numbers of the last draws add up to less than q + n/m <= q + 1, so to at most
q; the same holds for the first draws. Hence there is room for all draws, and taking the earliest
deadline finds it. So the draws of a source never differ from y_i by more than 1 - 1/m, and always
differ by less than 1 from s_i * t.

With shares that change, y_i(t) adds up the shares of each draw, and deadlines are as if the shares
of now stayed. Then a draw that is overdue may wait for others, and the source that is allowed next
is drawn where none is allowed yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import fsum, gcd, inf, isfinite, lcm
from numbers import Integral, Rational, Real
from typing import TYPE_CHECKING, Any

from wds_pipes.core.order import bounds, hash_text
from wds_pipes.io.urls import redact

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SCHEDULE = "schedule"  # in a state, instead of the weight of a source
UNITS = 1 << 48  # the sum of the weights of a schedule; a state holds multiples of 1 / UNITS of a draw
TURNS = 4  # the salt of the order of draws
_PHASES = 1 << 16  # phases are multiples of 1 / (m * _PHASES)


def turns(weights: Sequence[int], hashes: Sequence[int], behind: Sequence[int]) -> Iterator[int]:
    """Yield the numbers of the sources to draw from, one after the other, without end: see the head
    of this module.

    Args:
        weights: one for each source, at least one above 0; the shares are these divided by their
            sum. A source with weight 0 is not drawn.
        hashes: one of 64 bits for each source: they decide the phases and the ties.
        behind: of each source, its share of the draws so far minus its draws, times the sum of the
            weights.
    """
    order = sorted(range(len(weights)), key=hashes.__getitem__)
    ahead = dict(zip(order, [*order[1:], *order[:1]], strict=True))
    phases = [hashes[source] % _PHASES - hashes[ahead[source]] % _PHASES for source in range(len(weights))]
    total, m = sum(weights), max(2, 2 * len(weights) - 2)
    # The next draw is allowed from the first t with (behind + weight * t) / total + phase / (m *
    # _PHASES) >= 1/m. All terms here are multiplied by m * _PHASES * total, so that they are
    # integers.
    rates = [m * _PHASES * weight for weight in weights]
    step = m * _PHASES * total
    may = [(_PHASES - phase) * total - m * _PHASES * late for late, phase in zip(behind, phases, strict=True)]
    late = (m - 2) * _PHASES * total  # from "may" (allowed) to the deadline
    first = [-(-start // rate) if rate else inf for start, rate in zip(may, rates, strict=True)]
    last = [(start + late) // rate + 1 if rate else inf for start, rate in zip(may, rates, strict=True)]
    turn = 0
    while True:
        turn += 1
        chosen, deadline = -1, inf
        for source in order:
            if last[source] < deadline and first[source] <= turn:
                chosen, deadline = source, last[source]
        if chosen < 0:  # only after a change of the weights, to which what came before did not lead
            chosen = min(order, key=first.__getitem__)
        yield chosen
        start = may[chosen] = may[chosen] + step
        rate = rates[chosen]
        first[chosen], last[chosen] = -(-start // rate), (start + late) // rate + 1


def how_far_behind(weights: Sequence[int], drawn: Sequence[int]) -> list[int]:
    """Return what ``turns`` takes as ``behind``, by how often each source was drawn."""
    total, turn = sum(weights), sum(drawn)
    return [weight * turn - total * count for weight, count in zip(weights, drawn, strict=True)]


def in_units(weights: Sequence[float]) -> list[int]:
    """Return weights, of which one is above 0, as ints with about the sum ``UNITS``."""
    total = fsum(weights)
    return [round(weight / total * UNITS) for weight in weights]


def scheduled_weights(schedule: Any, samples: int, names: list[str]) -> list[float]:
    """Return what a function of ``mix(schedule=...)`` says after a number of samples, as one weight
    for each name.

    Raises:
        TypeError, ValueError: it is no function, or returned something else.
    """
    if not callable(schedule):
        raise TypeError(f"schedule must be a function of a number of samples, not {schedule!r:.80}")
    found = schedule(samples)
    wanted = f"return a weight for each of {', '.join(map(repr, names))}, at least 0, and one above 0"
    if not isinstance(found, Mapping) or found.keys() != set(names):
        raise ValueError(f"schedule({samples}) of mix() returned {found!r:.200}: {wanted}")
    weights = [found[name] for name in names]
    if not all(isinstance(weight, Real) and 0 <= float(weight) < inf for weight in weights) or not any(weights):
        raise ValueError(f"schedule({samples}) of mix() returned {found!r:.200}: {wanted}")
    return [float(weight) for weight in weights]


def in_proportion(sources: Sequence[tuple[int, int]]) -> bool:
    """Return whether ``turns`` can have drawn so often; ``sources``: the weight of each, and how
    often it was drawn.
    """
    weights, drawn = [weight for weight, _ in sources], [count for _, count in sources]
    return all(abs(behind) < sum(weights) for behind in how_far_behind(weights, drawn))


def whole_weights(names: list[str], weights: Any) -> dict[str, int]:
    """Return the weights by name, as the smallest whole numbers with the same ratios."""
    if weights is None:
        weights = dict.fromkeys(names, 1)
    elif isinstance(weights, Sequence) and not isinstance(weights, str):
        if len(weights) != len(names):
            raise ValueError(f"mix() got {len(weights)} weights for {len(names)} sources")
        weights = dict(zip(names, weights, strict=True))
    elif not isinstance(weights, Mapping):
        raise TypeError(f"the weights of mix() must be a dict or a list, not {weights!r:.80}")
    for what, which in (
        ("no weight for", set(names) - set(weights)),
        ("a weight for an unknown source", set(weights) - set(names)),
    ):
        if which:
            raise ValueError(
                f"mix() got {what} {', '.join(sorted(map(repr, which)))}; its sources are {', '.join(map(repr, names))}"
            )
    return dict(zip(names, _whole([_fraction(repr(name), weights[name]) for name in names]), strict=True))


def weigh(
    weights: str | Sequence[float], each: Sequence[Sequence[str]]
) -> tuple[str, npt.NDArray[np.uint64]] | tuple[None, None]:
    """Return the weights of all shards of ``ShardList`` as a short text, and their ``bounds``;
    (None, None) if they are equal.

    Args:
        weights: one for each list of shards; or a text such as ``"1::3"``.
        each: these lists, of URLs.
    """
    given = [_number(weight) for weight in weights.split("::")] if isinstance(weights, str) else weights
    if not isinstance(given, Sequence):
        raise TypeError(f"weights must be a list, or a text such as '1::3', not {weights!r:.80}")
    if len(given) != len(each):
        raise ValueError(
            f"there are {len(given)} weights and {len(each)} URLs, in a list or joined by '::': give one for each"
        )
    names = [f"URL {redact(urls[0])!r}" if urls else "a list without a URL" for urls in each]
    whole = _whole([_fraction(name, weight) for name, weight in zip(names, given, strict=True)])
    of_shards = [weight for weight, urls in zip(whole, each, strict=True) for _ in urls]
    if len(set(of_shards)) == 1:
        return None, None
    text = ", ".join(f"{len(urls)} x {weight}" for weight, urls in zip(whole, each, strict=True))
    return text if len(text) <= 80 else f"{hash_text(text):016x}", bounds(of_shards)


def _number(text: str) -> Any:
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return text


def _whole(weights: list[Fraction]) -> list[int]:
    common = lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * common) for weight in weights]
    divisor = gcd(*whole)
    return [weight // divisor for weight in whole]


def _fraction(whose: str, weight: Any) -> Fraction:
    """Return a weight as the exact number that is meant: 0.1 as 1/10."""
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"the weight of {whose} must be a number, not {weight!r}")
    if not (isinstance(weight, Rational) or isfinite(weight)) or weight <= 0:
        raise ValueError(
            f"the weight of {whose} must be above 0 and finite, not {weight}: leave out what is not to be drawn"
        )
    if isinstance(weight, Integral):
        return Fraction(int(weight))
    return Fraction(weight) if isinstance(weight, Rational) else Fraction(repr(float(weight)))
