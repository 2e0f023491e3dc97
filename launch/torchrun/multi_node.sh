#!/usr/bin/env bash
# Train on several nodes. On each of them, in any order, with its number from 0 to NNODES - 1:
#
#     NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun/multi_node.sh --run-dir /shared/run --save-every 100 --resume
#
# MASTER_ADDR is node 0. The nodes meet there, on port MASTER_PORT (29500): two jobs need two ports. Node 0 has rank 0.
# Flags go to the training script, SCRIPT. --run-dir is on storage that all nodes see. NPROC_PER_NODE is the number of
# processes per node: its GPUs, unless you set it. settings.sh has what your site may have to change.
#
# A lost node or link ends the job on every node with an error, soon after COLLECTIVE_TIMEOUT_SECONDS. When all have
# ended, the same commands go on from the newest checkpoint. The exit code is 75 if the ranks were told to stop and have
# saved. Before the training, launch/preflight.py checks nodes and links, except with PREFLIGHT=0. Nodes that have
# passed within the hour are not checked again: after a crash, delete preflight.json in the folder of the run first.
set -euo pipefail
# shellcheck source=launch/torchrun/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

[[ ${NNODES:-} =~ ^[1-9][0-9]*$ ]] || fail "NNODES=${NNODES:-} is not a number of nodes: NNODES=2"
[[ ${NODE_RANK:-} =~ ^(0|[1-9][0-9]*)$ && $NODE_RANK -lt $NNODES ]] ||
  fail "NODE_RANK=${NODE_RANK:-} is not this node's number, 0 to $((NNODES - 1)): NODE_RANK=0 on MASTER_ADDR"
head=${MASTER_ADDR:-}
port=${MASTER_PORT:-29500}
[[ $port =~ ^[1-9][0-9]*$ && $port -lt 65536 ]] || fail "MASTER_PORT=$port is not a port"
[[ ${PREFLIGHT:=1} =~ ^[01]$ ]] || fail "PREFLIGHT=$PREFLIGHT is neither 0 nor 1"
[[ -n $(address_of "$head") ]] || fail "MASTER_ADDR=$head does not resolve on $(hostname): name node 0"
gloo_interface "$head"

if ((NNODES > 1 && PREFLIGHT)); then
  JOIN_TIMEOUT_SECONDS=$join python "$repo/launch/preflight.py" --nnodes="$NNODES" --node-rank="$NODE_RANK" \
    --nproc-per-node="$procs" --master-addr="$head" --master-port="$port" "$@"
fi
if ((NODE_RANK > 0)); then  # torchrun waits too, but prints a stack at each try
  until timeout 5 bash -c ": </dev/tcp/$head/$port" 2>/dev/null; do
    ((SECONDS < join)) ||
      fail "no answer from MASTER_ADDR=$head, port $port, in $join s: has NODE_RANK=0 been started there?"
    sleep 1
  done
fi
command=(
  python "$repo/launch/torchrun/run.py" --nnodes="$NNODES" --node-rank="$NODE_RANK" --nproc-per-node="$procs"
  --rdzv-backend=static --master-addr="$head" --master-port="$port" --rdzv-conf="timeout=$join" "$script" "$@"
)
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
echo "multi_node.sh: waiting at most $join s for $NNODES nodes"
exec "${command[@]}"
