"""PipeLoader: batches from worker processes and ranks, with a state that fits any number of both.

Rules:
1. The main process is the only truth: which epoch, which lane stands where. Workers only host lanes: each command that they get names the lane, and the
   first one of a lane brings where it begins.
2. DataLoader gives command t to worker t mod n. A lane stays with one worker: where the next lane is not of the worker whose turn it is, the command is empty.
3. Batches come in the order of (number of the batch in its lane, lane), whoever hosts the lanes.
4. A batch carries its lane's position; the position counts from the moment that the batch is handed to the caller. All that is in flight does not count.
5. One batch is fetched ahead of the one that is handed out, so that the state which comes with the last batch says that the epoch is over.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wds_pipes.codecs import library
from wds_pipes.core.hosts import stage_of
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import State
from wds_pipes.core.state import MOST, STATE_VERSION
from wds_pipes.core.suggest import checks_options
from wds_pipes.core.tracebacks import shortened
from wds_pipes.display import graph
from wds_pipes.loader.iterator import LoaderIterator
from wds_pipes.loader.plan import Plan
from wds_pipes.loader.progress import Progress
from wds_pipes.loader.protocol import total_counts, unpack
from wds_pipes.loader.ranks import Rank
from wds_pipes.loader.workers import Workers
from wds_pipes.stages import BatchSamples

if TYPE_CHECKING:
    from torch.utils.data import IterDataPipe


class PipeLoader:
    """Batches of a pipeline from worker processes, with an exact state for any number of workers and ranks.

    An epoch is dealt into lanes: by default as many as ranks x workers at the first start; the number then travels in the state. Ranks and workers only host
    lanes, a batch of each in turn. So with the same lanes the batches of a rank are the same whatever its number of workers, 0 included, and the lanes are the
    same on any number of ranks that divides theirs. On other numbers, what is left of the epoch is dealt again: each remaining sample exactly once, in
    another order. A lane then keeps the shards that it has open, so lanes may be unequal, and ``epoch_end="drop"`` may drop much of what was left; a warning
    says how much. ``lanes=`` with a multiple of every ranks x workers that will be used prevents it.

    Each ``iter(loader)`` is the next epoch (also after breaking out of a loop); a loaded state continues its own. ``iter()`` does nothing until the first
    ``next()``. A state taken with the last batch in hand means the beginning of the next epoch.

    Args:
        pipe: a pipeline that starts with ``ShardList``; torch's ``.map``, ``.filter``, ``.batch`` and ``.collate`` may be in it.
        batch_size: samples in a batch, stacked as ``batch_samples`` does; None: the items of the pipe are the batches.
        num_workers: worker processes; 0: everything in this process.
        lanes: into how many lanes to deal; a multiple of the number of ranks. There should be at least as many shards as lanes, unless
            ``ShardList(samples_per_shard=...)`` says how many samples there are: then lanes are equal to one sample.
        epoch_end: ``"drop"``: every rank gives the same number of batches, all full; what is left over is counted as dropped. ``"pad"``: the same number, and
            samples are repeated to fill the last ones; each sample has a field ``"__padding__"`` that says whether it is a repeat, and they are counted.
            ``"exact"``: each sample once, so that ranks may differ by a few batches. None: ``"exact"`` for one rank, ``"drop"`` for several. The first two need
            ``samples_per_shard``, and no steps that change the number of samples.
        drop_last: with ``batch_size``, leave out the last batch of each lane if it is smaller.
        collate: with ``batch_size``, as in ``batch_samples``.
        prefetch_factor: batches that each worker reads ahead.
        pin_memory: copy tensors into pinned memory; needs an accelerator.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None: Python's default.
        persistent_workers: keep the workers from one epoch to the next.
        rank: the data-parallel rank of this process, with ``world_size``; None: by torch.distributed if it is initialised when the loader is first used,
            else by RANK and WORLD_SIZE, else the only one.
        world_size: the number of data-parallel ranks.
        progress: show a progress bar; needs tqdm.
        timeout_seconds: how long to wait for a worker's batch before an error; 0: for ever.

    Raises:
        TypeError, ValueError: when built: the pipeline does not start with ``ShardList``, or an argument does not fit.
        StateError: when built: a pipe of torch's in the pipeline has a state that cannot be known.
        ShardError, SampleError: from the iteration, also out of a worker, with its url, key and offset. A step's ``max_errors`` bounds what it skips in an
            epoch in all lanes of this rank together: the error comes in place of the first batch by which there are more, on a resume too. Each rank counts
            by itself; when an epoch is dealt again, each has an equal share of what was skipped before.
        WorkerError: from the iteration: a worker process died, gave no batch for ``timeout_seconds``, or cannot pickle a batch. The state is still good.
    """

    @shortened
    @checks_options
    def __init__(
        self,
        pipe: IterDataPipe[Any],
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        lanes: int | None = None,
        epoch_end: str | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | str | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        progress: bool = False,
        timeout_seconds: float = 0,
    ) -> None:
        stage = stage_of(pipe, "PipeLoader()")
        options = {name: value for name, value in locals().items() if name not in ("self", "pipe", "stage")}
        call = graph.Call.of("PipeLoader", inspect.signature(PipeLoader), options)
        self._text = str(call._replace(arguments=(graph.to_text(pipe), *call.arguments)))
        stage.check_resumable()
        if batch_size is not None:
            if stage.batches is not None:
                message = f"the pipe gives batches of {stage.batches} already, and batch_size={batch_size} makes batches of these: leave one of the two out."
                warnings.warn(f"{message} If it is meant, write the second one as .batch_samples({batch_size}), too.", stacklevel=4)
            stage = BatchSamples(stage, check_count("batch_size", batch_size), drop_last=drop_last, collate=collate)
        elif drop_last or collate is not None:
            raise ValueError("drop_last and collate go with batch_size; without it the items of the pipe are the batches")
        plan = Plan(stage, epoch_end=epoch_end, lanes=lanes, num_workers=num_workers, rank=(rank, world_size))
        check_count("prefetch_factor", prefetch_factor)
        workers = Workers(
            plan.stage,
            num_workers,
            persistent=bool(persistent_workers),
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            timeout=timeout_seconds,
        )
        self._plan, self._progress = plan, Progress(plan, workers)
        self._tqdm = library("tqdm", "tqdm", "progress=True").tqdm if progress else None

    @property
    def rank(self) -> Rank:
        """The data-parallel rank, found at the first use; with it is settled how an epoch ends."""
        return self._plan.rank

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self._progress, None if self._tqdm is None else self._bar)

    def _bar(self, initial: int) -> Any:
        """A progress bar."""
        assert self._tqdm is not None
        return self._tqdm(initial=initial, total=None if self._length_unknown else len(self), unit="batch")

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be ``epoch``, from its beginning; a loaded state of that same epoch still continues where it was."""
        check_count("epoch", epoch, least=0, most=MOST)
        self._progress.set_epoch(epoch)

    def with_epoch(self, *, samples: int | None = None, batches: int | None = None) -> PipeLoader:
        """Let each ``iter()`` give so many batches of all ranks together, and the next one go on where it was cut; gives the loader itself.

        The order within is still that of the epochs of the data, which follow each other without a break.

        With ``epoch_end="exact"`` and no ``drop_last``, the last batch of a lane may be smaller. With ``samples`` the pass then ends with the batch that makes
        the number full: it has at least so many samples, and less than a batch more, and ``len()`` is not known. With ``batches`` a small batch counts as one.
        Everywhere else all batches are whole, and a pass has exactly so many.

        Args:
            samples: of all ranks together; a multiple of ranks x batch size.
            batches: of all ranks together; a multiple of the ranks.

        Raises:
            ValueError: not one of the two is given, or it cannot be divided so, or ranks may end an epoch of the data at different times.
        """
        if (samples is None) == (batches is None):
            raise ValueError("with_epoch() takes samples= or batches=, one of them")
        plan = self._plan
        ranks, size = self.rank.of, 1 if samples is None else plan.batch_size
        count = check_count("samples" if batches is None else "batches", samples if batches is None else batches)
        if count % (ranks * size):
            each = f"{ranks} ranks{f' x {size} samples in a batch' if size > 1 else ''}"
            raise ValueError(f"{'batches' if samples is None else 'samples'}={count} cannot be divided by {each}: pass a multiple of {ranks * size}")
        if ranks > 1 and plan.mode == "exact":
            raise ValueError("with several ranks, with_epoch() needs epoch_end='drop' or 'pad', so that all ranks go on to the next epoch of the data together")
        in_samples = samples is not None and plan.mode == "exact" and any(step.batches_of(1) for step in plan.batching if step.items_per_batch != 1)
        self._progress.cut_after(count if in_samples else count // (ranks * size), in_samples=in_samples)
        return self

    def __repr__(self) -> str:
        return self._text

    def __copy__(self) -> PipeLoader:
        return copy.deepcopy(self)

    def state_dict(self) -> State:
        """The positions of this rank's lanes behind the batch that was handed out last, as a dict of plain JSON types, new at each call.

        It is right at any time: before the first batch, after the last, after an exception, in a signal handler, from another thread.
        """
        at, plan = self._progress.position, self._plan
        recipe = plan.recipe
        lanes = {str(number): unpack(lane) for number, lane in at.lanes.items()}
        state = {
            "version": STATE_VERSION,
            "epoch": at.epoch,
            "seed": recipe.seed,
            "shards": recipe.shards,
            "fingerprint": recipe.fingerprint,
            **recipe.of_data,
            "graph": list(recipe.graph),
            "lane_count": at.deal.lanes,
            "rank": self.rank.number,
            "world_size": self.rank.of,
            "step": at.step,
            "epoch_end": plan.mode,
            "batch_size": plan.batch_size,
            "lanes": lanes,
            "counts": total_counts(lanes.values(), at.deal.counts if self.rank.number == 0 else {}),
        }
        if recipe.samples is not None:
            state["samples"] = recipe.samples
        if self._progress.cut is not None:
            state["given"] = at.given
        if self._progress.cut_in_samples:
            state["given_samples"] = at.samples
        if at.deal.history:
            state["deal"] = at.deal.as_json()
        return state

    @shortened
    def load_state_dict(self, state: State | list[State], *, moved: bool = False) -> None:
        """Let the next ``iter()`` continue from a state: of this rank of as many ranks, or of all ranks (``merge_states``) for any number of them.

        A list of the states of all ranks is merged. If ranks were in different epochs, which ``epoch_end="exact"`` allows, as many ranks continue each from
        its own; other numbers of ranks cannot.

        Args:
            state: what ``state_dict`` returned, a list of such, or what ``merge_states`` made of them.
            moved: the shards are those of the state, whatever their names and the index say: see ``WdsPipe.load_state_dict``.

        Raises:
            StateError: it was made by another pipeline, or it is the state of one rank of another number; the message says what to do.
        """
        self._progress.go_to(self._plan.restore(state, moved=moved))

    def counts(self) -> dict[str, int]:
        """This rank's samples of the current epoch, or the one that just ended, by what became of them; see ``Stream.counts``."""
        return self._plan.counts(self._progress.at or self._progress.position)

    def stats(self) -> dict[str, float]:
        """How the current pass over the data goes, or the last one, as flat numbers for a logger.

        ``samples`` and ``batches`` of this rank in this pass, both and ``bytes`` (of the decompressed tars) also ``_per_second`` since its first ``next()``;
        ``wait_seconds`` that the caller waited for batches, and their share of the time. Of the time in which workers made batches, ``read_share`` was spent in
        reading (up to and with ``group_by_key``) and ``decode_share`` in the steps after it; ``stall_share``, a part of ``read_share``, in waiting for bytes of
        a store. Waiting is measured each time, the rest of reading at a part of the samples. ``held_samples`` in shuffle buffers; of the network ``requests``,
        ``retries``, ``bytes_fetched`` and ``stall_seconds`` that workers waited for bytes; ``epoch``, ``filtered``, ``skipped``, and ``lane_imbalance``, by
        how many batches the first lane is ahead of the last.
        """
        progress = self._progress
        live, counts = progress.tally, self.counts()  # the pass speaks for itself: a state may have been loaded since
        found = {"epoch": float(progress.position.epoch), "filtered": float(counts["filtered"]), "skipped": float(counts["skipped"])}
        if live is None:
            return found
        seconds, total, network = live.seconds, live.total, live.used()
        at, before = live.stands or (progress.at or progress.position, None)
        delivered = [lane["delivered"] for lane in at.states.values()]
        samples = 0 if before is None else self._plan.counts(at)["delivered"] - before
        return found | {
            "batches": float(live.batches),
            "samples": float(samples),
            "batches_per_second": live.batches / seconds,
            "samples_per_second": samples / seconds,
            "bytes_per_second": total.bytes_read / seconds,
            "wait_seconds": live.waited,
            "wait_share": live.waited / seconds,
            "read_share": total.reading / total.busy if total.busy else 0.0,
            "decode_share": 1 - total.reading / total.busy if total.busy else 0.0,
            "stall_share": min(network.stall_seconds, total.reading) / total.busy if total.busy else 0.0,
            **{name: float(value) for name, value in network._asdict().items()},
            "held_samples": float(total.held),
            "lane_imbalance": float(max(delivered) - min(delivered)),
        }

    def remaining(self) -> int | None:
        """How many batches the next pass gives to this rank, from a loaded state on too; None: that is not known."""
        progress = self._progress
        if progress.cut is not None:
            return None if progress.cut_in_samples else progress.cut - progress.position.given
        return self._plan.left(progress.position)

    def close(self) -> None:
        """Stop the workers and close what is open; the state stays, and a further ``iter()`` starts new workers."""
        self._progress.close("it was closed")

    def __len__(self) -> int:
        """How many batches of an epoch this rank gives; TypeError if the samples are not counted."""
        progress = self._progress
        if progress.cut is not None and not progress.cut_in_samples:
            return progress.cut
        if unknown := self._length_unknown:
            raise TypeError(f"the number of batches is not known: {unknown}")
        return progress.length()

    @property
    def _length_unknown(self) -> str | None:
        """Why there is no ``len()``, with the mend; None if there is."""
        progress = self._progress
        if progress.cut_in_samples:
            return "with_epoch(samples=...) counts samples, and the last batch of a lane may be smaller: pass batches=, or drop_last=True"
        return None if progress.cut is not None else self._plan.uncounted


def progress_of(loader: PipeLoader) -> Progress:
    """What a loader and its iterators share: for the modules of this package that stand on it."""
    return loader._progress
