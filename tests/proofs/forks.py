"""Workers that are forked while other threads make and end thread states of Python, as those of
gloo and NCCL do. On Python to 3.11 some of them hang at the fork (gh-112275), and are replaced.

    python tests/proofs/forks.py [--rounds 200] [--minutes M]

Each loader must give the same samples. Prints how many loaders ran and how many starts hung.
"""

import ctypes
import tempfile
import threading

from amount import parser, rounds

import wds_pipes as wp
from wds_pipes.loader import workers
from wds_pipes.testing import make_shards

FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


@FUNCTION
def run_python(_):
    return 0


def churn():
    """Start threads that Python does not know: each gets a thread state for one call."""
    library = ctypes.CDLL("libpthread.so.0")
    while True:
        threads = [ctypes.c_ulong() for _ in range(20)]
        for thread in threads:
            library.pthread_create(ctypes.byref(thread), None, run_python, None)
        for thread in threads:
            library.pthread_join(thread, None)


def main():
    options = parser(__doc__, 200).parse_args()
    workers._START_SECONDS = 3
    hung, find = [], workers.Workers._hung

    def count(started):
        found = find(started)
        hung.extend(found)
        return found

    workers.Workers._hung = count
    for _ in range(3):
        threading.Thread(target=churn, daemon=True).start()
    with tempfile.TemporaryDirectory() as directory:
        urls, whole, ran = make_shards(directory, shards=2, samples=20), None, 0
        for _ in rounds(options):
            pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
            loader = wp.PipeLoader(pipe, batch_size=4, collate="list", num_workers=1, multiprocessing_context="fork")
            keys = [sample["__key__"] for batch in loader for sample in batch]
            loader.close()
            whole = whole or keys
            assert keys == whole
            ran += 1
    print(f"loaders={ran} hung_and_replaced={len(hung)} wrong=0")


if __name__ == "__main__":
    main()
