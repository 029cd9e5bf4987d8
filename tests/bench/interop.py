"""Shards that ``ShardWriter`` has written, read by libraries that need environments of their own.

    python tests/bench/interop.py [--datasets PYTHON] [--energon PYTHON] [--dali PYTHON]

Each PYTHON is the interpreter of an environment with that library. Prints what each has read; exits
with 1 if a sample differs. What the test environment has is in tests/tar/test_interop.py.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile

from wds_pipes import ShardWriter

COUNT, FIELDS = 60, ("cls", "dat", "txt")

# Each prints a list of [key or null, {field: content in hexadecimal}].
PROGRAMS = {
    "datasets": """
import datasets, glob, json, sys
rows = datasets.load_dataset("webdataset", data_files=sorted(glob.glob(sys.argv[1] + "/*.tar")), split="train",
                             cache_dir=sys.argv[1] + "/cache")
plain = lambda value: value if isinstance(value, bytes) else str(value).encode()
print(json.dumps([[row["__key__"], {name: plain(row[name]).hex() for name in ("cls", "dat", "txt")}] for row in rows]))
""",
    "energon": """
import json, sys
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_loader, get_train_dataset, stateless
from megatron.energon.cli.main import main
options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CrudeWebdataset --num-workers 1"
try:
    main(["prepare", sys.argv[1], *options.split()], standalone_mode=False)
finally:
    sys.stdout.flush()
@stateless
def cook(sample):
    return dict(sample)
class Encoder(DefaultTaskEncoder):
    decoder, cookers = None, (Cooker(cook),)
    @stateless
    def encode_sample(self, sample):
        return sample
found = get_train_dataset(sys.argv[1], worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=None,
                          shuffle_buffer_size=None, max_samples_per_sequence=None, task_encoder=Encoder(), repeat=False)
rows = [[s["__key__"].split("/")[-1], {n: s[n].hex() for n in ("cls", "dat", "txt")}] for s in get_loader(found)]
print(json.dumps(rows))
""",
    "dali": """
import glob, json, sys
import wds2idx
from nvidia.dali import Pipeline, fn
paths = sorted(glob.glob(sys.argv[1] + "/*.tar"))
for path in paths:
    with wds2idx.IndexCreator(path, path + ".dali") as creator:
        creator.create_index()
pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None)
with pipeline:
    read = fn.readers.webdataset(paths=paths, index_paths=[path + ".dali" for path in paths], ext=["cls", "dat", "txt"])
    pipeline.set_outputs(*read)
pipeline.build()
rows = []
for _ in range(int(sys.argv[2])):
    rows.append([None, {name: out.at(0).tobytes().hex() for name, out in zip(("cls", "dat", "txt"), pipeline.run())}])
print(json.dumps(rows))
""",
}


def samples():
    for number in range(COUNT):
        data = hashlib.sha256(str(number).encode()).digest() * number
        yield {"__key__": f"{number:06d}", "txt": f"größe {number}", "cls": number, "dat": data or b"\0"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in PROGRAMS:
        parser.add_argument(f"--{name}", metavar="PYTHON")
    chosen = {name: python for name, python in vars(parser.parse_args()).items() if python}
    expected = {
        sample["__key__"]: {
            name: (sample[name] if name == "dat" else str(sample[name]).encode()).hex() for name in FIELDS
        }
        for sample in samples()
    }
    wrong = []
    for name, python in chosen.items():
        with tempfile.TemporaryDirectory() as folder:
            with ShardWriter(f"{folder}/x-%d.tar", max_samples=25) as writer:
                for sample in samples():
                    writer.write(sample)
            run = [python, "-c", PROGRAMS[name], folder, str(COUNT)]
            done = subprocess.run(run, capture_output=True, text=True, check=False)
        rows = json.loads(done.stdout.splitlines()[-1]) if not done.returncode else []
        if name == "dali":  # its samples have no keys
            same = [fields for _, fields in rows] == list(expected.values())
        else:
            same = dict(rows) == expected and len(rows) == COUNT
        print(f"{name}: {len(rows)} samples, {'all as written' if same else 'NOT as written'}")
        if not same:
            wrong.append(name)
            print(done.stderr[-2000:], rows[:1])
    if wrong or not chosen:
        sys.exit(f"not read as written: {', '.join(wrong)}" if wrong else "name at least one library")


if __name__ == "__main__":
    main()
