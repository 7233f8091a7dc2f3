"""``accel-nb launch``: run a script, a module or a notebook as a job; the exit status is the job's."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from accel_nb.cli.command_failed import CommandFailed
from accel_nb.launch.job import LaunchJob
from accel_nb.launch.request import read_request

USAGE = """\
accel-nb launch [FLAGS] SCRIPT.py|-m MODULE|NOTEBOOK.ipynb [ARGUMENTS]

Flags precede the target; arguments after it are passed to it unchanged. FLAGS are the options of a run (accel-nb config
flags lists them), such as --cpus N, --gpus N, --precision bf16, --checkpoint DIR, --resume auto, --dry-run, and

  --nnodes N|MIN:MAX         train on several machines; start the same command on each
  --node-rank N              this machine's number, from 0
  --rdzv-backend c10d|static how machines find each other
  --rdzv-endpoint HOST:PORT  the address of the rendezvous
  --rdzv-id ID               the job's name, if several jobs use one rendezvous
  --max-restarts N           restart all ranks up to N times if one fails; from the newest checkpoint with --checkpoint
  --slurm                    write a batch file and submit it
  --sbatch NAME=VALUE        an option of sbatch, as in --sbatch time=2:00:00; may be repeated
  --emit kubeflow            print a TrainJob manifest instead of running
  --image IMAGE              the manifest's container image
  --out FILE                 write a notebook with its outputs there
  --config-file FILE         use the values of a file that `accelerate config` wrote; notes say which have no effect

Under mpirun and srun, the ranks that these start are the ranks of the job."""


class JobFailed(CommandFailed):
    """The job ended with exit code ``code``, and has printed the reason."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__("")


def run(words: Sequence[str]) -> str:
    """Run the job to its end. Raise JobFailed with its exit code, and ConfigError for wrong input."""
    if list(words) in ([], ["--help"], ["-h"]):
        return USAGE + "\n"
    job = LaunchJob.from_request(read_request(words))
    if job.resolved.config.dry_run:
        return job.plan() + "\n"
    for note in job.notes:
        print(f"note: {note}", file=sys.stderr)
    ending = job.run()
    if ending.code:
        raise JobFailed(ending.code)
    return ""
