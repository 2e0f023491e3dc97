#!/usr/bin/env bash
# Answer with a model of 70B on the GPUs of this machine. Flags go to 09_inference/infer_70b.py:
#
#     launch/torchrun/infer_70b.sh --model /shared/llama-3-70b --chat --prompts questions.txt
#     NPROC_PER_NODE=2 launch/torchrun/infer_70b.sh --max-new-tokens 128
#
# The weights take 141 GB in bf16: 71 GB on each of 2 GPUs, 35 of 4, 18 of 8. What does not fit is refused before
# anything is loaded. The GPUs share each matrix (tensor parallelism), which needs the links inside one node.
# NPROC_PER_NODE is the number of GPUs to use, all unless you set it.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export SCRIPT=$here/../../09_inference/infer_70b.py
# it starts the ranks, and has the settings that your site may have to change
exec "$here/single_node.sh" --model llama-70b "$@"
