"""PipeLoader: batches from worker processes and ranks, with a state that fits any number of both.

Rules:
1. Only the main process knows the epoch and the position of each lane. Workers run lanes. A command
   to a worker names a lane. The first such command of a worker in a run also carries the positions
   at which its lanes begin.
2. A lane stays with one worker. Batches come in the order of (number of the batch in its lane,
   lane), whichever worker runs the lanes.
3. A batch carries its lane's position. The loader adopts this position when it returns the batch
   to the caller. Batches in flight do not count.
4. The loader fetches one batch ahead of the one that it returns. So the state that is taken with
   the last batch already says that the epoch is over.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import in_state
from wds_pipes.core.hosts import stage_of
from wds_pipes.core.importing import library
from wds_pipes.core.options import check_count, check_seconds, checks_options
from wds_pipes.core.stage import State, functional_name
from wds_pipes.core.state import MOST, not_for_dcp
from wds_pipes.display import graph
from wds_pipes.loader.in_trainers import loader_of_accelerate, no_dataset, register_for_lightning
from wds_pipes.loader.iterator import Joining, LoaderIterator, Progress
from wds_pipes.loader.ledger_file import LedgerFile, check_path
from wds_pipes.loader.lengths import in_batches, uneven
from wds_pipes.loader.lookup import Lookup, PlannedSample, PlannedVisit
from wds_pipes.loader.meetings import TIMEOUT_SECONDS
from wds_pipes.loader.plan import Plan
from wds_pipes.loader.ranks import Rank, of_all_ranks
from wds_pipes.loader.restoring import Editable, find_continuation
from wds_pipes.loader.workers import Workers
from wds_pipes.stages.edits import Edits

if TYPE_CHECKING:
    from torch.utils.data.datapipes.datapipe import IterDataPipe


class PipeLoader:
    """Batches of a pipeline from workers, with a state for any number of workers and ranks.

    An epoch is partitioned into lanes. By default there are ranks x workers lanes at the first
    start; later, their number comes from the state. Ranks and workers only run the lanes, one batch
    of each lane in turn. So, with the same lanes, the batches of a rank do not depend on its number
    of workers (0 included). The lanes stay the same on any number of ranks that divides their
    number: then the same batches come in the same global order. Otherwise the rest of the epoch is
    repartitioned: each remaining sample comes exactly once, in another order. Either way
    ``epoch_end="drop"`` drops less than one batch of all ranks together in an epoch. Only the lanes
    of a ``mix()``, and of a pipe with a step that needs whole lanes, may become unequal in a
    repartition, so that many of the remaining samples may be dropped; a warning in the log says how
    many. To keep the order, too, pass ``lanes="elastic"``, or a common multiple of all values of
    ranks x workers that will be used.

    Where torch.distributed is initialised, the ranks compare at the first ``next()`` what they
    begin: the shards, the steps, the seed, the epoch, the length of ``with_epoch()``. If they
    differ, all raise StateError. With several loaders, all ranks begin them in the same order,
    since each waits for the others there.

    A ``SampleList`` has one global order: step t of an epoch yields its places t * G to (t + 1) *
    G, with G = ranks x batch size, on any ranks and workers with this G; with another G, the epoch
    continues at the same sample. Steps that change the number or order of the samples (the log
    names the first), ``epoch_end="loop"`` and ``mix_lanes`` need lanes.

    Each ``iter(loader)`` is the next epoch, also after a ``break`` out of a loop (with
    ``epoch_end="loop"`` it continues the stream); after a state was loaded, the next
    ``iter(loader)`` continues the epoch of the state. ``iter()`` does nothing until the first
    ``next()``. A state that is taken after the last batch of an epoch stands at the
    beginning of the next epoch. A loader counts epochs by itself: those of ``iter(pipe)``, and
    ``set_epoch()`` and states of the pipe, do not matter. So a loop over ``EPOCHS`` epochs, which
    goes on where a run was killed, needs no other number than ``epoch``, that of the next batch.
    (With ``with_epoch()``, it counts its steps instead: ``epoch`` is that of the data.) ::

        loader.load_state_dict(saved)  # if there is one
        while loader.epoch < EPOCHS:
            for batch in loader:
                train(batch)
                save(loader.state_dict())  # as often as you like

    Args:
        pipe: a pipeline that starts with ``ShardList`` or ``SampleList``; it may contain torch's
            ``.map``, ``.filter``, ``.batch`` and ``.collate``.
        batch_size: samples in a batch, stacked as ``batch_samples`` does; None: the items of the
            pipe are the batches.
        num_workers: worker processes; 0: everything runs in this process.
        lanes: the number of lanes of an epoch, a multiple of the number of ranks. There should be
            at least as many shards as lanes, unless the samples are counted
            (``ShardList(index=...)`` or ``samples_per_shard=``): then the sizes of lanes differ
            by at most one sample, or one batch with ``"drop"`` and ``"pad"``. ``"elastic"``: at the
            first start the least common multiple of 24 and ranks x workers, so that 1, 2, 3, 4, 6,
            8, 12 or 24 ranks, with any workers, go on in the same global order. Each lane has its
            own buffers: pass ``shuffle_buffer`` a size that is as many times smaller as there are
            more lanes. With ``mix_lanes=2``, ranks that divide 12 do.
        mix_lanes: from how many lanes each batch takes its samples, an equal part from each. By
            default a batch is of one lane, and so of the few shards that this lane has open.
            ``batch_size`` must be a multiple of it, and ``lanes`` a multiple of it times the ranks.
            The parts are joined in this process, column by column. A function for ``collate`` is
            called in this process, too.
        epoch_end: how an epoch ends. ``"drop"``: every rank yields the same number of batches, all
            of them full; the samples that are left over are counted as dropped: less than one batch
            of all ranks together. ``"pad"``: every rank yields the same number of batches, and
            samples are repeated to fill the last ones. Each sample then has a field
            ``"__padding__"``, which says whether it is a repeat, and the repeats are counted.
            ``"exact"``: each sample comes once, so ranks may differ by a
            few batches. ``"loop"``: each lane goes on to its next epoch of the data by itself,
            without end, and ``with_epoch()`` cuts this stream, so every rank yields the same
            number of batches, all of them full, whatever the steps filter, skip or mix, and
            whether samples are counted or not. Lanes with fewer samples are then in later epochs
            than others; of each epoch each sample comes once, also if the number of ranks or
            workers changes. None: ``"exact"`` for one rank, ``"drop"`` for several. ``"drop"``
            and ``"pad"`` need counted samples (see ``lanes``), and a pipeline without steps that
            change the number of samples.
        drop_last: with ``batch_size``, leave out the last batch of each lane if it is smaller, and
            with ``mix_lanes`` the last batch of an epoch if parts are missing.
        collate: with ``batch_size``, as in ``batch_samples``.
        prefetch_factor: how many batches each worker reads ahead; None: 2.
        pin_memory: copy tensors into pinned memory, where the loader is iterated; needs an
            accelerator.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None: Python's
            default.
        persistent_workers: keep the workers from one epoch to the next.
        worker_init_fn: called with the number of the worker, 0 to ``num_workers - 1``, in each
            worker process when it starts; workers that are not forked get it by pickling.
        rank: the data-parallel rank of this process, together with ``world_size``. None: the rank
            in torch.distributed if that is initialised when the loader is first used, else the
            environment variables RANK and WORLD_SIZE, else rank 0 of 1.
        world_size: the number of data-parallel ranks.
        on_device: a function that is called with each batch in this process, and returns what the
            loader yields: ``DecodeOnDevice``, or one that moves tensors to a GPU. If it raises, the
            state is that before the batch.
        progress: show a progress bar; needs tqdm.
        timeout_seconds: how long to wait for a batch of a worker before an error; 0: for ever.
        ledger: keep a digest of which samples were returned, in states under ``"ledger"``: of this
            epoch and of the epochs before, 128 bits each. It does not depend on ranks, workers,
            lanes or the order: that of all ranks together is the sum (``merge_states``). So
            ``wds-pipes state diff --ledger`` says whether two runs had the same data, and
            ``wds-pipes state prove`` computes it again from the shards. A sample is its key and the
            number of its shard in the list, as the samples are after the last step that holds some,
            such as ``shuffle_buffer``, and the steps of this package after it that keep both; what
            later steps leave out belongs to it. There they must be dicts with both, else this is an
            error. Of ``pack_samples`` and ``bucket_samples``, if one is the last step that holds
            samples, a document that ``"wrap"`` cuts belongs to the pack in which it ends.
            It takes one to two microseconds for a sample: a tenth to a fifth of the time of tiny
            raw samples, and nothing that can be measured beside decoding. A path: also append 40
            bytes to this local file after each step, with which ``wds-pipes state diff --ledger``
            finds the first step that differs. Of several ranks, each writes
            ``PATH.rank-0000-of-0008`` and so on.

    Raises:
        TypeError, ValueError: when built: the pipeline has another source, or an argument does not
            fit.
        StateError: when built: the state of one of torch's pipes in the pipeline cannot be known.
            When a state is requested, or an epoch goes on from one: that of ``then`` is not known.
            At the first ``next()`` of an iteration, on all ranks: the ranks of torch.distributed
            have other shards, steps, options or epochs, so that samples would be lost or repeated.
            A rank waits for the others for at most a minute, and then goes on with a warning.
        ShardError, SampleError: during the iteration, also from a worker, with url, key and offset.
            A step's ``max_errors`` bounds the number of errors that it skips in an epoch, in all
            lanes of this rank together. The error replaces the first batch that exceeds the bound,
            also after a resume. Each rank counts by itself. When an epoch is repartitioned, each
            rank is charged an equal share of the errors that were skipped before.
        WorkerError: during the iteration: a worker process died, returned no batch for
            ``timeout_seconds``, or cannot pickle a batch. The state remains valid.
    """

    @checks_options
    def __init__(
        self,
        pipe: IterDataPipe[Any],
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        lanes: int | Literal["elastic"] | None = None,
        mix_lanes: int = 1,
        epoch_end: str | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | str | None = None,
        prefetch_factor: int | None = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        worker_init_fn: Callable[[int], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        on_device: Callable[[Any], Any] | None = None,
        progress: bool = False,
        timeout_seconds: float = 0,
        ledger: bool | str | os.PathLike[str] = False,
    ) -> None:
        stage = stage_of(pipe, "PipeLoader()")
        options = {name: value for name, value in locals().items() if name not in ("self", "pipe", "stage")}
        call = graph.Call.of("PipeLoader", inspect.signature(PipeLoader), options)
        self._text = str(call._replace(arguments=(graph.to_text(pipe), *call.arguments)))
        Chain(stage).root.check_resumable()
        stage = in_batches(stage, batch_size, drop_last=drop_last, collate=collate, mix_lanes=mix_lanes)
        new_plan = partial(
            Plan,
            epoch_end=epoch_end,
            lanes=lanes,
            num_workers=num_workers,
            parts=mix_lanes,
            drop_last=bool(drop_last),
            ledger=ledger is not False,
            rank=(rank, world_size),
        )
        prefetch_factor = 2 if prefetch_factor is None else check_count("prefetch_factor", prefetch_factor)
        plan = new_plan(stage)
        new_workers = partial(
            Workers,
            count=num_workers,
            persistent=bool(persistent_workers),
            prefetch=prefetch_factor * mix_lanes,
            method=multiprocessing_context if num_workers else None,
            timeout=check_seconds("timeout_seconds", timeout_seconds) if num_workers else 0,
            on_start=worker_init_fn,
        )
        path = check_path(ledger)
        file = None if path is None else LedgerFile(path)
        self._progress = Progress(Editable(plan, stage, new_plan), new_workers, file)
        if on_device is not None and not callable(on_device):
            raise TypeError(f"on_device is a function of a batch, not {on_device!r:.80}")
        self._join = Joining(mix_lanes, collate if callable(collate) else None, pin=pin_memory, on_device=on_device)
        self._tqdm = library("tqdm", "tqdm", "progress=True").tqdm if progress else None

    @property
    def _plan(self) -> Plan:
        return self._progress.plan

    @property
    def rank(self) -> Rank:
        """The data-parallel rank, determined at the first use.

        It also fixes the default of ``epoch_end``.
        """
        return self._plan.rank

    @property
    def epoch(self) -> int:
        """The epoch of the next batch: after the last batch of an epoch, the next epoch.

        It is an epoch of the data, also if ``with_epoch()`` cuts iterations of another length: a
        training that ends after a number of these counts its steps. With ``epoch_end="loop"`` it is
        that of the lane of this rank that is last.
        """
        at = self._progress.position
        ended = at.ended and not self._progress.resume  # other ranks may still be in this epoch
        return self._plan.epoch(at) + ended

    def __iter__(self) -> LoaderIterator:
        return LoaderIterator(self._progress, self._join, None if self._tqdm is None else self._bar)

    def _bar(self, initial: int) -> Any:
        """A progress bar."""
        assert self._tqdm is not None
        return self._tqdm(initial=initial, total=None if self._progress.length_unknown else len(self), unit="batch")

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start ``epoch`` from its beginning. An iterator in use ends.

        After a state of the same epoch was loaded, ``iter()`` still continues from that state, and
        from where ``with_epoch()`` has cut this epoch. If the state was taken at the end of
        ``epoch``, ``iter()`` yields nothing, with a warning in the log. ``epoch`` is one of the
        data. With ``epoch_end="loop"``, only the first ``iter()`` of a new loader can start at an
        epoch.
        """
        epoch = check_count("epoch", epoch, least=0, most=MOST)
        self._progress.set_epoch(epoch)

    @checks_options
    def with_epoch(self, *, samples: int | None = None, batches: int | None = None) -> PipeLoader:
        """Make each ``iter()`` yield a fixed number of samples or batches, and return the loader.

        The next ``iter()`` continues where the one before was cut. The order of the samples does
        not change: the epochs of the data follow each other without a break. With
        ``epoch_end="loop"``, batches are filled over the ends of epochs. On other ranks, a state
        continues with the number that all ranks together had left.

        With ``epoch_end="exact"`` and no ``drop_last``, the last batch of a lane may be smaller. An
        iteration over ``samples`` then ends with the batch that reaches the number: it yields at
        least this number and exceeds it by less than a batch, and ``len()`` is not known. With
        ``batches``, a smaller batch counts as one. In all other cases all batches are full, and an
        iteration yields exactly the requested number.

        Args:
            samples: of all ranks together; a multiple of ranks x batch size.
            batches: of all ranks together; a multiple of the number of ranks.

        Raises:
            ValueError: neither or both are passed, the number is not such a multiple, or ranks may
                end an epoch of the data at different times; or ``samples`` was passed, and a step
                such as ``pack_samples`` makes batches of different numbers of samples.
        """
        if (samples is None) == (batches is None):
            raise ValueError("with_epoch() takes samples= or batches=, one of them")
        plan = self._plan
        ranks, size = self.rank.of, 1 if samples is None else plan.batch_size
        if samples is not None and (step := uneven(plan.stage)) is not None:
            name = functional_name(type(step))
            raise ValueError(f"{name}() makes batches of different numbers of samples: pass batches= to with_epoch()")
        what, given = ("samples", samples) if batches is None else ("batches", batches)
        count = check_count(what, given)
        if count % (ranks * size):
            each = f"{ranks} ranks{f' x {size} samples in a batch' if size > 1 else ''}"
            raise ValueError(f"{what}={count} cannot be divided by {each}: pass a multiple of {ranks * size}")
        if ranks > 1 and plan.mode == "exact":
            raise ValueError(
                "with several ranks, with_epoch() needs epoch_end='loop', or 'drop' or 'pad', so that all "
                "ranks yield the same number of batches"
            )
        in_samples = samples is not None and plan.last_may_be_smaller
        self._progress.cut_after(count if in_samples else count // (ranks * size), in_samples=in_samples)
        return self

    def __repr__(self) -> str:
        return self._text

    def __copy__(self) -> PipeLoader:
        return copy.deepcopy(self)

    def state_dict(self) -> State:
        """Return the positions of this rank's lanes after the last returned batch.

        The dict is new at each call and holds plain JSON types only. The state is valid at any
        time: before the first batch, after the last, after an exception, in a signal handler, from
        another thread.

        Its ``"epoch"`` is that of the next batch: after the last batch of epoch 4 it is 5.
        """
        at, plan = self._progress.position, self._plan
        state = plan.entries_of_all_ranks(at) | {
            "rank": self.rank.number,
            "step": at.step,
            "lanes": {str(number): lane for number, lane in plan.states(at).items()},
            "counts": in_state(plan.counts(at)),
            **not_for_dcp(),
        }
        if self._progress.cut is not None:
            state["given"] = at.given
        if self._progress.cut_in_samples:
            state["given_samples"] = at.samples
        return state | plan.ledger_entry(at)

    @checks_options
    def load_state_dict(
        self,
        state: State | list[State],
        *,
        moved: bool = False,
        exclude: str | os.PathLike[str] | Iterable[str] | None = None,
        added: str | None = None,
        mix: str | None = None,
    ) -> None:
        """Make the next ``iter()`` continue from a state.

        The state of one rank fits the same rank of the same number of ranks. The states of all
        ranks (a list, or the result of ``merge_states``) fit any number of ranks. A list is merged.
        If ranks were in different epochs, which ``epoch_end="exact"`` allows, each rank continues
        from its own state; this requires the same number of ranks.

        Args:
            state: what ``state_dict`` returned, a list of these of all ranks, or what
                ``merge_states`` made of them.
            moved: the shards are those of the state, whatever their names and the index say: see
                ``WdsPipe.load_state_dict``.
            exclude: leave out the samples with these keys from here on, and in later epochs:
                ``"@keys.txt"``, a file with a key on each line, or the keys. The rest is the old
                rest less these samples, in the old order; batches are filled from what follows.
                Pass the same list with later states; new keys come at its end. On a ``SampleList``
                whose batches do not depend on the number of workers, the samples are no part of the
                epochs any more, and ``counts()`` of this epoch is without them, also of those that
                were delivered before. Otherwise a filter leaves them out and counts them as
                filtered, after the last step that may change the order or number of samples: there
                they must still have their ``"__key__"``, and not be batches. ``epoch_end="drop"``
                and ``"pad"`` cannot have this filter. A key that no sample has is a ValueError, for
                a ``SampleList`` with indexes of keys; otherwise, with one rank, a warning at the
                end of each epoch. ``counts()`` says under ``excluded`` how many samples each rank
                left out of an epoch.
            added: ``"append"``: the list of shards has grown at its end. This epoch goes on with
                the shards that it had, in their order; from the next one on, all are read; also in
                this one, if nothing of it was returned yet. With ``epoch_end="loop"``, the next
                epoch is the first that no lane has begun. Later states know this; they need no
                ``added``. With several ranks, pass the states of all. A ``SampleList`` needs a
                view in which the samples of the new shards come last. Not for ``mix``, which can
                have another source, ``weights`` and ``repeat``.
            mix: ``"changed"``: the sources of a ``mix`` in the pipeline, or their weights, are
                others than those of the state, from here on; see ``mix``.

        Raises:
            StateError: another pipeline made the state, or it is the state of one rank of another
                number of ranks; or an edit does not fit it. The message says what to do.
            ValueError, TypeError: the pipeline cannot be edited in this way. Nothing has changed
                then.
        """
        edits = Edits(moved, exclude, added, mix)
        self._progress.go_to(*find_continuation(self._progress.editable, state, edits, self._progress.excluded))
        at = self._progress.position
        self._progress.loaded = at.partition if at.step else None

    def skip(self, *, batches: int) -> None:
        """Leave out the next batches of this rank, such as after a spike of the loss.

        The next ``iter()`` continues after them, also after a ``break``; an iterator in use ends.
        Every rank calls it, with the same number::

            loader.load_state_dict(before_the_spike)
            loader.skip(batches=200)
            for batch in loader:
                ...

        The samples count as ``skipped``, and ``counts()`` also has their number as ``left_out``.
        ``step`` counts the batches; ``with_epoch()`` does not. Of a ``SampleList`` with one global
        order they are jumped over without reading. Otherwise the workers read and decode them,
        which takes as long as these batches take, and then begin again after them. If that fails,
        the position is that before the call.

        Args:
            batches: how many. At least one batch of the epoch of the data must be left, except with
                ``epoch_end="loop"``, whose epochs have no end. To leave out the whole rest, call
                ``set_epoch(loader.epoch + 1)``.

        Raises:
            ValueError: nothing of the epoch would be left on this rank.
            ShardError, SampleError, WorkerError: as during the iteration.
        """
        self._progress.skip(check_count("batches", batches))

    def counts(self) -> dict[str, int]:
        """Return what became of this rank's samples of the current epoch, or of the one that just
        ended; with ``epoch_end="loop"``, of all since the first epoch.

        The names are those of ``pipe.counts()``, and, if there are any, ``padded``, samples that
        ``epoch_end="pad"`` repeated, and ``left_out``, how many of the skipped ones ``skip()`` left
        out.
        """
        return self._plan.counts(self._progress.at or self._progress.position)

    def stats(self) -> dict[str, float]:
        """Return measurements of the current or last iteration, as flat numbers for a logger.

        Before the first iteration there are only ``epoch``, ``filtered`` and ``skipped``.

         - ``batches``, ``samples``: how many this rank yielded in this iteration.
         - ``batches_per_second``, ``samples_per_second``, ``bytes_per_second`` (bytes of the
           decompressed tars): the mean since the first ``next()``.
         - ``wait_seconds``, ``wait_share``: how long the caller waited for batches, and the share
           of the whole time.
         - ``read_share``, ``decode_share``: of the time in which workers made batches, the share of
           reading (up to and including ``group_by_key``) and of the steps after it.
         - ``stall_share``: the part of ``read_share`` in which workers waited for bytes of a store.
           Each wait is measured; the rest of reading is measured on a part of the samples.
         - ``requests``, ``retries``, ``hedged`` (of requests that stalled), ``bytes_fetched``,
           ``stall_seconds``: the use of the network; the last is how long workers waited for bytes.
         - ``held_samples``: samples in shuffle buffers, and in flight in threads.
         - ``epoch``, ``filtered``, ``skipped``: the epoch (with ``"loop"``, of this rank's last
           lane, and samples of all epochs), and samples of it by what became of them.
         - ``lane_imbalance``: by how many batches the first lane is ahead of the last.
        """
        progress = self._progress
        live, counts = progress.tally, self.counts()
        found = {
            "epoch": float(self._plan.epoch(progress.position)),
            "filtered": float(counts["filtered"]),
            "skipped": float(counts["skipped"]),
        }
        if live is None:
            return found
        plan, at, before = live.stands  # not those of the loader: a state may have been loaded since
        delivered = [lane.delivered for lane in at.lanes.values()]
        samples = plan.counts(at)["delivered"] - before
        return found | live.figures(samples) | {"lane_imbalance": float(max(delivered) - min(delivered))}

    def stats_of_ranks(self, group: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> list[dict[str, float]]:
        """Return what ``stats`` returns on each rank, in the order of the ranks, with ``rank`` and
        ``world_size``; ``describe_stats`` says in words which one waits for what.

        It is a collective operation: all ranks must call it at the same step. With one rank,
        torch.distributed is not needed.

        Args:
            group: the process group of all data-parallel ranks; None: the default group. It may
                contain several processes of one data-parallel rank.
            timeout_seconds: how long to wait for the other ranks.

        Raises:
            RuntimeError: torch.distributed is not initialised.
            StateError: a rank has not come in this time, or has come to another call.
        """
        rank = self.rank
        own = {"rank": float(rank.number), "world_size": float(rank.of), **self.stats()}
        return of_all_ranks(own, rank, group, "stats_of_ranks()", timeout_seconds)

    def remaining(self) -> int | None:
        """Return how many batches the next iteration yields on this rank; None: not known.

        If a state was loaded, the next iteration is the rest of an epoch.
        """
        progress = self._progress
        if progress.passed:
            return 0
        if progress.cut is not None:
            return None if progress.cut_in_samples else progress.cut - progress.position.given
        at = progress.position
        if not progress.resume and at.ended:  # other ranks may still be in this epoch
            at = self._plan.beginning(at.epoch + 1, at.partition.lanes)
        return self._plan.left(at)

    def plan(
        self, step: int, *, rank: int | None = None, epoch: int | None = None, keys: bool = False
    ) -> list[PlannedSample]:
        """Return which samples the batch of a rank at a step has, without reading the shards::

            loader.plan(120_000, rank=37)  # [PlannedSample(url='a-0831.tar', number=17, ...), ...]

        The order is known for a ``SampleList``, and for a ``ShardList`` whose samples are counted,
        also through ``shuffle_buffer``, if all other steps keep the number and the order of the
        samples: no filters, no ``on_error="skip"``, no ``mix``. The time does not depend on the
        step; it is below a second for 10**9 samples.

        Args:
            step: which batch of the epoch: the one that is returned when ``state_dict()`` says this
                ``"step"``; the first one is 0. After an epoch has been repartitioned, steps count
                from there. With ``epoch_end="loop"`` they count on through all epochs.
            rank: one of the ranks of this loader; None: its own.
            epoch: None: that of ``state_dict()``. Another one is as this loader would begin it, on
                as many lanes. With ``epoch_end="loop"`` leave it out.
            keys: also say the keys. They are read from the headers of these samples in the shards,
                which need indexes of offsets.

        Returns:
            The samples in the order of the batch, as (url, number in the shard, key, padding).

        Raises:
            IndexError: the rank has no such step in the epoch.
            ValueError: the order cannot be known, or not at this step or for this rank after a
                state of other ranks was loaded; or an argument does not fit. The message says why.
            ShardError: with ``keys``, a shard or its index cannot be read.
        """
        own, ranks = self.rank
        rank = own if rank is None else check_count("rank", rank, least=0, most=ranks - 1)
        return self._lookup(epoch).samples(check_count("step", step, least=0, most=MOST), rank, keys=keys)

    def find(self, sample: str | int, *, epoch: int | None = None) -> list[PlannedVisit]:
        """Return when a sample comes, as (epoch, step, rank, place in the batch): the inverse of
        ``plan``, with the same conditions.

        A sample that is dropped at the end of the epoch, is not in the view, or came before this
        epoch was repartitioned has none. With ``resampled=True`` it may come several times.
        Repeats that fill up an epoch are left out.

        Args:
            sample: its key, which the indexes of keys find (``wds-pipes index --offsets``); or its
                number among all samples of the shards, in the order of the list.
            epoch: as in ``plan``; with ``epoch_end="loop"`` the epoch of the data, from that of
                ``state_dict()`` on.

        Raises:
            KeyError: no sample has this key.
            IndexError: there is no sample with this number.
            ValueError, ShardError: as in ``plan``.
        """
        if not isinstance(sample, (str, int)) or isinstance(sample, bool):
            raise TypeError(f"a sample is a key or a number, not {sample!r:.80}")
        begun, ahead = self._progress.position.epoch, 0
        if epoch is not None and self._plan.endless:
            ahead, epoch = check_count("epoch", epoch, least=begun, most=MOST) - begun, None
        return self._lookup(epoch).visits(sample, ahead)

    def _lookup(self, epoch: int | None) -> Lookup:
        at, plan, progress = self._progress.position, self._plan, self._progress
        if epoch is not None and plan.endless:
            raise ValueError("with epoch_end='loop' steps count on through all epochs: leave epoch= out")
        if epoch is not None and check_count("epoch", epoch, least=0, most=MOST) != at.epoch:
            at = plan.beginning(epoch, at.partition.lanes)
        return Lookup(plan, at, resumed=progress.loaded is at.partition)

    def close(self) -> None:
        """Stop the workers and close all open shards.

        The state stays, and a further ``iter()`` starts new workers.
        """
        self._progress.close("it was closed")

    def __len__(self) -> int:
        """Return how many batches this rank yields in an iteration.

        Raises:
            TypeError: the number is not known; the message says what to do.
        """
        progress = self._progress
        if progress.cut is not None and not progress.cut_in_samples:
            return progress.cut
        if unknown := progress.length_unknown:
            if loader_of_accelerate(self) is not None:
                raise no_dataset()
            raise TypeError(f"the number of batches is not known: {unknown}")
        length = self._plan.left(self._plan.beginning(progress.epoch, progress.lanes))
        assert length is not None
        return length

    def __getitem__(self, number: Any) -> Any:
        """Raise TypeError: batches have no numbers. A DataLoader over a dataset calls this."""
        raise no_dataset()


register_for_lightning(PipeLoader)


def progress_of(loader: PipeLoader) -> Progress:
    """Return what a loader and its iterators share, for other modules of this package."""
    return loader._progress


def with_workers(loader: PipeLoader, count: int) -> PipeLoader:
    """Return a loader like another one, with another number of worker processes, at its first
    batch, without a ledger.
    """
    other, progress = copy.copy(loader), loader._progress
    _, stage, new_plan = progress.editable
    new_plan = partial(new_plan, num_workers=count)
    other._progress = Progress(Editable(new_plan(stage), stage, new_plan), partial(progress.new_workers, count=count))
    return other
