"""WdsDataModule with the real Trainer: after a resume it trains on what an uninterrupted run would
have trained on.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import warm

from wds_pipes.testing import make_shards

if not find_spec("lightning"):  # imported only by the processes that train
    pytest.skip("needs Lightning: pip install 'wds_pipes[lightning]'", allow_module_level=True)

SHARDS, SAMPLES, BATCH = 6, 6, 3
STEPS = {1: 12, 2: 6}  # of an epoch, on so many ranks
CUTS = {1: ("batch-6", "batch-12", "validation-4", "epoch-12"), 2: ("batch-3", "batch-6", "validation-4", "epoch-6")}
KEYS = {f"{number:08d}" for number in range(SHARDS * SAMPLES)}


class Runs:
    """Collects runs and starts them all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        train = make_shards(directory / "train", shards=SHARDS, samples=SAMPLES)
        val = make_shards(directory / "val", shards=2, samples=SAMPLES)
        self.common = {"train": train, "val": val, "validate": 4}
        self.rounds = []

    def round(self, ranks, runs):
        """Runs, by name, of so many ranks: each in a process that does all of them, one after
        the other.
        """
        self.rounds.append(
            {
                "ranks": ranks,
                "runs": [self.common | {"out": str(self.directory / name)} | plan for name, plan in runs.items()],
            }
        )

    def start(self):
        plan = self.directory / "plan.json"
        plan.write_text(json.dumps(self.rounds))
        done = warm.run(Path(__file__).with_name("lightning_runs.py"), plan)
        assert done.returncode == 0, done.stderr[-5000:]

    def lines(self, name, ranks):
        return [
            [json.loads(line) for line in (self.directory / f"{name}-{rank}.jsonl").read_text().splitlines()]
            for rank in range(ranks)
        ]

    def keys(self, name, ranks):
        """The batches that each rank was trained on."""
        return [[line["keys"] for line in lines if "keys" in line] for lines in self.lines(name, ranks)]


def flat(ranks):
    return [key for batches in ranks for batch in batches for key in batch]


CELLS = [(1, True, True), (1, False, False), (2, True, False), (2, False, True)]  # ranks, sized, estimate
# Not from one rank to two where samples are not counted: their numbers of batches would differ, and
# training would hang.
ELASTIC = [cell for cell in CELLS if cell[:2] != (1, False)]

KILLED = [(1, False), (2, True)]


def name_of(ranks, sized, estimate):
    return f"{ranks}-{'sized' if sized else 'unsized'}-{'estimate' if estimate else 'plain'}"


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """Uninterrupted runs that save at each cut; a resume of each on as many ranks, and on
    another number; and runs that are killed, twice.
    """
    runs = Runs(tmp_path_factory.mktemp("lightning"))
    saved = lambda name, cut: str(runs.directory / f"{name}-{cut}.ckpt")  # noqa: E731
    for ranks in (1, 2):
        cells = {name_of(*cell): {"sized": cell[1], "estimate": cell[2]} for cell in CELLS if cell[0] == ranks}
        whole = {name: plan | {"saves": {cut: saved(name, cut) for cut in CUTS[ranks]}} for name, plan in cells.items()}
        again = {
            f"{name}-{cut}": plan | {"load": saved(name, cut)} for name, plan in cells.items() for cut in CUTS[ranks]
        }
        runs.round(ranks, whole | again)
    for ranks, other in ((1, 2), (2, 1)):
        cells = {name_of(*cell): {"sized": cell[1], "estimate": cell[2]} for cell in ELASTIC if cell[0] == ranks}
        runs.round(
            other,
            {
                f"{name}-{cut}-on-{other}": plan | {"load": saved(name, cut)}
                for name, plan in cells.items()
                for cut in CUTS[ranks]
            },
        )
    for ranks, sized in KILLED:
        name = f"killed-{ranks}-{sized}"
        plan = {
            "sized": sized,
            "directory": str(runs.directory / name),
            "every": 2,
            "load": "last",
            "workers": 2 if ranks == 1 else 0,
            "lanes": 2,
        }
        runs.round(ranks, {f"{name}-whole": {"sized": sized, "lanes": 2}})
        runs.round(ranks, {f"{name}-first": plan | {"kill": 3}})
        runs.round(ranks, {f"{name}-second": plan | {"kill": "validation"}})
        runs.round(ranks, {f"{name}-third": plan})
    runs.start()
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sized", "estimate"), CELLS)
def test_a_resumed_run_is_trained_on_what_the_uninterrupted_one_was(ranks, sized, estimate, matrix):
    """Saved in mid-epoch, after the last batch, inside validation, and at the end of the epoch."""
    name = name_of(ranks, sized, estimate)
    whole = matrix.keys(name, ranks)
    assert [len(batches) for batches in whole] == [2 * STEPS[ranks]] * ranks
    for epoch in range(2):
        assert sorted(flat(batches[epoch * STEPS[ranks] : (epoch + 1) * STEPS[ranks]] for batches in whole)) == sorted(
            KEYS
        )
    for cut in CUTS[ranks]:
        done = int(cut.split("-")[1])
        assert matrix.keys(f"{name}-{cut}", ranks) == [batches[done:] for batches in whole], cut
    if estimate and sized:
        assert matrix.lines(name, ranks)[0][0] == {"estimate": 2 * STEPS[ranks]}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sized", "estimate"), ELASTIC)
def test_on_another_number_of_ranks_each_remaining_sample_comes_once(ranks, sized, estimate, matrix):
    name, other = name_of(ranks, sized, estimate), 3 - ranks
    whole = matrix.keys(name, ranks)
    for cut in CUTS[ranks]:
        done = int(cut.split("-")[1])
        before = flat(batches[:done] for batches in whole)
        after = matrix.keys(f"{name}-{cut}-on-{other}", other)
        left = len(KEYS) - len(before)
        steps = -(-left // (BATCH * other)) if left else 0
        assert sorted(before + flat(batches[:steps] for batches in after)) == sorted(KEYS), cut
        assert sorted(flat(batches[steps:] for batches in after)) == sorted(KEYS), cut


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sized"), KILLED)
def test_killed_by_sigkill_twice(ranks, sized, matrix):
    """In mid-epoch, and inside validation; each time it resumes from ckpt_path="last", which is
    saved every two steps.
    """
    name = f"killed-{ranks}-{sized}"
    first, second, third = (matrix.keys(f"{name}-{part}", ranks) for part in ("first", "second", "third"))
    for rank, whole in enumerate(matrix.keys(f"{name}-whole", ranks)):
        assert first[rank] == whole[:3]
        assert second[rank] == whole[2:4]
        assert third[rank] == whole[4:]
