#!/usr/bin/env bash
# Train on all GPUs of this machine. Flags go to the training script. The second command trains on the CPU:
#
#     launch/torchrun/single_node.sh --model llama-124m
#     SCRIPT=my_train.py NPROC_PER_NODE=4 launch/torchrun/single_node.sh --device cpu
set -euo pipefail
fail() { echo "single_node.sh: error: $*" >&2; exit 2; }
repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)

# seconds that torchrun gives its ranks for a step and a save after SIGTERM, before it kills them (torchrun alone: 30)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-60}
command -v torchrun >/dev/null || fail "there is no torchrun on the PATH: activate the environment that has torch"
[[ $TORCH_ELASTIC_SHUTDOWN_TIMEOUT =~ ^[1-9][0-9]*$ ]] ||
  fail "a timeout is $TORCH_ELASTIC_SHUTDOWN_TIMEOUT, not whole seconds"
script=${SCRIPT:-$repo/05_ddp/train.py}
[[ -f $script ]] || fail "SCRIPT=$script: no such file"
procs=${NPROC_PER_NODE:-$(python -c "import torch; print(torch.cuda.device_count())")}
[[ $procs != 0 ]] || fail "torch sees no GPU here: look at nvidia-smi, or set NPROC_PER_NODE to run on the CPU"
[[ $procs =~ ^[1-9][0-9]*$ ]] || fail "NPROC_PER_NODE=$procs is not a number of processes"
# CPU cores for each process: torchrun alone would give it one
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(($(nproc) > procs ? $(nproc) / procs : 1))}

# --standalone: the ranks meet on a free port, so two jobs on one machine do not disturb each other
# --local-addr: torchrun would ask for the address of the machine's name. It may have none, in a container, say
command=(torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node="$procs" "$script" "$@")
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
exec "${command[@]}"
