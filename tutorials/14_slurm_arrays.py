# %% [markdown]
# # Shards made by an array of Slurm jobs
#
# **You learn** how to run a command of `wds-pipes` as independent shares: an array of Slurm,
# Kubernetes jobs, or terminals on several machines; what happens if one of them is killed, and how
# to know that all is there.
#
# **You need** `pip install wds_pipes`. Slurm is not needed: a loop plays it here.

# %%
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there


def command(*arguments, fails=False):
    """Run a command of wds-pipes, as a terminal or a job script would."""
    done = subprocess.run([sys.executable, "-m", "wds_pipes", *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == fails, done.stderr
    print((done.stderr if fails else done.stdout).strip())


# %% [markdown]
# ## The data
#
# All machines see the same files: on a disk that they share, or in a store (`s3://`, `gs://`, ...).

# %%
numbers = random.Random(0)
for number in range(60):
    path = Path("photos", f"{number:04d}.bin")  # photos would be .jpg
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(numbers.randbytes(numbers.randrange(1000, 5000)))
    path.with_suffix(".json").write_text(json.dumps({"number": number}))

# %% [markdown]
# ## One share
#
# A command that writes shards is a list of tasks, and the names of what they write are known
# beforehand. `--dry-run` shows them. `--task 0 --tasks 4` is the first of four shares.

# %%
create = ["create", "photos", "shards", "--max-samples", "10", "--shuffle", "7"]
command(*create, "--dry-run")
command(*create, "--task", "0", "--tasks", "4")

# %% [markdown]
# ## An array
#
# Each element of an array runs one share. This is the whole job script, after its first line,
# `#!/bin/bash`:
#
# ```bash
# #SBATCH --array=0-3
# #SBATCH --cpus-per-task=4
# #SBATCH --requeue
# wds-pipes create photos shards --max-samples 10 --shuffle 7 \
#     --task $SLURM_ARRAY_TASK_ID --tasks 4 -j $SLURM_CPUS_PER_TASK
# ```
#
# Elements run at any time, in any order, and several at once. What is finished is skipped, so an
# element may be submitted again. When Slurm ends a job (SIGTERM, then SIGKILL), what was being
# written is discarded; nothing incomplete has a final name. Here element 2 never ran:

# %%
for element in (3, 1, 0):
    command(*create, "--task", str(element), "--tasks", "4")
print(sorted(os.listdir("shards")))

# %% [markdown]
# Some shards are left, so there is no `index.json` yet. The element that finds all others finished
# writes it, whichever it is:

# %%
command(*create, "--task", "2", "--tasks", "4")
assert "index.json" in os.listdir("shards")

# %% [markdown]
# Without `--task`, the command finishes what is left, and says so if nothing is:

# %%
command(*create)

# %% [markdown]
# ## The same bytes
#
# Which process writes a shard does not change it. One process makes the same data set:


# %%
def digest(folder):
    files = [path for path in sorted(Path(folder).iterdir()) if path.is_file()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


command("create", "photos", "again", "--max-samples", "10", "--shuffle", "7")
assert digest("again") == digest("shards")
print(len(digest("shards")), "files with the same SHA-256")

# %% [markdown]
# With other options, the directory is refused: it belongs to one job.

# %%
command("create", "photos", "shards", "--max-samples", "20", fails=True)

# %% [markdown]
# ## Check it
#
# `verify` reads all shards, and compares them with `index.json`. Its exit code is 1 if something is
# wrong, so a job script can stop there.

# %%
command("verify", "shards")

# %% [markdown]
# An array that depends on the first one starts when all its elements have ended well:
#
# ```bash
# made=$(sbatch --parsable create.sh)
# sbatch --dependency=afterok:$made verify.sh
# ```
#
# Kubernetes has the same in an indexed job: `--task $JOB_COMPLETION_INDEX --tasks 4`. For a function
# of your own, `wds_pipes.tasks.run(job, share=(0, 4))` runs a share.
#
# ## What to read next
#
# - `15_ray` runs the same commands on a Ray cluster, which shares the tasks by itself.
# - [Jobs that write files](docs/reference/tasks): the rules of tasks, and your own.
# - `04_ranks_and_elastic_resume` trains on several machines.
