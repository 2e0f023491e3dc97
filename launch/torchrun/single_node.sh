#!/usr/bin/env bash
# Train on all GPUs of this machine. Flags go to the training script. The second command trains on the CPU:
#
#     launch/torchrun/single_node.sh --model llama-124m
#     SCRIPT=my_train.py NPROC_PER_NODE=4 launch/torchrun/single_node.sh --device cpu
#
# The exit code is 75 if the ranks were told to stop and have saved.
set -euo pipefail
# shellcheck source=launch/torchrun/settings.sh
. "$(dirname "${BASH_SOURCE[0]}")/settings.sh"

# --standalone: the ranks meet on a free port, so two jobs on one machine do not disturb each other
# --local-addr: torchrun would ask for the address of the machine's name. It may have none, in a container, say
command=(
  python "$repo/launch/torchrun/run.py" --standalone --local-addr=127.0.0.1 --nproc-per-node="$procs" "$script" "$@"
)
echo "OMP_NUM_THREADS=$OMP_NUM_THREADS $(printf '%q ' "${command[@]}")"
exec "${command[@]}"
