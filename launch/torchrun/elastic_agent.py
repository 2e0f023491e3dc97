"""torchrun, except for what it makes of ranks that save and stop because a node comes or goes.

The ranks of all nodes then end together with exit code 75. A torchrun that has not yet heard of the change takes that
for a failure and uses up one of --max-restarts: a few changes, and the job would be over. Here 75 does not count.
One that has heard gives its ranks 30 s, whatever its --shutdown-timeout: here it is that of elastic.sh.
"""

import os
import signal

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.run import main

SAVED_AND_STOPPED = 75  # common/exits.py
monitor_workers, stop_workers = LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers


def monitor(agent, *args, **kwargs):
    result = monitor_workers(agent, *args, **kwargs)
    if result.is_failed() and {failure.exitcode for failure in result.failures.values()} == {SAVED_AND_STOPPED}:
        agent._remaining_restarts += 1  # the restart that follows takes it back
    return result


def stop(agent, *args, **kwargs):
    if agent._pcontext is not None:
        agent._pcontext.close(signal.SIGTERM, int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]))
    return stop_workers(agent, *args, **kwargs)


LocalElasticAgent._monitor_workers, LocalElasticAgent._stop_workers = monitor, stop
main()
