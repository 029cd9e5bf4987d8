"""Jobs that write files as independent tasks, on one machine or on many: the ground on which the
commands of ``wds-pipes`` stand. It works without torch.

A task has outputs whose names are known beforehand, and can be run again at any time with the same
result. The directory of the outputs says which tasks are finished, and from which inputs.
"""

from wds_pipes.io.tasks.on_ray import on_ray
from wds_pipes.io.tasks.running import run
from wds_pipes.io.tasks.task import Engine, Job, Outcome, Place, Report, Task, fingerprint
from wds_pipes.tar.writer import shard_files, write_shard

__all__ = [
    "Engine",
    "Job",
    "Outcome",
    "Place",
    "Report",
    "Task",
    "fingerprint",
    "on_ray",
    "run",
    "shard_files",
    "write_shard",
]
