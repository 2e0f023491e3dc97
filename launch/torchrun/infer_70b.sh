#!/usr/bin/env bash
# Answer with a model of 70B on the GPUs of this machine, or of several. Flags go to 06_fsdp_zero/infer_70b.py:
#
#     launch/torchrun/infer_70b.sh --model /shared/llama-3-70b --chat --prompts questions.txt
#     NPROC_PER_NODE=2 launch/torchrun/infer_70b.sh --max-new-tokens 128
#     NNODES=2 RDZV_ENDPOINT=node0:29400 launch/torchrun/infer_70b.sh --prompts questions.txt
#
# The weights take 141 GB in bf16: 71 GB on each of 2 GPUs, 35 of 4, 18 of 8. What does not fit is told before anything
# is loaded. Inside a node the GPUs share each matrix (tensor-parallel). On several nodes, where the same command is
# given on each, they share the layers (pipeline): that sends little from node to node, and wants several prompts.
# --strategy overrides this. NPROC_PER_NODE is the number of GPUs to use, all unless you set it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export SCRIPT=$here/../../06_fsdp_zero/infer_70b.py
# it starts the ranks, and has the settings that your site may have to change
if [[ ${NNODES:-1} == 1 ]]; then
  exec "$here/single_node.sh" --model llama-70b --strategy tensor-parallel "$@"
fi
exec "$here/multi_node.sh" --model llama-70b --strategy pipeline "$@"
