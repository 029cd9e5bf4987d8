"""Makes saved/ with Hugging Face datasets 5.2.0, and records.tfrecord with tfrecord 1.14.6. Tests
read them without these packages: python tests/data/make_saved.py
"""

import io
import shutil
from pathlib import Path

import datasets
import numpy as np
from PIL import Image
from tfrecord import TFRecordWriter

HERE = Path(__file__).parent


def picture(number, kind):
    file = io.BytesIO()
    Image.new("RGB", (4, 3), (number, 0, 0)).save(file, kind)
    return file.getvalue()


def rows():
    for number in range(5):
        kind = "PNG" if number == 2 else "JPEG"
        yield {
            "image": {"bytes": picture(number, kind), "path": f"{number}.{kind.lower()}"},
            "label": number % 2,
            "text": f"größe {number}",
        }


features = {
    "image": datasets.Image(),
    "label": datasets.ClassLabel(names=["cat", "dog"]),
    "text": datasets.Value("string"),
}
shutil.rmtree(HERE / "saved", ignore_errors=True)
whole = datasets.Dataset.from_list(list(rows()), features=datasets.Features(features))
splits = datasets.DatasetDict(train=whole.select(range(3)), test=whole.select(range(3, 5)))
splits.save_to_disk(str(HERE / "saved"), num_shards={"train": 2, "test": 1})

writer = TFRecordWriter(str(HERE / "records.tfrecord"))
for number in range(4):
    writer.write(
        {
            "image/encoded": (picture(number, "JPEG"), "byte"),
            "image/filename": (f"n01.{number}.JPEG".encode(), "byte"),
            "image/class/label": (number, "int"),
            "boxes": (np.arange(number, dtype=np.float32), "float"),
        }
    )
writer.close()
