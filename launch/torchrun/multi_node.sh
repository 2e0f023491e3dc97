#!/usr/bin/env bash
# Train on several nodes. The same command on each of them, in any order:
#
#     NNODES=2 RDZV_ENDPOINT=node0:29400 launch/torchrun/multi_node.sh --run-dir /shared/run --save-every 100 --resume
#
# The nodes meet at RDZV_ENDPOINT, the address of one of them and a free port there (c10d rendezvous), and get their
# ranks. Flags go to the training script, SCRIPT. --run-dir is on storage that all nodes see. A lost node or link ends
# the job on every node with an error, soon after COLLECTIVE_TIMEOUT_SECONDS. The same command goes on from the newest
# checkpoint. NPROC_PER_NODE is the number of processes per node: its GPUs, unless you set it. RDZV_ID names the job.
set -euo pipefail
fail() { echo "multi_node.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# --- SITE: the interface between the nodes, where they have several (`ip -brief address` lists them)
# NCCL's start, and its data where there is no InfiniBand. =eth0 is exact, ^docker excludes. Unset, it takes ib* first,
# and lo or docker* only if all else is missing
# export NCCL_SOCKET_IFNAME=eth0
# gloo carries checkpoints and signals, for GPUs too. Needed wherever the host's own name is 127.0.1.1 in /etc/hosts, as
# on Debian: gloo listens there, and no other node reaches it
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5    # the InfiniBand adapters to use, where some are for storage
# export NCCL_IB_TIMEOUT=22  # where links come and go: a try lasts 4.096 us * 2^value (default 20, in older NCCL 18)
# --- to find out what is broken, for one run only
# export NCCL_DEBUG=INFO     # tells which interface and transport NCCL has chosen; NCCL_DEBUG_SUBSYS=INIT,NET for less
# export NCCL_IB_DISABLE=1   # without InfiniBand; NCCL_P2P_DISABLE=1 without NVLink; NCCL_SHM_DISABLE=1
# --- SITE: how long to wait, in seconds
join=${JOIN_TIMEOUT_SECONDS:-300}                                            # for all nodes to boot and to start this
export COLLECTIVE_TIMEOUT_SECONDS=${COLLECTIVE_TIMEOUT_SECONDS:-600}         # for the slowest rank: a save, evaluation
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}  # for a step and a save, then kill -9
export RUN_DIR_LOCK_SECONDS=${RUN_DIR_LOCK_SECONDS:-120}  # for a run that still ends in the same folder
# --- end of SITE

command -v torchrun >/dev/null || fail "there is no torchrun on the PATH: activate the environment that has torch"
[[ ${NNODES:-} =~ ^[1-9][0-9]*$ ]] || fail "NNODES=${NNODES:-} is not a number of nodes: NNODES=2"
[[ -n ${RDZV_ENDPOINT:-} ]] || fail "RDZV_ENDPOINT is not set: the first node and a free port there, as node0:29400"
for seconds in "$join" "$COLLECTIVE_TIMEOUT_SECONDS" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"; do
  [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "a timeout is $seconds, not whole seconds"
done
[[ $RUN_DIR_LOCK_SECONDS =~ ^[0-9]+$ ]] || fail "RUN_DIR_LOCK_SECONDS=$RUN_DIR_LOCK_SECONDS is not whole seconds"
script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"
procs=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count())")}
[[ $procs != 0 ]] || fail "torch sees no GPU here: look at nvidia-smi, or set NPROC_PER_NODE to run on the CPU"
[[ $procs =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$procs is not a number of processes"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > procs ? $(nproc) / procs : 1))}

where=$(python "$repo/launch/torchrun/endpoint.py" check "$RDZV_ENDPOINT" "$join")
read -r is_host address <<<"$where"
# keep_alive_max_attempt: no node is declared dead for lack of heartbeats. They are compared by wall clock, so with
# torchrun's own limit of 3 (15 s), nodes whose clocks are further apart take each other for dead, and one may train
# alone and end with exit code 0. Nothing rejoins here, and COLLECTIVE_TIMEOUT_SECONDS finds the dead
command=(
  torchrun --nnodes="$NNODES" --nproc-per-node="$procs" --local-addr="$address"
  --rdzv-backend=c10d --rdzv-endpoint="$RDZV_ENDPOINT" --rdzv-id="${RDZV_ID:-train}"
  --rdzv-conf="is_host=$is_host,join_timeout=$join,read_timeout=60,keep_alive_max_attempt=1000000"
  "$script" "$@"
)
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
echo "multi_node.sh: waiting at most $join s for $NNODES nodes; RendezvousTimeoutError means that fewer came"
if ((!is_host)); then  # a torchrun whose link is gone waits for the host, deaf to SIGTERM: this ends it
  python "$repo/launch/torchrun/endpoint.py" watch "$RDZV_ENDPOINT" "$COLLECTIVE_TIMEOUT_SECONDS" &
fi
exec "${command[@]}"
