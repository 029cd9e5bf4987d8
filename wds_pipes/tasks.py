"""Jobs that write files as independent tasks, on one machine or on many: the ground on which the
commands of ``wds-pipes`` stand. It works without torch.

A task has outputs whose names are known beforehand, and can be run again at any time with the same
result. The directory of the outputs says which tasks are finished, and from which inputs::

    import wds_pipes.tasks as tasks

    def merge(task, place):  # a function of a module, which other processes import
        samples = (sample for url in task.arguments for sample in read(url))
        return tasks.write_shard(place.at(task.name), samples)._asdict()

    groups = {f"merged-{n:03d}.tar": urls[2 * n : 2 * n + 2] for n in range(len(urls) // 2)}
    parts = [
        tasks.Task(name, tasks.shard_files(name), group, tasks.fingerprint(group))
        for name, group in groups.items()
    ]
    if __name__ == "__main__":
        tasks.run(tasks.Job("merge", tasks.Place("merged"), merge, parts), jobs=4)
"""

from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Engine, Job, Outcome, Place, Report, Task, fingerprint
from wds_pipes.tar.shard_file import shard_files, write_shard

__all__ = [
    "Engine",
    "Job",
    "Outcome",
    "Place",
    "Report",
    "Task",
    "fingerprint",
    "run",
    "shard_files",
    "write_shard",
]
