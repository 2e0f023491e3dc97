#!/usr/bin/env bash
# Train on all GPUs of this machine, on 2 processes where it has none. Flags go to the training script:
#
#     launch/torchrun/single_node.sh --model llama-124m --dtype bf16
#     SCRIPT=my_train.py NPROC_PER_NODE=4 launch/torchrun/single_node.sh
set -euo pipefail
fail() { echo "single_node.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"
nproc=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count() or 2)")}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$nproc is not a number of processes"
# the CPU cores, shared out: torchrun alone would give each process one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > nproc ? $(nproc) / nproc : 1))}

# --standalone: a rendezvous on a free port, so that two jobs on one machine do not meet
command=(torchrun --standalone --nproc-per-node="$nproc" "$script" "$@")
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS ${command[*]}"
exec "${command[@]}"
