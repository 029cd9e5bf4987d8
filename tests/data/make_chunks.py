"""Makes mds/ with mosaicml-streaming 0.13.0, and litdata/ with litdata 0.2.76, which need other
versions of their dependencies. Tests read them without: python tests/data/make_chunks.py mds
"""

import io
import shutil
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType

import numpy as np
from PIL import Image

HERE = Path(__file__).parent


def encoded(number, kind="JPEG"):
    file = io.BytesIO()
    picture(number).save(file, kind)
    return file.getvalue()


def picture(number):
    return Image.fromarray((np.arange(36).reshape(3, 4, 3) + number).astype(np.uint8))


def column(number):
    """Each type of MDS with a value of it."""
    return {
        "bytes": (b"\0" + bytes([number])) * number,
        "str": f"größe {number}",
        "int": number - 2,
        "ndarray": np.arange(number + 1, dtype=np.float32).reshape(1, -1),
        "ndarray:int16": np.full((2, 300), number, np.int16),
        "ndarray:uint8:2,3": np.full((2, 3), number, np.uint8),
        "uint8": number,
        "int64": -number,
        "float16": number / 2,
        "float64": number / 3,
        "str_int": 10**30 + number,
        "str_float": number / 3,
        "str_decimal": Decimal("0.10"),
        "pil": picture(number),
        "jpeg": encoded(number),
        "jpeg_array": [encoded(number), encoded(number + 1)],
        "png": encoded(number, "PNG"),
        "list[pil]": [picture(number)] * 2,
        "list[jpeg]": [Image.open(io.BytesIO(encoded(number)))] * number,
        "list[png]": [picture(number)],
        "pkl": {"n": number},
        "json": {"n": [number, None]},
    }


def make_mds(folder):
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")  # which needs torchvision
    from streaming import MDSWriter

    columns = {name.replace("[", "_of_").strip("]").replace(":", "_").replace(",", "x"): name for name in column(0)}
    with MDSWriter(out=str(folder / "types"), columns=columns) as writer:
        for number in range(3):
            writer.write({name: column(number)[kind] for name, kind in columns.items()})
    for compression in (None, "zstd:7", "gz"):
        out = str(folder / (compression or "plain").partition(":")[0])
        with MDSWriter(
            out=out, columns={"image": "jpeg", "label": "int"}, compression=compression, size_limit=3000
        ) as writer:
            for number in range(10):
                writer.write({"image": encoded(number), "label": number})


def item(number):
    import torch
    from litdata import Jpeg, Video

    return {
        "image": Jpeg(bytes=encoded(number)),
        "clip": Video(bytes=b"no video", path="x.webm"),
        "meta": {"score": number / 3, "flag": number % 2 == 0, "mask": np.full((2, 2), number, np.uint16)},
        "text": f"größe {number}",
        "label": number,
        "pixels": picture(number),
        "row": np.arange(number, dtype=np.float64),
        "ids": torch.arange(number),
        "matrix": torch.full((2, 1), number, dtype=torch.int16),
        "boxes": [[1, 2.5], [number, None]],
        "words": ["a", "größe"],
        "counts": [1, number],
        "parts": [0.5, 1.5],
        "flags": [True, False],
        "more": {"c": number, "d": [1, {}]},
        "people": [{"name": "A", "age": number, "tall": None}, {"name": "B", "age": 2, "tall": 1.5}],
        "any": [None, {"a": None, "b": {"c": [True, "x", 7, 0.5, {}]}}],
        "object": {1, 2},
        "raw": b"\0" * number,
    }


def make_litdata(folder):
    import torch
    from litdata import Jpeg, TokensLoader
    from litdata.streaming.cache import Cache

    def write(name, items, **options):
        cache = Cache(str(folder / name), **{"chunk_size": 4} | options)
        for number, item in enumerate(items):
            cache[number] = item
        cache.done()
        cache.merge()

    write("types", map(item, range(3)))
    write("pairs", ((encoded(number), number) for number in range(10)))
    write("rows", ({"text": f"größe {number}", "n": number, "tags": ["a"] * number} for number in range(10)))
    write(
        "tokens",
        (torch.arange(number + 1, dtype=torch.int32) for number in range(10)),
        chunk_size=20,
        item_loader=TokensLoader(4),
    )
    for level in (None, "chunk", "batch", "sample"):
        images = ({"image": Jpeg(bytes=encoded(number)), "label": number} for number in range(10))
        options = {} if level is None else {"compression": "zstd", "compression_level": level}
        write(level or "images", images, compression_batch_size=3, **options)


name = sys.argv[1]
shutil.rmtree(HERE / name, ignore_errors=True)
{"mds": make_mds, "litdata": make_litdata}[name](HERE / name)
