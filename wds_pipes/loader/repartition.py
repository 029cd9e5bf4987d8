"""The remainder of an epoch, divided over another number of lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wds_pipes.core.counts import COUNTED, public_counts, sum_counts
from wds_pipes.core.state import MOST_LANES, damaged
from wds_pipes.errors import StateError
from wds_pipes.loader.partition import Partition, Segment

if TYPE_CHECKING:
    from wds_pipes.loader.segments import Segments


def repartition(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> Partition:
    """Repartition the rest of an epoch.

    Args:
        old: the partition until now.
        lanes: the new number of lanes.
        states: of all the lanes of ``old``: ``position`` (as ``dump`` wrote it; None: not begun),
            ``ended`` and ``counts``.
        stage: the stage that runs the segments of a lane.
        epoch: the epoch.

    Returns:
        the new partition.
    """
    source, depth, uncounted = stage.root, stage.depth, stage.uncounted
    if not source.divides_shards:
        return _hand_on(old, lanes, states, stage)
    shares, remainders, opened = old.shares(source, stage.seed, epoch), [], []
    counts = sum_counts((old.counts, *(states[number]["counts"] for number in range(old.lanes))))
    whole = any(step.whole_lanes for step in stage.chain)  # each lane counts as having opened its whole share
    for number in range(old.lanes):
        state = states[number]
        share, position = shares[number], state["position"]
        segments = old.segments(number, source)
        handed = segments[:-1]  # the segments that are not divided
        if whole and share:
            handed.append(replace(segments[-1], stop=len(share)))
        at = {} if position is None else position[depth]
        place, given = at.get("segment", 0), at.get("opened", 0)
        if (place == len(segments) - 1 and given > len(share)) or (place > len(segments) and not at.get("padded")):
            raise damaged(f"lane {number} has opened {given} shards of segment {place}")
        if state["ended"] or place >= len(segments):
            opened.append(len(share))
        elif position is None:
            opened.append(len(share) if whole else 0)
            remainders += handed
        else:
            last = place == len(segments) - 1
            opened.append(len(share) if whole else given if last else 0)
            remainder = _remainder(segments[place], uncounted(position[:depth]), opened[-1] if last else None)
            if remainder is not None:
                if old.sizes is not None:
                    later = [
                        *(segment.samples or 0 for segment in handed[place + 1 :]),
                        *(stop - start for _, start, stop in share[opened[-1] :]),
                    ]
                    done = sum(state["counts"].get(name, 0) for name in COUNTED)
                    remainder = replace(remainder, samples=max(0, old.samples()[number] - done - sum(later)))  # type: ignore[index]
                remainders.append(remainder)
            remainders += handed[place + 1 :]
    # If nothing of this partition was opened, the next one takes its place.
    untouched = bool(old.history) and not any(opened)
    history = old.history if untouched else (*old.history, (old.sizes, tuple(opened)))
    if old.sizes is None:
        return Partition(lanes, None, history, tuple(remainders), counts)
    rest = sum(stop - start for share, count in zip(shares, opened, strict=True) for _, start, stop in share[count:])
    ordered = sorted(remainders, key=lambda remainder: -(remainder.samples or 0))
    loads = [sum(remainder.samples or 0 for remainder in ordered[lane::lanes]) for lane in range(lanes)]
    return Partition(lanes, tuple(_level(loads, rest)), history, tuple(ordered), counts)


def repartition_loop(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> tuple[int, Partition]:
    """Repartition the rest of all epochs that lanes have begun, with ``epoch_end="loop"``.

    Args:
        old: the partition until now.
        lanes: the new number of lanes.
        states: as in ``repartition``; the lanes may be in different epochs.
        stage: the stage that runs the segments of a lane.
        epoch: the epoch of ``old``.

    Returns:
        the first epoch of which something is left, and its partition with those of the later ones.
        Each sample that is left of these epochs comes once, before a lane begins the next epoch.
    """
    ahead = {
        number: 0 if state["position"] is None else state["position"][stage.depth].get("epoch", 0)
        for number, state in states.items()
    }
    first, last = min(ahead.values()), max(len(old.later), *ahead.values())
    spread, whole = last - first, old.of_epoch(len(old.later) + 1, stage.root, epoch).samples()
    partitions: list[Partition] = []
    if spread * lanes <= MOST_LANES:
        known = [one.samples() for one in (old, *old.later)]
        for place in range(first, last + 1):
            entries = {}
            for number, state in states.items():
                done = 0
                if whole is not None:  # in the epochs of the lane before this one
                    done = sum(samples[number] for samples in known[:place] if samples)
                    done += max(0, place - len(known)) * whole[number]
                entries[number] = _in_epoch(state, ahead[number] - place, done)
            one = old.of_epoch(place, stage.root, epoch + place)
            partitions.append(_of_epoch(one, lanes, entries, stage, epoch + place))
    if not partitions or (spread and sum(one.lanes_so_far for one in partitions) > MOST_LANES):
        raise StateError(
            f"the lanes of this state are {spread} epochs of the data apart, too many to divide them anew: load it "
            f"with lanes={old.lanes}. Lanes stay together with ShardList(shuffle=True), or if samples are counted."
        )
    counts = sum_counts((old.counts, *(public_counts(state["counts"]) for state in states.values())))
    return epoch + first, replace(partitions[0], later=tuple(partitions[1:]), counts=counts)


def _in_epoch(state: dict[str, Any], ahead: int, done: int) -> dict[str, Any]:
    """Return the state of a lane in an epoch, if the lane stands ``ahead`` epochs after it.

    Its counts, which are of all its epochs, become those of this one: without the ``done`` samples
    of earlier ones.
    """
    position, ended = (None, ahead > 0) if ahead else (state["position"], state["ended"])
    counts = sum(state["counts"].get(name, 0) for name in COUNTED)
    return {**state, "position": position, "ended": ended, "counts": {"delivered": max(0, counts - done)}}


def _of_epoch(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> Partition:
    """Repartition one of several epochs, without counts; from the beginning if no lane has begun
    it.
    """
    if not old.history and all(state["position"] is None and not state["ended"] for state in states.values()):
        return Partition.first(lanes, stage.root, epoch)
    return replace(repartition(old, lanes, states, stage, epoch), counts={}, later=())


def _level(loads: list[int], rest: int) -> list[int]:
    """Divide ``rest`` samples over lanes that have ``loads`` samples already, so that the sums are
    as equal as possible.
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for count in range(len(order), 0, -1):
        low = order[:count]
        total = rest + sum(loads[lane] for lane in low)
        if total // count >= loads[low[-1]]:
            goals = {lane: total // count + (place < total % count) for place, lane in enumerate(sorted(low))}
            return [goals.get(lane, load) - load for lane, load in enumerate(loads)]
    raise AssertionError("the lowest lane can always be filled")


def _hand_on(old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any]) -> Partition:
    """Repartition the rest of an epoch of a mix: each lane continues as a whole.

    The old lanes go to the new lanes in turn, as remainders. They are not divided, since the
    proportions hold within each lane.
    """
    depth, remainders = stage.depth, []
    counts = sum_counts((old.counts, *(states[number]["counts"] for number in range(old.lanes))))
    for number in range(old.lanes):
        state = states[number]
        if state["ended"]:
            continue
        position, segments = state["position"], old.segments(number, stage.root)
        if position is not None:
            first = position[depth].get("segment", 0)
            segments = segments[first:]
            segments[:1] = [replace(segment, position=stage.uncounted(position[:depth])) for segment in segments[:1]]
        remainders += segments
    return Partition(lanes, None, (*old.history, (None, (0,) * old.lanes)), tuple(remainders), counts)


def _remainder(segment: Segment, position: list[dict[str, Any]], opened: int | None) -> Segment | None:
    """Return the remainder of a segment; None if it is finished.

    Args:
        segment: the segment.
        position: its position, without counts, where the remainder begins.
        opened: how many of its ranges were opened, up to which the remainder goes; None: all.
    """
    start, stop = segment.start + position[0].pop("next", 0), segment.stop if opened is None else segment.start + opened
    if stop is not None and start > stop:
        raise damaged(f"lane {segment.number} has finished {start} shards, and opened {stop}")
    return None if stop is not None and start >= stop else replace(segment, start=start, stop=stop, position=position)
