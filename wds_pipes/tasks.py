"""Jobs that write files as independent tasks, on one machine or on many: the ground on which the
commands of ``wds-pipes`` stand. It works without torch.

A task has outputs whose names are known beforehand, and can be run again at any time with the same
result. The directory of the outputs says which tasks are finished, and from which inputs::

    from wds_pipes import tasks

    def count(task, place):  # a function of a module
        lines = sum(1 for _ in open(task.arguments))
        place.write(task.outputs[0], str(lines).encode())
        return {"lines": lines}

    def main():
        job = tasks.Job(
            "count", tasks.Place("counts"), count,
            [tasks.Task(name, (f"{name}.txt",), name, tasks.fingerprint(os.stat(name).st_mtime_ns)) for name in names],
        )
        print(tasks.run(job, jobs=4).facts)
"""  # noqa: W505

from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Engine, Job, Outcome, Place, Report, Task, fingerprint

__all__ = ["Engine", "Job", "Outcome", "Place", "Report", "Task", "fingerprint", "run"]
