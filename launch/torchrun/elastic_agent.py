"""Start torchrun with three changes that an elastic job needs. elastic.sh calls it with its flags.

1. When a node joins or leaves, the ranks of all nodes save and end together, with exit code 75. A
   torchrun that has not heard of the change yet counts that as a failure, and uses up one of
   --max-restarts. Here 75 does not count.
2. A torchrun that has heard of the change gives its ranks 30 s to end, whatever --shutdown-timeout
   says. Here it gives them TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
3. Nodes whose clocks differ think that the others are dead, and torchrun then lets one train alone,
   whatever MIN is. Here no node trains in a group smaller than MIN: it ends with an error.

torchrun has no hooks for this, so this file replaces three of its methods.
"""

import os
import signal
import sys

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.run import main

SAVED_AND_STOPPED = 75  # common/exits.py
torchruns_monitor = LocalElasticAgent._monitor_workers
torchruns_stop = LocalElasticAgent._stop_workers
torchruns_get_world = DynamicRendezvousHandler._get_world


def monitor(agent, *args, **kwargs):
    """Check the ranks, and do not count a failure in which all of them have saved and ended."""
    result = torchruns_monitor(agent, *args, **kwargs)
    if result.is_failed():
        exit_codes = {failure.exitcode for failure in result.failures.values()}
        if exit_codes == {SAVED_AND_STOPPED}:
            agent._remaining_restarts += 1  # the restart that follows takes it back
    return result


def stop(agent, *args, **kwargs):
    """Stop the ranks. Give them the time that TORCH_ELASTIC_SHUTDOWN_TIMEOUT says."""
    if agent._pcontext is not None:
        seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        agent._pcontext.close(signal.SIGTERM, seconds)
    return torchruns_stop(agent, *args, **kwargs)


def get_world(handler):
    """Return rank and size of the group of nodes. End this node if the group is too small."""
    rank, size = torchruns_get_world(handler)
    least = handler.settings.min_nodes
    if size < least:
        problem = f"{size} of at least {least} nodes left: the others are dead, or clocks differ"
        print(f"elastic.sh: error: {problem}: set all by NTP", file=sys.stderr, flush=True)
        os._exit(1)  # from any thread; the ranks end with this process (PR_SET_PDEATHSIG)
    return rank, size


LocalElasticAgent._monitor_workers = monitor
LocalElasticAgent._stop_workers = stop
DynamicRendezvousHandler._get_world = get_world
main()
