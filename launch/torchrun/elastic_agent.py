"""torchrun, except for ranks that save and stop because a node comes or goes, and for clocks that are apart.

The ranks of all nodes then end together with exit code 75. A torchrun that has not yet heard of the change takes that
for a failure and uses up one of --max-restarts: a few changes, and the job would be over. Here 75 does not count.
One that has heard gives its ranks 30 s, whatever its --shutdown-timeout: here it is that of elastic.sh.

Nodes whose clocks are apart take each other for dead, and torchrun lets one train alone, whatever MIN is. A heartbeat
from the future proves it: here the node that sees one ends, and no node trains in a group smaller than MIN.
"""

import os
import signal
import sys
from datetime import UTC, datetime
from typing import NoReturn

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous
from torch.distributed.run import main

SAVED_AND_STOPPED = 75  # common/exits.py
Handler, Holder = rendezvous.DynamicRendezvousHandler, rendezvous._BackendRendezvousStateHolder
monitor_workers, stop_workers = LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers
init, get_world, remove_the_dead = Handler.__init__, Handler._get_world, Holder._sanitize


def end(problem: str) -> NoReturn:
    print(f"elastic.sh: error: {problem}", file=sys.stderr, flush=True)
    os._exit(1)  # from any thread; the ranks end with this process (PR_SET_PDEATHSIG)


def monitor(agent, *args, **kwargs):
    result = monitor_workers(agent, *args, **kwargs)
    if result.is_failed() and {failure.exitcode for failure in result.failures.values()} == {SAVED_AND_STOPPED}:
        agent._remaining_restarts += 1  # the restart that follows takes it back
    return result


def stop(agent, *args, **kwargs):
    if agent._pcontext is not None:
        agent._pcontext.close(signal.SIGTERM, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))
    return stop_workers(agent, *args, **kwargs)


def init_with_name(handler, node, settings, backend_name, store, state_holder):
    state_holder.this_node = node
    init(handler, node, settings, backend_name, store, state_holder)


def compare_clocks(holder):
    """After each reading of the state that the nodes share, before the dead are taken out of it."""
    limit = holder._settings.keep_alive_interval * holder._settings.keep_alive_max_attempt
    for node, heartbeat in holder.state.last_heartbeats.items():
        ahead = heartbeat - datetime.now(UTC)
        if node != holder.this_node and ahead > limit:
            end(f"the clock of {node.addr} is {ahead.total_seconds():.0f} s ahead of this node's: set both by NTP")
    remove_the_dead(holder)


def get_whole_world(handler):
    rank, size = get_world(handler)
    if size < handler.settings.min_nodes:
        least = handler.settings.min_nodes
        end(f"{size} of at least {least} nodes left: the others are dead, or their clocks behind: set all by NTP")
    return rank, size


LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers = monitor, stop
Handler.__init__, Handler._get_world, Holder._sanitize = init_with_name, get_whole_world, compare_clocks
main()
