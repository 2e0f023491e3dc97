# make train   set up, then train on all GPUs (2 processes on a CPU)
# make test    set up, then the tests that need no GPU
# make test-launch   the launch files for real: Slurm, two hosts, faults (root; what is not installed is skipped)
# make gpu     with the python3 given, nothing installed: the GPU tests and benchmarks/gpu_report.py, in ten minutes
# make figures the pictures in docs/images, from real runs
# make lint    ruff
# make readme  what the READMEs quote from the scripts
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

train: $(VENV)/ready
	n=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)") ; \
	$(BIN)/torchrun --standalone --nproc_per_node=$$n 05_ddp/train.py \
		$$([ $$((24 % n)) -eq 0 ] || echo --global-batch-size $$((4 * n)))

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 -m "not gpu and not campaign and not launch"

test-launch: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m launch

# ten minutes in all: the tests have GPU_TEST_SECONDS at most, the report what is then left of GPU_SECONDS
GPU_SECONDS ?= 585
GPU_TEST_SECONDS ?= 280
gpu: SHELL := /bin/bash
gpu: export PYTHONUNBUFFERED := 1
gpu:
	@mkdir -p benchmarks/results ; log=benchmarks/results/gpu-tests-$$(date +%F) ; tests=0 ; \
	if $(PYTHON) -c "import pytest" ; then \
		timeout --signal=INT --kill-after=15 $(GPU_TEST_SECONDS) $(PYTHON) -m pytest -m gpu -v -ra \
			--continue-on-collection-errors --durations=0 --durations-min=1 --junitxml=$$log.xml 2>&1 | tee $$log.log ; \
		tests=$${PIPESTATUS[0]} ; \
	else echo "GPU tests skipped: pytest is missing" ; fi ; \
	$(PYTHON) benchmarks/gpu_report.py --minutes $$(awk "BEGIN { print ($(GPU_SECONDS) - $$SECONDS) / 60 }") ; report=$$? ; \
	[ $$tests -eq 0 ] || echo "GPU tests: exit code $$tests (124: over after $(GPU_TEST_SECONDS) s), see $$log.log" ; \
	[ $$report -eq 0 ] || echo "GPU report: exit code $$report" ; \
	[ $$tests -eq 0 ] && [ $$report -eq 0 ]

# the pictures in docs/images, from real runs on the CPU
figures: $(VENV)/ready
	$(BIN)/python benchmarks/loss_curves.py
	$(BIN)/python 01_devices/benchmark.py --device cpu --plot docs/images/roofline.png

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

readme:
	$(PYTHON) tests/support/readme.py

$(VENV)/ready: requirements.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

.PHONY: train test test-launch gpu figures lint readme
