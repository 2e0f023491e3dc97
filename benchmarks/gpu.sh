#!/usr/bin/env bash
# What `make gpu` runs: the GPU tests, the decisive ones first, then benchmarks/gpu_report.py, in ten minutes in all.
#
#   benchmarks/gpu.sh python3
#   GPU_SECONDS=1200 GPU_TEST_SECONDS=600 benchmarks/gpu.sh python3    more time for all of it, and for the tests in it
#
# Nothing is installed. Everything is left in benchmarks/results/ as it comes: what a kill leaves is what was found.
set -u
cd "$(dirname "$0")/.." || exit
python=${1:-python3}
seconds=${GPU_SECONDS:-565}
test_seconds=${GPU_TEST_SECONDS:-320}
log=benchmarks/results/gpu-tests-$(date +%F)
failed=()
export PYTHONUNBUFFERED=1
mkdir -p benchmarks/results

# these look at the GPU's clocks, power and rates: nothing else may run on it meanwhile
alone=(tests/test_01_benchmark.py tests/test_01_doctor.py tests/test_01_monitor.py)

run_tests() { # NAME, then arguments of pytest
  local name=$1 left=$((test_seconds - SECONDS)) code
  shift
  if ((left < 10)); then
    failed+=("tests, $name: not run, no time left of $test_seconds s")
    return
  fi
  # an interrupt, not a kill: pytest then says what has run, and ends what it has started
  timeout --signal=INT --kill-after=20 "$left" "$python" -m pytest -m gpu -v -ra --durations=0 --durations-min=1 \
    --continue-on-collection-errors --junitxml="$log-$name.xml" "$@" 2>&1 | tee "$log-$name.log"
  code=${PIPESTATUS[0]}
  ((code == 0)) || failed+=("tests, $name: exit code $code (124: stopped after $left s), see $log-$name.log")
}

if "$python" -c "import pytest"; then
  together=()
  for file in "${alone[@]}"; do together+=("--ignore=$file"); done
  # most of a test is importing torch, which needs a core and not the GPU
  if (($(nproc) >= 8)) && "$python" -c "import xdist" 2>/dev/null; then together+=(-n 4 --dist loadfile); fi
  run_tests together "${together[@]}"
  run_tests alone "${alone[@]}"
else
  failed+=("tests: skipped, pytest is missing")
fi

minutes=$(awk "BEGIN { print ($seconds - $SECONDS) / 60 }")
"$python" benchmarks/gpu_report.py --minutes "$minutes"
code=$?
((code == 0)) || failed+=("benchmarks/gpu_report.py: exit code $code")

echo "make gpu: $SECONDS s"
((${#failed[@]} == 0)) || printf 'FAILED: %s\n' "${failed[@]}" >&2
exit $((${#failed[@]} > 0))
