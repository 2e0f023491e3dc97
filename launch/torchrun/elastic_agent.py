"""torchrun with three changes that an elastic job needs. elastic.sh starts it; the flags are torchrun's.

1. A node comes or goes, and the ranks of all nodes save and end together with exit code 75. A torchrun that has not
   yet heard of the change takes that for a failure and uses up one of --max-restarts. Here 75 does not count.
2. A torchrun that has heard of the change gives its ranks 30 s to end, whatever its --shutdown-timeout says. Here it
   gives them TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
3. Nodes whose clocks are apart take each other for dead, and torchrun then lets one train alone, whatever MIN is.
   Here no node trains in a group smaller than MIN: it ends with an error.

torchrun has no hooks for this, so the methods in question are replaced.
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
    result = torchruns_monitor(agent, *args, **kwargs)
    if result.is_failed():
        exit_codes = {failure.exitcode for failure in result.failures.values()}
        if exit_codes == {SAVED_AND_STOPPED}:
            agent._remaining_restarts += 1  # the restart that follows takes it back
    return result


def stop(agent, *args, **kwargs):
    if agent._pcontext is not None:
        seconds = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
        agent._pcontext.close(signal.SIGTERM, seconds)
    return torchruns_stop(agent, *args, **kwargs)


def get_whole_world(handler):
    rank, size = torchruns_get_world(handler)
    least = handler.settings.min_nodes
    if size < least:
        problem = f"{size} of at least {least} nodes left: the others are dead, or clocks are apart: set all by NTP"
        print(f"elastic.sh: error: {problem}", file=sys.stderr, flush=True)
        os._exit(1)  # from any thread; the ranks end with this process (PR_SET_PDEATHSIG)
    return rank, size


LocalElasticAgent._monitor_workers = monitor
LocalElasticAgent._stop_workers = stop
DynamicRendezvousHandler._get_world = get_whole_world
main()
