"""Resume on other numbers of ranks, beside Zephon on the same documents: what comes again, how
large the state is, how many calls a resume takes, and how full packs are.

    pip install --no-deps --target LIBS \\
        zephon backports.zstd cloudpickle filelock msgpack optree tenacity wrapt
    PYTHONPATH=LIBS python tests/bench/elastic.py [DIRECTORY]      writes 20 MB there (default: a
    temporary directory), takes half a minute; where Zephon is not there, its columns are left out

5,000 documents of 2 KB on average, in 20 shards: tars for this package, JSON Lines for Zephon, with
a shuffle of shards and a shuffle buffer. All ranks are simulated in this process. Each history runs
some steps of 6 batches of 8 documents, saves, resumes on the other number of ranks and reads to the
end of the epoch; beside it the ranks that saved go on to the end, too. "exact": each remaining
document comes exactly once, and on the same ranks also in the same batches. "same steps": moreover,
each global step has the same documents as without the resume.

Each library is measured with the lanes that it takes by itself, and with 6 lanes, planned when the
run began; a resume says their number again for Zephon, while this package takes that of the state.
Zephon deals out chunks to its lanes: they have 50 documents, so that all lanes have some. Calls are
those in the source of the functions below that a training script would contain. The state is that
of all ranks together as JSON; that of Zephon differs from run to run by what it has read ahead.
Exits with 1 if a resume of this package is not exact.
"""

import ast
import inspect
import json
import zlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace

import packing
from bars import MISSED, directory, exit_if_missed

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.core.words import plural

DOCUMENTS, SHARD, CHUNK, BUFFER, BATCH, LANES, STEPS, COMPARED = 5_000, 250, 50, 200, 8, 6, 30, 60
HISTORIES = ((2, 2), (1, 2), (2, 1), (2, 3), (2, 4), (2, 7))  # ranks before and after the resume


def our_loader(place, rank, world, lanes):
    shards = wp.ShardList(f"{place}/*.tar", shuffle=True, seed=1, samples_per_shard=SHARD)
    pipe = shards.open_shards().load_tar().group_by_key().shuffle_buffer(BUFFER)
    options = {"lanes": lanes, "rank": rank, "world_size": world}
    return wp.PipeLoader(pipe, batch_size=BATCH, collate=list, epoch_end="exact", **options)


def our_resume(loader, saved):
    checkpoint.load(saved, loader)


def our_save(loaders, saved):
    for loader in loaders:
        checkpoint.save(saved, loader)
    return "".join(json.dumps(loader.state_dict()) for loader in loaders)


def zephon_loader(place, rank, world, lanes):
    from zephon import Dataset, Pipeline, StaticMixtureWorkSource

    documents = Dataset.from_path("documents", f"{place}/jsonl")
    work = StaticMixtureWorkSource([documents], {"documents": 1.0}, chunk_size=CHUNK, seed=1)
    options = {"canonical_replicas": lanes, "global_rank": rank, "world_size": world}
    options |= {"aggregate_dir": f"{place}/aggregate", "run_id": "elastic", "runner": "inline", "max_workers": 1}
    return Pipeline(work).shuffle(BUFFER).batch(BATCH, drop_last=False).options(**options)


def zephon_resume(pipeline, saved):
    pipeline.restore(json.loads(saved.read_text()))


def zephon_save(pipelines, saved):
    """In ``checkpoint``, ranks wait for one another; all return the state of all."""
    with ThreadPoolExecutor(len(pipelines)) as ranks:
        state, *_ = ranks.map(lambda pipeline: json.dumps(pipeline.checkpoint()), pipelines)
    saved.write_text(state)
    return state


OURS = SimpleNamespace(
    name="wds_pipes",
    loader=our_loader,
    resume=our_resume,
    save=our_save,
    numbers=lambda batch: [int(sample["__key__"]) for sample in batch],
    lanes_again=False,
    packs={"best fit": lambda lengths, place: packing.ours(lengths, f"{place}/*.tar")},
)
ZEPHON = SimpleNamespace(
    name="zephon",
    loader=zephon_loader,
    resume=zephon_resume,
    save=zephon_save,
    numbers=lambda batch: [record.payload["number"] for record in batch.records],
    lanes_again=True,
    packs={f"{bins} bins": lambda lengths, _, bins=bins: packing.zephon_packs(lengths, bins) for bins in (64, 512)},
)


def write(place, lengths):
    """The documents as tars and as JSON Lines, two bytes of text for a token."""
    (place / "jsonl").mkdir(parents=True)
    with wp.ShardWriter(f"{place}/%03d.tar", max_samples=SHARD) as writer:
        for number, length in enumerate(lengths):
            writer.write({"__key__": f"{number:06d}", "txt": b"ab" * length})
            with open(place / f"jsonl/{number // SHARD:03d}.jsonl", "a") as file:
                file.write(json.dumps({"number": number, "text": "ab" * length}) + "\n")


def history(library, place, before, after, lanes):
    """Return the state that was saved, and what happened: a cell of the table."""
    loaders = [library.loader(place, rank, before, lanes) for rank in range(before)]
    running = [iter(loader) for loader in loaders]
    begun = [[library.numbers(batch) for batch in islice(batches, STEPS * LANES // before)] for batches in running]
    saved = place / f"{library.name}-{lanes}-{before}-{after}"
    state = library.save(loaders, saved)
    rest = [[library.numbers(batch) for batch in batches] for batches in running]
    resumed = []
    try:
        for rank in range(after):
            loader = library.loader(place, rank, after, lanes if library.lanes_again else None)
            library.resume(loader, saved)
            resumed.append([library.numbers(batch) for batch in loader])
    except (RuntimeError, ValueError) as error:
        return state, f"refused: {error}"
    due, came = Counter(range(DOCUMENTS)) - counted(begun), counted(resumed)
    if due != came:
        return state, f"lost {(due - came).total()}, repeated {(came - due).total()}"
    if before == after and rest != resumed:
        return state, "in another order"
    same = lanes and LANES % after == 0 and steps(rest) == steps(resumed)
    return state, "exact, same steps" if same else "exact"


def counted(ranks):
    """How often each document comes in the batches of ranks."""
    return Counter(number for batches in ranks for batch in batches for number in batch)


def steps(ranks):
    """The documents of each of the global steps that are compared: no lane ends in them."""
    turns = LANES // len(ranks)
    return [counted(batches[step * turns : (step + 1) * turns] for batches in ranks) for step in range(COMPARED)]


def calls(*functions):
    """The number of calls in the source of functions."""
    trees = [ast.parse(inspect.getsource(function)) for function in functions]
    return f"{sum(isinstance(node, ast.Call) for tree in trees for node in ast.walk(tree))}"


def column(library, place, lanes):
    """The cells of a library, by the names of their rows."""
    cells, sizes = {}, {}
    for before, after in HISTORIES:
        state, cell = history(library, place, before, after, lanes)
        cells[f"{before} -> {plural(after, 'rank')}"] = cell
        size = f"{len(state):,} B ({len(zlib.compress(state.encode())):,} B with zlib)"
        sizes.setdefault(f"state of {plural(before, 'rank')}", size)
        if library is OURS and not cell.startswith("exact"):
            MISSED.append(f"{before} -> {after}: {cell}")
    counts = {"calls before the first batch": calls(library.loader, library.resume)}
    return cells | sizes | counts | {"of these for the resume": calls(library.resume)}


def main():
    libraries, lengths, columns = [OURS], packing.lengths_of(DOCUMENTS, 740, 0.8), {}
    if find_spec("zephon"):
        libraries.append(ZEPHON)
    else:
        print("Zephon is not installed: this package only.")
    with directory() as place:
        write(place, lengths)
        for library in libraries:
            fills = {way: sum(lengths) / packs(lengths, place) / packing.BUDGET for way, packs in library.packs.items()}
            fill = {"fill of packs of 8,192": ", ".join(f"{fill:.4f} ({way})" for way, fill in fills.items())}
            for lanes in (None, LANES):
                title = f"{library.name} {version(library.name)}{f', {lanes} lanes' if lanes else ''}"
                columns[title] = column(library, place, lanes) | fill
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(cells[row] for cells in columns.values())} |")
    exit_if_missed()


if __name__ == "__main__":
    main()
