# Needs Python >= 3.11 and make. PYTHON=... picks an interpreter.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; \
	done)
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long test-short lint clean

demo: $(VENV)/.installed  ## train five methods on embedded real images, three seeds
	$(BIN)/python examples/quickstart.py --flagfile=examples/flagfiles/quickstart.flags --overwrite

# worksteal: files stay together but for the last ones, and both workers end at once.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.installed  ## the tests, but for what takes long by nature
	$(PYTEST) -m "not long"

test-long: $(VENV)/.installed  ## several processes, killed runs, benchmarks, every option and flag file
	XLA_FLAGS=--xla_backend_optimization_level=3 $(PYTEST) -m long

# Where versions of Python, NumPy and JAX have made a difference.
SHORT := tests/data tests/test_contract_checks.py tests/test_federation.py \
	tests/algorithms/test_cfedbayes.py tests/experiment/test_setup.py

test-short: $(VENV)/.installed  ## a few of them; PYTHON=python3.13 VENV=.cache/newest
	$(PYTEST) -m "not long" $(SHORT)

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: fedvi needs Python >= 3.11; set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .cache
