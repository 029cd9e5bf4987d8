"""How often half a sample is returned silently: shards that are cut at random, or in which a page
is zeroed.

    python tests/bench/half_samples.py [TRIALS]      (default 400 of each sort and size; takes a
    minute)

Each trial reads one damaged shard with default options and once with on_error="skip". Prints, for
each size of the images, how many trials gave a sample that lacks fields, and how many of these
silently (no error, no warning, no count). Exits with 1 if any did, but where the zeros reach the
end of the file, which cannot be told from an end: these are counted apart.
"""

import logging
import random
import sys
import tempfile
import warnings
from pathlib import Path

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
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    logging.disable()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.tar"
        for image_bytes in (100, 2_000, 20_000):
            rng = random.Random(image_bytes)
            whole = shard(path, image_bytes, rng)
            for sort in ("cut", "zeroed page"):
                halves = silent = lost = ends = 0
                for _ in range(trials):
                    place = rng.randrange(1, len(whole)) if sort == "cut" else rng.randrange(len(whole) // 4096) * 4096
                    damaged = whole[:place] if sort == "cut" else whole[:place] + bytes(4096) + whole[place + 4096 :]
                    path.write_bytes(damaged)
                    to_end = sort != "cut" and not damaged[place:].strip(b"\0")
                    for on_error in ("raise", "skip"):
                        came, half, reported = read(path, on_error)
                        halves += half > 0
                        silent += half > 0 and not reported and not to_end
                        lost += came < SAMPLES and not reported and not to_end
                        ends += (half > 0 or came < SAMPLES) and not reported and to_end
                found = f"{halves} gave half a sample, {silent} silently; {lost} lost samples silently; "
                found += f"{ends} of either with zeros up to the end"
                print(f"images of {image_bytes:>6} bytes, {sort:<12} {trials} trials x 2: {found}")
                failed += silent
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
