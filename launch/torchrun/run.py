"""Run torchrun, and end with exit code 75 if all its ranks did. The flags are those of torchrun.

    python launch/torchrun/run.py --standalone --nproc_per_node=8 05_ddp/train.py --save-every 100

Ranks that were told to stop save and end with 75, which means: start me again. torchrun itself ends
with 1 then, as after an error. If the nodes do not meet, this file prints one line.
"""

import subprocess
import sys

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.run import main

SAVED_AND_STOPPED = 75  # common/exits.py
ranks = {}  # by local rank: its process, the newest after a restart


class Rank(subprocess.Popen):
    """A process that torchrun starts."""

    def __init__(self, *args, env: dict[str, str], **kwargs) -> None:
        super().__init__(*args, env=env, **kwargs)
        ranks[env["LOCAL_RANK"]] = self


def run() -> None:
    """Run torchrun with the flags of the command line."""
    subprocess_handler.Popen = Rank
    try:
        main()
    except (ChildFailedError, SignalException):
        if {rank.returncode for rank in ranks.values()} == {SAVED_AND_STOPPED}:
            sys.exit(SAVED_AND_STOPPED)
        raise
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"launch/torchrun/run.py: error: the nodes did not meet: {reason}")


if __name__ == "__main__":
    run()
