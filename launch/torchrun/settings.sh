# shellcheck shell=bash
# What single_node.sh, multi_node.sh, elastic.sh and ../deepspeed/hostfile.sh have in common. They read this file.

# --- SITE: the interface between the nodes, where they have several (`ip -brief address` lists them)
# NCCL's start, and its data where there is no InfiniBand. =eth0 is exact, ^docker excludes. Unset, it takes ib* first,
# and lo or docker* only if all else is missing
# export NCCL_SOCKET_IFNAME=eth0
# gloo carries checkpoints and signals, for GPUs too. Unset, it takes the address of the host's own name. Where that is
# a loopback address, as on Debian, `gloo_interface` below sets it
# export GLOO_SOCKET_IFNAME=eth0
# export NCCL_IB_HCA=mlx5    # the InfiniBand adapters to use, where some are for storage
# export NCCL_IB_TIMEOUT=22  # where links come and go: a try lasts 4.096 us * 2^value (default 20, in older NCCL 18)
# --- to find out what is broken, for one run only
# export NCCL_DEBUG=INFO     # tells which interface and transport NCCL has chosen; NCCL_DEBUG_SUBSYS=INIT,NET for less
# export NCCL_IB_DISABLE=1   # without InfiniBand; NCCL_P2P_DISABLE=1 without NVLink; NCCL_SHM_DISABLE=1
# --- SITE: how long to wait, in seconds
export COLLECTIVE_TIMEOUT_SECONDS=${COLLECTIVE_TIMEOUT_SECONDS:-600}         # for the slowest rank: a save, evaluation
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}  # for a step and a save, then kill -9
export RUN_DIR_LOCK_SECONDS=${RUN_DIR_LOCK_SECONDS:-120}  # for a run that still ends in the same folder
join=${JOIN_TIMEOUT_SECONDS:-300}  # for all nodes to boot and to start this
# --- end of SITE

fail() { echo "${0##*/}: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

command -v torchrun >/dev/null || fail "there is no torchrun on the PATH: activate the environment that has torch"
for seconds in "$COLLECTIVE_TIMEOUT_SECONDS" "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$join"; do
  [[ $seconds =~ ^[1-9][0-9]*$ ]] || fail "a timeout is $seconds, not whole seconds"
done
[[ $RUN_DIR_LOCK_SECONDS =~ ^[0-9]+$ ]] || fail "RUN_DIR_LOCK_SECONDS=$RUN_DIR_LOCK_SECONDS is not whole seconds"
script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"

# one process per GPU
procs=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count())")}
[[ $procs != 0 ]] || fail "torch sees no GPU here: look at nvidia-smi, or set NPROC_PER_NODE to run on the CPU"
[[ $procs =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$procs is not a number of processes"
slices=$(grep -o MIG- <<<"${CUDA_VISIBLE_DEVICES-$(nvidia-smi -L 2>/dev/null)}" | wc -l) || true  # none is no error
((slices == 0 || procs == 1)) ||
  fail "$procs processes on $slices MIG slices: CUDA shows each process the first one. NPROC_PER_NODE=1 runs one"
# CPU cores for each process: torchrun alone would give it one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > procs ? $(nproc) / procs : 1))}
# shellcheck disable=SC2016  # torchrun replaces ${rank}. It writes the prefix with --tee
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE=${TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE:-'[rank ${rank}]: '}

# Print the first address of a host, or nothing if its name does not resolve
address_of() { getent ahosts "$1" | awk 'NR == 1 { print $1 }' || true; }

# Set GLOO_SOCKET_IFNAME to the interface on the way to the head node, if this host's own name is a loopback address
gloo_interface() {
  local loopback='^(127\.|::1|localhost)' own head route
  own=$(address_of "$(hostname)")
  head=$(address_of "$1")
  if [[ -n ${GLOO_SOCKET_IFNAME:-} || $1 =~ $loopback || -z $head || -n $own && ! $own =~ $loopback ]]; then
    return 0
  fi
  command -v ip >/dev/null ||
    fail "$(hostname) is a loopback address here, and there is no ip (iproute2): set GLOO_SOCKET_IFNAME"
  if [[ $head =~ $loopback ]]; then  # this host is the head node
    route=$(ip -oneline route show default)
  else  # the route from the head node to itself is the loopback: look for the interface that has the address
    route=$(ip -oneline address show to "$head" | awk '{ print "dev", $2 }')
    route=${route:-$(ip -oneline route get "$head")}
  fi
  export GLOO_SOCKET_IFNAME
  GLOO_SOCKET_IFNAME=$(sed -n 's/.*dev \([^ ]*\).*/\1/p;q' <<<"$route")
}
