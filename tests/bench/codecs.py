"""What decoding a field adds to reading it, beside its library alone, in one run.

    python tests/bench/codecs.py

For each kind of field: microseconds a field that ``decode_by_ext`` adds to a pipe of samples, those
of the library alone on the same bytes, and the ratio. A figure is the median of rounds in turn.
"""

import io
import json
import statistics
import sys
import time
import warnings
import zlib

import bars
import numpy as np
import torch
from PIL import Image
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes  # noqa: F401 - registers the steps

warnings.filterwarnings("ignore")
COUNT, ROUNDS = 2000, 9


def _saved(save, *values, **options):
    file = io.BytesIO()
    save(file, *values, **options)
    return file.getvalue()


def _picture():
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)
    return _saved(lambda file: Image.fromarray(pixels).save(file, "PNG"))


def _pillow(data):
    with Image.open(io.BytesIO(data)) as image:
        return np.array(image.convert("RGB"))


def _load(data):
    with np.load(io.BytesIO(data)) as arrays:
        return dict(arrays)


def _fields():
    """(name, bytes, spec, library alone, bar of the ratio; None: none)"""
    import cbor2
    import msgpack
    import safetensors.torch
    import zstandard

    tokens = np.arange(512, dtype=np.uint16)
    record = {"text": "x" * 120, "id": 17, "tags": ["a", "b"], "score": 0.5, "more": {"a": 1, "b": None}}
    text = json.dumps(record).encode()
    packed = zstandard.ZstdCompressor().compress(text * 5)
    unpacker = zstandard.ZstdDecompressor()
    return [
        ("npy", _saved(np.save, tokens), (), lambda data: np.load(io.BytesIO(data)), 0.15),
        ("npz", _saved(np.savez, tokens=tokens), (), _load, 0.3),
        ("pt", _saved(lambda file: torch.save(torch.arange(512), file)), (), _torch, 1.25),
        ("png", _picture(), ("rgb8",), _pillow, 1.15),
        ("safetensors", safetensors.torch.save({"tokens": torch.arange(512)}), (), safetensors.torch.load, 1.8),
        ("json", text, (), json.loads, None),
        ("msgpack", msgpack.packb(record), (), msgpack.unpackb, None),
        ("cbor", cbor2.dumps(record), (), cbor2.loads, None),
        ("cls", b"317", (), int, None),
        ("txt", b"a caption of a few words", (), bytes.decode, None),
        (
            "csv",
            b"a,b,c\n1,2,3\n",
            ("csv",),
            lambda data: list(__import__("csv").reader(io.StringIO(data.decode()))),
            None,
        ),
        ("txt.zst", packed, (), lambda data: unpacker.decompress(data).decode(), None),
        ("txt.gz", _gz(text * 5), (), lambda data: zlib.decompress(data, 31).decode(), None),
    ]


def _gz(data):
    import gzip

    return gzip.compress(data, mtime=0)


def _torch(data):
    return torch.load(io.BytesIO(data), weights_only=True)


def _seconds(items):
    started = time.process_time()
    for _ in items:
        pass
    return time.process_time() - started


def main():
    samples = {}
    for name, data, spec, library, bound in _fields():
        samples = [{"__key__": f"{number:06}", "__url__": "a.tar", name: data} for number in range(COUNT)]

        def read(samples=samples):
            return _seconds(IterableWrapper(samples, deepcopy=False).map_samples(_same))

        def decode(samples=samples, spec=spec):
            return _seconds(IterableWrapper(samples, deepcopy=False).map_samples(_same).decode_by_ext(*spec))

        def alone(data=data, library=library):
            return _seconds(map(library, [data] * COUNT))

        found = bars.in_turn({"read": read, "decode": decode, "alone": alone}, ROUNDS)
        adds = [(whole - part) / COUNT * 1e6 for whole, part in zip(found["decode"], found["read"], strict=True)]
        library_adds = [seconds / COUNT * 1e6 for seconds in found["alone"]]
        ratio = bars.median_ratio(adds, library_adds)
        line = f"{name:12} {statistics.median(adds):8.1f} us {statistics.median(library_adds):8.1f} us "
        print(line + (f"{ratio:6.2f}" if bound is None else bars.beside_bar("of the library alone", ratio, bound)))
        sys.stdout.flush()
    bars.exit_if_missed()


def _same(sample):
    return sample


if __name__ == "__main__":
    main()
