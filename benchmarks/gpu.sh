#!/usr/bin/env bash
# What one GPU shows, in five commands of less than nine minutes, each useful alone:
#
#   benchmarks/gpu.sh smoke         nano on every CUDA path, side by side: does it run?
#   benchmarks/gpu.sh training      tokens/s and MFU of llama-124m and llama-1b
#   benchmarks/gpu.sh decode        int4 kernels alone; tokens/s of llama-8b in bf16 and llama-70b in int4
#   benchmarks/gpu.sh decode-int8   llama-70b in int8, and in bf16 where it fits
#   benchmarks/gpu.sh tests         pytest -m gpu
#   benchmarks/gpu.sh all           all five, as far as GPU_SECONDS (default: 1700) go (make gpu)
#
# PYTHON is the python that has torch; nothing is installed. MODEL=nano runs the same commands small. Everything is left
# in ${OUT:-benchmarks/results} as it comes: what SIGTERM leaves is what was found. Exit code 75: not all had time, and
# the same command goes on with the rest. The kernels that were compiled are kept there, too, in kernel-caches.tar.gz.
set -u
cd "$(dirname "$0")/.." || exit
python=${PYTHON:-python3}
OUT=$(realpath -m "${OUT:-benchmarks/results}")
export OUT PYTHONUNBUFFERED=1
export TORCHINDUCTOR_CACHE_DIR=${TMPDIR:-/tmp}/kernel-caches/inductor TRITON_CACHE_DIR=${TMPDIR:-/tmp}/kernel-caches/triton
part_seconds=${PART_SECONDS:-520}
seconds=${GPU_SECONDS:-1700}
parts=(smoke training decode decode-int8 tests)
caches=$OUT/kernel-caches.tar.gz
mkdir -p "$OUT"
[[ -d ${TMPDIR:-/tmp}/kernel-caches || ! -f $caches ]] || tar -xzf "$caches" -C "${TMPDIR:-/tmp}"

# these look at the GPU's clocks and power, or hold most of its memory: nothing else may run on it meanwhile
alone=(tests/test_01_benchmark.py tests/test_01_doctor.py tests/test_01_monitor.py tests/test_07_chunked_loss.py
  tests/test_planner.py tests/test_gpu.py)

stopped=
running=
trap 'stopped=1; kill "$running" 2>/dev/null' TERM

ends_with_us() { # COMMAND: bash hears of a signal while it waits, and not while a command is in the foreground
  [[ -z $stopped ]] || return 143
  "$@" &
  running=$!
  wait "$running"
  local code=$?
  while [[ -n $stopped ]] && kill -0 "$running" 2>/dev/null; do wait "$running"; done
  return $((code == 124 ? 75 : code))  # the first is timeout's
}

run_tests() { # NAME SECONDS, then arguments of pytest
  local log name=$1 left=$2
  log=$OUT/gpu-tests-$name-$(date +%F)
  shift 2
  # an interrupt, not a kill: pytest then says what has run, and ends what it has started
  ends_with_us timeout --signal=INT --kill-after=20 "$left" "$python" -m pytest -m "gpu and not nogpu" -v -ra \
    --durations=0 --durations-min=1 --continue-on-collection-errors --junitxml="$log.xml" "$@" > >(tee "$log.log") 2>&1
}

run_part() { # NAME SECONDS
  local code=0 together=() began=$SECONDS
  if [[ $1 != tests ]]; then
    ends_with_us "$python" benchmarks/gpu_report.py "$1" --minutes "$(awk "BEGIN { print $2 / 60 }")" \
      ${MODEL:+--model "$MODEL"} || code=$?
  elif "$python" -c "import filelock, psutil, pynvml, pytest, safetensors, transformers"; then
    for file in "${alone[@]}"; do together+=("--ignore=$file"); done
    # most of a test is importing torch, which needs a core and not the GPU
    if (($(nproc) >= 8)) && "$python" -c "import xdist" 2>/dev/null; then together+=(-n 4 --dist loadfile); fi
    run_tests together "$(($2 * 6 / 10))" "${together[@]}" || code=$?
    run_tests alone "$(($2 - SECONDS + began))" "${alone[@]}" || code=$?
  else
    code=1
  fi
  tar -czf "$caches" -C "${TMPDIR:-/tmp}" kernel-caches 2>/dev/null
  return $code
}

case " ${parts[*]} all " in
  *" ${1:-all} "*) ;;
  *) echo "benchmarks/gpu.sh: $1 is none of ${parts[*]} all" >&2; exit 2 ;;
esac
if [[ ${1:-all} != all ]]; then
  run_part "$1" "$part_seconds"
  exit
fi
failed=()
rest=()
for part in "${parts[@]}"; do
  left=$((seconds - SECONDS))
  code=75
  if ((left >= 60)); then
    run_part "$part" "$((left < part_seconds ? left : part_seconds))"
    code=$?
  fi
  case $code in
    0) ;;
    75 | 143) rest+=("$part") ;;
    *) failed+=("$part") ;;
  esac
done
((${#failed[@]} == 0)) || echo "FAILED: ${failed[*]}" >&2
((${#rest[@]} == 0)) || echo "no time left for ${rest[*]}: start benchmarks/gpu.sh ${rest[0]} next"
((${#failed[@]} == 0)) || exit 1
exit $((${#rest[@]} > 0 ? 75 : 0))
