"""How full ``pack_samples`` makes its packs, beside Grain and Zephon on the same lengths; what it
costs; and how large a state is: all in one run.

    pip install --no-deps --target LIBS grain array-record etils absl-py cloudpickle protobuf \\
        portpicker zephon backports.zstd filelock msgpack optree tenacity wrapt
    PYTHONPATH=LIBS python tests/bench/packing.py [DIRECTORY]      writes 250 MB there (default: a
    temporary directory), takes two minutes; a library that is not there is left out

The lengths are lognormal, as those of web documents are about: a median of 400 tokens, and 3 % are
over 4,000; none is over the budget of 8,192. Grain and Zephon pack with 64 bins that are open, and
with 512. Beside them is an online best fit with any number of open bins, which no window and no
number of bins limits.

The cost is processor time of one process, over shards of samples with 1,024 tokens of uint16 on
average, 2 KB: with ``.npy`` that is decoded, and with a function that says the length of bytes.
At last, a chain as it is trained with: 20,000 documents of 790 tokens of uint16 on average, with a
shuffle of 1,000 and packs of best fit, from tars that keep the tokens as ``.npy``, as plain bytes
(``.bin``) or as JSON Lines with 100 documents in each; and by Zephon, from arrays in memory.

Exits with 1 if a bar is missed: fill at most 0.5 % below the best of the others, 0.9 of the rate of
the decoded chain without packing, 1.8 of the rate of Zephon, 1,024 bytes for a state.
"""

import bisect
import json
import statistics
import time
from importlib.util import find_spec
from itertools import islice

import numpy as np
from bars import bar, directory, exit_if_missed, in_turn, median_ratio
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BucketSamples

BUDGET, DOCUMENTS, SAMPLES, ROUNDS = 8192, 10_000, 4_000, 5
CORPUS, CORPUS_MEDIAN, BUFFER, GROUP = 20_000, 574, 1000, 100  # documents, tokens, documents, documents


def lengths_of(count, median, sigma):
    return np.clip(np.random.default_rng(0).lognormal(np.log(median), sigma, count).astype(int), 1, BUDGET).tolist()


def ours(lengths, urls, **options):
    """The number of packs of samples whose length is known by their key."""
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    return sum(1 for _ in pipe.pack_samples(lambda sample: lengths[int(sample["__key__"])], BUDGET, **options))


def online_best_fit(lengths):
    """The number of packs of an online best fit that closes none before the end."""
    rooms = []
    for length in lengths:
        place = bisect.bisect_left(rooms, length)
        bisect.insort(rooms, (rooms.pop(place) if place < len(rooms) else BUDGET) - length)
    return len(rooms)


def grain_packs(lengths, bins):
    import grain

    source = grain.MapDataset.source([{"tokens": np.zeros(length, np.uint16)} for length in lengths])
    packed = grain.experimental.BestFitPackIterDataset(
        source.to_iter_dataset(), length_struct={"tokens": BUDGET}, num_packing_bins=bins
    )
    return sum(1 for _ in packed)


def zephon_packs(lengths, bins):
    batches = zephon_pipeline([{"tokens": np.zeros(length, np.uint16)} for length in lengths], bins)
    return sum(len(batch) for batch in batches)


def zephon_pipeline(rows, bins, buffer=None):
    from zephon import Dataset, InMemoryShard, MixtureSpec, Pipeline, StaticMixtureWorkSource

    size = len(rows) // 20
    shards = {number: InMemoryShard(rows[number * size : (number + 1) * size]) for number in range(20)}
    work = StaticMixtureWorkSource(
        [Dataset.from_dict("a", shards)], MixtureSpec({"a": 1.0}), chunk_size=500, stop_after_passes=1
    )
    pipeline = Pipeline(work) if buffer is None else Pipeline(work).shuffle(buffer)
    pipeline = pipeline.pack_sequences(BUDGET, tokens_field="tokens", algorithm="best_fit", num_bins=bins)
    return pipeline.batch(1, drop_last=False).options(max_workers=1, runner="inline")


def fills(urls):
    lengths = lengths_of(DOCUMENTS, 400, 1.2)
    ways = {
        "wds_pipes, best-fit": lambda: ours(lengths, urls),
        "wds_pipes, best-fit, window 128": lambda: ours(lengths, urls, window=128),
        "wds_pipes, first-fit": lambda: ours(lengths, urls, method="first-fit"),
        "online best fit, any number of bins": lambda: online_best_fit(lengths),
    }
    for name, packs in (("Grain", grain_packs), ("Zephon", zephon_packs)):
        ways |= {
            f"{name}, best fit, {bins} bins": lambda packs=packs, bins=bins: packs(lengths, bins) for bins in (64, 512)
        }
    found = {}
    for name, packs in ways.items():
        try:
            found[name] = sum(lengths) / packs() / BUDGET
        except ImportError as error:
            print(f"  {name}: not installed, {error}")
        else:
            print(f"  {name:<36} fill {found[name]:.4f}")
    best = max(fill for name, fill in found.items() if not name.startswith("wds_pipes"))
    bar("fill, beside the best of the others", found["wds_pipes, best-fit"] / best, 0.995, least=True)


def buckets():
    """The fill of padded batches, beside WeNet's sort of 500 samples and buckets."""
    for name, lengths in (("web", lengths_of(DOCUMENTS, 400, 1.2)), ("speech", lengths_of(DOCUMENTS, 450, 0.6))):
        boundaries = [int(np.quantile(lengths, part)) for part in (0.2, 0.4, 0.6, 0.8)]
        for sizes in ([16] * 5, [64, 32, 16, 8, 4]):
            ways = {"WeNet, sort": wenet_buckets(lengths, boundaries, sizes, 500)}
            for sort in (False, True):
                step = BucketSamples(Given(lengths), int, sizes, boundaries=boundaries, sort=sort)
                ways[f"wds_pipes, sort={sort}"] = list(Stream(step))
            found = {way: sum(lengths) / sum(max(batch) * len(batch) for batch in ways[way]) for way in ways}
            print(f"  {name}, batches of {sizes}: {found}")
            bar("fill beside WeNet's", found["wds_pipes, sort=True"] / found["WeNet, sort"], 1.0, least=True)


def wenet_buckets(lengths, boundaries, sizes, sort):
    """The batches of WeNet's ``sort`` and ``bucket_by_sequence_length``."""
    batches, waiting = [], [[] for _ in sizes]
    for start in range(0, len(lengths), sort):
        for length in sorted(lengths[start : start + sort]):
            bucket = bisect.bisect_right(boundaries, length)
            waiting[bucket].append(length)
            if len(waiting[bucket]) == sizes[bucket]:
                batches.append(waiting[bucket])
                waiting[bucket] = []
    return batches + [rest for rest in waiting if rest]


def seconds(make):
    """The processor seconds that reading all of what ``make`` returns takes."""
    start = time.process_time()
    for _ in make():
        pass
    return time.process_time() - start


def costs(urls):
    def raw():
        return wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key()

    def decoded():
        return raw().decode_by_ext().rename_fields({"tokens": "tokens.npy"})

    def in_bytes(sample):
        return (len(sample["tokens.npy"]) - 128) // 2

    chains = {
        "decoded": decoded,
        "best-fit": lambda: decoded().pack_samples("tokens", BUDGET),
        "best-fit, pad": lambda: decoded().pack_samples("tokens", BUDGET, pad=0),
        "wrap": lambda: decoded().pack_samples("tokens", BUDGET, method="wrap"),
        "bucket_samples(8)": lambda: decoded().bucket_samples("tokens", 8),
        "batch_samples(8)": lambda: decoded().batch_samples(8, collate="columns"),
        "raw": raw,
        "raw, function": lambda: raw().pack_samples(in_bytes, BUDGET),
    }

    found = in_turn({name: (lambda make=make: seconds(make)) for name, make in chains.items()}, ROUNDS)
    for name, times in found.items():
        beside = found["raw" if name.startswith("raw") else "decoded"]
        print(
            f"  {name:<20} {SAMPLES / min(times):>9,.0f} samples/s, {median_ratio(beside, times):.2f} of that without"
        )
    bar(
        "rate of best-fit, beside the chain without", median_ratio(found["decoded"], found["best-fit"]), 0.9, least=True
    )


def corpora(place, documents):
    """Write the same documents in the three forms."""
    as_lines = [json.dumps({"tokens": tokens.tolist()}) for tokens in documents]
    fields = {
        "npy": [("npy", tokens) for tokens in documents],
        "bin": [("bin", tokens.tobytes()) for tokens in documents],
        "jsonl": [
            ("jsonl", "\n".join(as_lines[start : start + GROUP]).encode()) for start in range(0, len(as_lines), GROUP)
        ],
    }
    for kind, values in fields.items():
        with wp.ShardWriter(f"{place}/{kind}-%03d.tar", max_samples=-(-len(values) // 20)) as writer:
            for number, (name, value) in enumerate(values):
                writer.write({"__key__": f"{number:06d}", name: value})


def trained(place):
    """How many documents a second the chain of a training has."""
    documents = [np.arange(length, dtype=np.uint16) for length in lengths_of(CORPUS, CORPUS_MEDIAN, 0.8)]
    corpora(place, documents)

    def samples(kind):
        return wp.ShardList(f"{place}/{kind}-*.tar", shuffle=True, seed=1).open_shards().load_tar().group_by_key()

    def from_npy():
        return samples("npy").shuffle_buffer(BUFFER).decode_by_ext().pack_samples("npy", BUDGET)

    def from_bin():
        decoded = samples("bin").shuffle_buffer(BUFFER).decode_by_ext({"bin": lambda data: np.frombuffer(data, "<u2")})
        return decoded.pack_samples("bin", BUDGET)

    def from_jsonl():
        return samples("jsonl").explode_records("jsonl").shuffle_buffer(BUFFER).pack_samples("tokens", BUDGET)

    def from_memory():
        return zephon_pipeline([{"tokens": tokens} for tokens in documents], 64, BUFFER)

    chains = {"npy": from_npy, "bin": from_bin, "jsonl": from_jsonl, "Zephon, from memory": from_memory}
    if find_spec("zephon") is None:
        del chains["Zephon, from memory"]
    found = in_turn({name: (lambda make=make: seconds(make)) for name, make in chains.items()}, ROUNDS)
    for name, times in found.items():
        rate = CORPUS / statistics.median(times)
        tokens = sum(map(len, documents)) / statistics.median(times) / 1e6
        print(f"  {name:<20} {rate:>9,.0f} documents/s, {tokens:.1f} M tokens/s")
    if (zephon := found.get("Zephon, from memory")) is not None:
        bar("npy from tars, beside Zephon from memory", median_ratio(zephon, found["npy"]), 1.8, least=True)


def states(urls):
    pipe = wp.ShardList(urls, shuffle=True, seed=1).open_shards().load_tar().group_by_key().decode_by_ext()
    pipe = pipe.rename_fields({"tokens": "tokens.npy"}).pack_samples("tokens", BUDGET)
    bar("bytes of a state of a pipe", max(len(json.dumps(pipe.state_dict())) for _ in islice(pipe, 300)), 1024)
    loader = wp.PipeLoader(pipe)
    bar("bytes of a state of PipeLoader", max(len(json.dumps(loader.state_dict())) for _ in islice(loader, 300)), 1024)


def main():
    with directory() as place:
        for name, lengths in (("keys", [1] * DOCUMENTS), ("tokens", lengths_of(SAMPLES, 740, 0.8))):
            with wp.ShardWriter(f"{place}/{name}-%03d.tar", max_samples=2500) as writer:
                for number, length in enumerate(lengths):
                    writer.write({"__key__": f"{number:06d}", "tokens.npy": np.arange(length, dtype=np.uint16)})
        print("Fill of packs of 8,192 tokens:")
        fills(f"{place}/keys-*.tar")
        print("Fill of buckets:")
        buckets()
        print("Cost:")
        costs(f"{place}/tokens-*.tar")
        states(f"{place}/tokens-*.tar")
        print("A chain of tokens:")
        trained(place)
    exit_if_missed()


if __name__ == "__main__":
    main()
