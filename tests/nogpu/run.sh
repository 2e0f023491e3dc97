#!/usr/bin/env bash
# run.sh noop|values ARGUMENTS OF PYTHON...: in setup.sh's virtualenv, with GPUs that are not there. See README.md.
home=$(cd "${NOGPU_HOME:-$HOME/.cache/nogpu}" && pwd) || exit 2
export NOGPU=$1 NVML_GPUS=${NOGPU_DEVICES:-1} LD_LIBRARY_PATH=$home/lib PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCHINDUCTOR_COMPILE_THREADS=1
export TORCHINDUCTOR_CACHE_DIR=$home/cache TRITON_CACHE_DIR=$home/cache/triton
export NOGPU_RUN=${NOGPU_RUN:-$$}
shift
"$home/venv/bin/python" "$@"
code=$?
[ "$NOGPU_RUN" = $$ ] && rm -f /dev/shm/nogpu-$$-*  # the last message of each rank
exit $code
