"""torchrun with three changes that an elastic job needs. elastic.sh starts it; the flags are torchrun's.

1. A node comes or goes, and the ranks of all nodes save and end together with exit code 75. A torchrun that has not
   yet heard of the change takes that for a failure and uses up one of --max-restarts. Here 75 does not count.
2. A torchrun that has heard of the change gives its ranks 30 s to end, whatever its --shutdown-timeout says. Here it
   gives them TORCH_ELASTIC_SHUTDOWN_TIMEOUT.
3. Nodes whose clocks are apart take each other for dead, and torchrun then lets one train alone, whatever MIN is.
   A heartbeat from the future proves that the clocks are apart: the node that sees one ends with an error. And no node
   trains in a group smaller than MIN.

torchrun has no hooks for this, so the methods in question are replaced.
"""

import os
import signal
import sys
from datetime import UTC, datetime
from typing import NoReturn

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _BackendRendezvousStateHolder,
)
from torch.distributed.run import main

SAVED_AND_STOPPED = 75  # common/exits.py
torchruns_monitor = LocalElasticAgent._monitor_workers
torchruns_stop = LocalElasticAgent._stop_workers
torchruns_init = DynamicRendezvousHandler.__init__
torchruns_get_world = DynamicRendezvousHandler._get_world
torchruns_remove_the_dead = _BackendRendezvousStateHolder._sanitize


def end(problem: str) -> NoReturn:
    print(f"elastic.sh: error: {problem}", file=sys.stderr, flush=True)
    os._exit(1)  # from any thread; the ranks end with this process (PR_SET_PDEATHSIG)


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


def init_with_name(handler, node, settings, backend_name, store, state_holder):
    state_holder.this_node = node
    torchruns_init(handler, node, settings, backend_name, store, state_holder)


def compare_clocks(holder):
    """After each reading of the state that the nodes share, before the dead are removed from it."""
    limit = holder._settings.keep_alive_interval * holder._settings.keep_alive_max_attempt
    for node, heartbeat in holder.state.last_heartbeats.items():
        ahead = heartbeat - datetime.now(UTC)
        if node != holder.this_node and ahead > limit:
            end(f"the clock of {node.addr} is {ahead.total_seconds():.0f} s ahead of this node's: set both by NTP")
    torchruns_remove_the_dead(holder)


def get_whole_world(handler):
    rank, size = torchruns_get_world(handler)
    least = handler.settings.min_nodes
    if size < least:
        end(f"{size} of at least {least} nodes left: the others are dead, or their clocks behind: set all by NTP")
    return rank, size


LocalElasticAgent._monitor_workers = monitor
LocalElasticAgent._stop_workers = stop
DynamicRendezvousHandler.__init__ = init_with_name
DynamicRendezvousHandler._get_world = get_whole_world
_BackendRendezvousStateHolder._sanitize = compare_clocks
main()
