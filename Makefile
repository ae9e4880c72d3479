# Everything sets itself up: `make demo` and `make test` work on a fresh machine with Python >= 3.11.

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
# Processes that share the tests: each has one thread and up to a GB.
JOBS   ?= auto
SHARED := -n $(JOBS) --maxprocesses 4 --dist worksteal

.PHONY: demo test test-all test-fast gpu-check lint bench adapters vlm clean

demo: $(VENV)/ready
	$(RUN) -m tests.examples.demo

test: $(VENV)/ready
	$(RUN) -m pytest -m "not slow" $(SHARED)

# With the long runs: deliberate bugs, killed batch runs, a million lines. The better part of an hour.
test-all: $(VENV)/ready
	$(RUN) -m pytest

test-fast: $(VENV)/ready
	$(RUN) -m pytest -m "not slow and not model" $(SHARED)

# On a machine with an NVIDIA GPU, torch for CUDA and triton: `make gpu-check RUN=python3` takes the
# installed ones instead of a fresh environment.
gpu-check: $(if $(filter command line,$(origin RUN)),,$(VENV)/ready)
	$(RUN) -m pytest -m gpu -rA -q

lint: $(VENV)/ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Minutes on a quiet machine; BENCH="--rounds 1 --json FILE" and the like are passed on.
bench: $(VENV)/ready
	$(RUN) -m bench.cpu_generate $(BENCH)

# Trains the demo's adapters anew (they are committed, so nothing else needs this).
adapters: $(VENV)/ready
	$(RUN) -m tests.examples.train_adapters

# Trains the demo's vision tower anew and asks it, on a GPU: `make vlm RUN=python3`, as gpu-check.
vlm: $(if $(filter command line,$(origin RUN)),,$(VENV)/ready)
	$(RUN) -m tests.examples.train_vlm
	$(RUN) -m tests.examples.evaluate_vlm

$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		f"purestep needs Python >= 3.11, {sys.executable} is {sys.version.split()[0]}: \
		make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) demo_out build *.egg-info .pytest_cache .ruff_cache .hypothesis
