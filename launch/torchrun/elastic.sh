#!/usr/bin/env bash
# Train on as many nodes as there are at the moment, MIN to MAX. The same command on each, at any time:
#
#     NNODES=1:4 RDZV_ENDPOINT=node0:29400 launch/torchrun/elastic.sh --run-dir /shared/run --save-every 100
#
# A node comes: its torchrun puts itself on the waiting list. The other nodes send their ranks SIGTERM, so these save
# and end with exit code 75. All meet again, and the ranks go on with --resume in the larger world.
# A node goes, or a rank fails: the other ranks end with an error, or save if they still can. They go on from the newest
# checkpoint, without that node once its heartbeats are missing.
# The global batch stays the same, so the losses do too, if --global-batch-size divides by every number of processes
# that may occur. The node of RDZV_ENDPOINT has to stay.
set -euo pipefail
fail() { echo "elastic.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# --- SITE: the interface between the nodes, see multi_node.sh
# export NCCL_SOCKET_IFNAME=eth0
# export GLOO_SOCKET_IFNAME=eth0
# --- SITE: how long to wait, in seconds
join=${JOIN_TIMEOUT_SECONDS:-300}                                               # for MIN nodes
last_call=${LAST_CALL_SECONDS:-30}                                              # from then on, for more
export COLLECTIVE_TIMEOUT_SECONDS=${COLLECTIVE_TIMEOUT_SECONDS:-600}            # for the slowest rank
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}     # for a step and a save, then kill -9
export RUN_DIR_LOCK_SECONDS=${RUN_DIR_LOCK_SECONDS:-120}  # for a run that still ends in the same folder
# --- SITE: a node is dead after 3 missing heartbeats of 5 s. Nodes whose clocks are further apart than that take each
# other for dead: set the clocks by NTP, and MIN to more than half of MAX where none may train alone
heartbeat=${HEARTBEAT_SECONDS:-5}
restarts=${MAX_RESTARTS:-3}  # how often ranks that fail are started again
# --- end of SITE

command -v torchrun >/dev/null || fail "there is no torchrun on the PATH: activate the environment that has torch"
[[ ${NNODES:-} =~ ^[1-9][0-9]*:[1-9][0-9]*$ && ${NNODES%:*} -le ${NNODES#*:} ]] ||
  fail "NNODES=${NNODES:-} is not MIN:MAX nodes: NNODES=1:4"
[[ -n ${RDZV_ENDPOINT:-} ]] || fail "RDZV_ENDPOINT is not set: the lasting node and a free port there, as node0:29400"
for seconds in "$join" "$last_call" "$COLLECTIVE_TIMEOUT_SECONDS" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$heartbeat"; do
  [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "a timeout is $seconds, not whole seconds"
done
[[ $RUN_DIR_LOCK_SECONDS =~ ^[0-9]+$ ]] || fail "RUN_DIR_LOCK_SECONDS=$RUN_DIR_LOCK_SECONDS is not whole seconds"
[[ $restarts =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$restarts is not a number of restarts"
script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"
procs=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count())")}
[[ $procs != 0 ]] || fail "torch sees no GPU here: look at nvidia-smi, or set NPROC_PER_NODE to run on the CPU"
[[ $procs =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$procs is not a number of processes"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > procs ? $(nproc) / procs : 1))}
# 1: the ranks' store is made anew each time. By default torchrun keeps the first address. A newcomer whose address
# sorts before the others' then makes a new store, the others go to the old one: "DistStoreError: wait timeout"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

where=$(python "$repo/launch/torchrun/endpoint.py" check "$RDZV_ENDPOINT" "$join")
read -r is_host address <<<"$where"
conf="is_host=$is_host,join_timeout=$join,last_call_timeout=$last_call,read_timeout=60,keep_alive_interval=$heartbeat"
# elastic_agent.py is torchrun, except that ranks that end with 75 do not count as failed. With torchrun, MAX_RESTARTS
# nodes that come or go end the job
command=(
  python "$repo/launch/torchrun/elastic_agent.py" --nnodes="$NNODES" --nproc-per-node="$procs" --local-addr="$address"
  --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-train}" --rdzv-conf="$conf"
  --max-restarts="$restarts" "$script" --resume "$@"
)
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
echo "elastic.sh: waiting at most $join s for ${NNODES%:*} node(s); RendezvousTimeoutError means that fewer came"
if ((!is_host)); then
  python "$repo/launch/torchrun/endpoint.py" watch "$RDZV_ENDPOINT" "$COLLECTIVE_TIMEOUT_SECONDS" &
fi
exec "${command[@]}"
