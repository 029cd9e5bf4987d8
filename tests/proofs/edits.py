"""Random histories with ten edits each: samples are left out, shards are added, the weights and the
sources of a mix change. After each edit the run goes on from its states.

    python tests/proofs/edits.py [--rounds 300] [--minutes M] [--seed N]
                                   [--kind one|ranks|loop|list|mix]

What must come is known from runs without edits. ``one``: a stream on one lane, in its order.
``ranks``: on changing ranks, each sample of an epoch once. ``loop``: the same without an end.
``list``: a SampleList on changing ranks and batch sizes, in its order, which grows. ``mix``: each
source in its order, in proportion to the weights. Exit code 1 if one history differs; ``--only
NUMBER`` with the same seed repeats it.
"""

import sys
import tempfile

from amount import history_parser, run_histories
from edit_histories import EDITS, KINDS, use_shards


def main():
    options = history_parser(__doc__, KINDS).parse_args()
    with tempfile.TemporaryDirectory() as directory:
        use_shards(directory)
        return run_histories(options, KINDS, f" edits={EDITS} each")


if __name__ == "__main__":
    sys.exit(main())
