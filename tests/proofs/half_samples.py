"""How often half a sample is returned silently: shards that are cut at random, or in which a page
is zeroed.

    python tests/proofs/half_samples.py [--rounds 2400] [--minutes M] [--seed N]

Each round reads one damaged shard with default options and once with on_error="skip". Prints, for
each size of the images, how many reads gave a sample that lacks fields, and how many of these
silently (no error, no warning, no count). Exits with 1 if any did. Whole samples that are lost to
zeros which reach the end of the file cannot be told from an end: these are counted apart.
"""

import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

from amount import parser, rounds

import wds_pipes as wp

SAMPLES = 40


def shard(path: Path, image_bytes: int, rng: random.Random) -> bytes:
    """A shard of samples with an image of about ``image_bytes`` bytes, a class and a caption."""
    with wp.TarWriter(path, overwrite=True) as writer:
        for number in range(SAMPLES):
            image = rng.randbytes(rng.randrange(image_bytes // 2, image_bytes * 3 // 2))
            writer.write({"__key__": f"{number:05d}", "cls": number % 10, "jpg": image, "txt": f"caption {number}"})
    return path.read_bytes()


def read(path: Path, on_error: str) -> tuple[int, int, bool]:
    """How many samples came, how many of them are half, and whether an error, a warning or a count
    reported it.
    """
    pipe = wp.ShardList(str(path)).open_shards().load_tar(on_error=on_error).group_by_key(on_error=on_error)
    came = half = 0
    reported = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for sample in pipe:
                came += 1
                half += not sample.keys() >= {"cls", "jpg", "txt"}
        except wp.WdsError:
            reported = True
        counts = pipe.counts()
    return came, half, reported or bool(caught) or any(counts.get(name, 0) for name in ("skipped", "damaged"))


def main() -> None:
    options = parser(__doc__, 2400).parse_args()
    logging.disable()
    rng, found, tried = random.Random(options.seed), {}, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        wholes = {image_bytes: shard(path, image_bytes, rng) for image_bytes in (100, 2_000, 20_000)}
        for _ in rounds(options):
            tried += 1
            image_bytes, sort = rng.choice(list(wholes)), rng.choice(["cut", "zeroed page"])
            whole = wholes[image_bytes]
            place = rng.randrange(1, len(whole)) if sort == "cut" else rng.randrange(len(whole) // 4096) * 4096
            damaged = whole[:place] if sort == "cut" else whole[:place] + bytes(4096) + whole[place + 4096 :]
            path.write_bytes(damaged)
            to_end = sort != "cut" and not damaged[place:].strip(b"\0")
            tally = found.setdefault((image_bytes, sort), Counter())
            for on_error in ("raise", "skip"):
                came, half, reported = read(path, on_error)
                tally["reads"] += 1
                tally["half"] += half > 0
                tally["silent"] += half > 0 and not reported
                tally["lost_silently"] += came < SAMPLES and not reported and not to_end
                tally["zeros_to_the_end"] += came < SAMPLES and not reported and to_end
    for (image_bytes, sort), tally in sorted(found.items()):
        print(f"images of {image_bytes:>6} bytes, {sort:<12} {dict(tally)}")
    total = sum(found.values(), Counter())
    figures = " ".join(f"{name}={total[name]}" for name in ("half", "silent", "lost_silently", "zeros_to_the_end"))
    print(f"trials={tried} {figures} seed={options.seed}")
    sys.exit(1 if total["silent"] else 0)


if __name__ == "__main__":
    main()
