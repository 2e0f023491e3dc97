#!/usr/bin/env bash
# Experimental, for torch 2.13. Train on as many nodes as there are at the moment, MIN to MAX. The same command on each,
# at any time:
#
#     NNODES=1:4 RDZV_ENDPOINT=node0:29400 launch/torchrun/elastic.sh --run-dir /shared/run --save-every 100
#
# A node comes: its torchrun puts itself on the waiting list. The other nodes send their ranks SIGTERM, so these save
# and end with exit code 75. All meet again, and the ranks go on with --resume in the larger world.
# A node goes, or a rank fails: the other ranks end with an error, or save if they still can. They go on from the newest
# checkpoint, without that node once its heartbeats are missing.
# The global batch stays the same, so the losses do too, if --global-batch-size divides by every number of processes
# that may occur. The node of RDZV_ENDPOINT has to stay. RDZV_ID names the job.
set -euo pipefail
# shellcheck source=launch/torchrun/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

# --- SITE: seconds to wait for more nodes, once MIN are there
last_call=${LAST_CALL_SECONDS:-30}
# --- SITE: a node is dead after 3 missing heartbeats of 5 s. Nodes whose clocks are further apart than that take each
# other for dead: set the clocks by NTP, and MIN to more than half of MAX where none may train alone
heartbeat=${HEARTBEAT_SECONDS:-5}
restarts=${MAX_RESTARTS:-3}  # how often ranks that fail are started again
# --- end of SITE

[[ ${NNODES:-} =~ ^[1-9][0-9]*:[1-9][0-9]*$ && ${NNODES%:*} -le ${NNODES#*:} ]] ||
  fail "NNODES=${NNODES:-} is not MIN:MAX nodes: NNODES=1:4"
[[ ${RDZV_ENDPOINT:-} =~ ^\[?([^]]+)]?:([1-9][0-9]*)$ && ${BASH_REMATCH[2]} -lt 65536 ]] ||
  fail "RDZV_ENDPOINT=${RDZV_ENDPOINT:-} is not the lasting node and a free port there: RDZV_ENDPOINT=node0:29400"
head=${BASH_REMATCH[1]}
[[ -n $(address_of "$head") ]] || fail "RDZV_ENDPOINT=$RDZV_ENDPOINT: $head does not resolve on $(hostname)"
for seconds in "$last_call" "$heartbeat"; do
  [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "a timeout is $seconds, not whole seconds"
done
[[ $restarts =~ ^[0-9]+$ ]] || fail "MAX_RESTARTS=$restarts is not a number of restarts"
gloo_interface "$head"
# 1: the ranks' store is made anew each time. By default torchrun keeps the first address. A newcomer whose address
# sorts before the others' then makes a new store, the others go to the old one: "DistStoreError: wait timeout"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# elastic_agent.py is torchrun with the changes that this needs. It says whether this node is the host of the meeting
command=(
  python "$repo/launch/torchrun/elastic_agent.py" "$head" "${RDZV_ENDPOINT##*:}" "$join"
  "join_timeout=$join,last_call_timeout=$last_call,read_timeout=60,keep_alive_interval=$heartbeat"
  --nnodes="$NNODES" --nproc-per-node="$procs" --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-train}"
  --max-restarts="$restarts" "$script" --resume "$@"
)
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
echo "elastic.sh: waiting at most $join s for ${NNODES%:*} node(s); RendezvousTimeoutError means that fewer came"
exec "${command[@]}"
