#!/usr/bin/env bash
# Train on all GPUs of this machine, on 2 processes where it has none. Flags go to the training script:
#
#     launch/torchrun/single_node.sh --model llama-124m --dtype bf16
#     SCRIPT=my_train.py NPROC_PER_NODE=4 launch/torchrun/single_node.sh
set -euo pipefail
fail() { echo "single_node.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# seconds for a step and a save after SIGTERM, then kill -9: torchrun alone would give 30
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}
[[ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT =~ ^[1-9][0-9]*$ ]] ||
  fail "a timeout is $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, not whole seconds"
script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"
procs=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count() or 2)")}
[[ $procs =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$procs is not a number of processes"
# the CPU cores, shared out: torchrun alone would give each process one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > procs ? $(nproc) / procs : 1))}

# --standalone: a rendezvous on a free port, so that two jobs on one machine do not meet
command=(torchrun --standalone --nproc-per-node="$procs" "$script" "$@")
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
exec "${command[@]}"
