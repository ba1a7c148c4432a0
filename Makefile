# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer; everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
N ?= 1000
# `make mutants N=200 SEED=7 P="calibration qdqtool/insertion"`: a new seed without SEED, all packages without P.
SEED ?=
P ?=

.PHONY: demo test test-all lint package docs bench fit-timing fuzz fuzz-logs fuzz-inputs fuzz-all growth growth-sample mutants clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "qdqtool needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -e '.[report]'
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/qdqtool demo

# Some minutes on two cores; the time is printed at the end.
test: $(VENV)/.test-installed
	$(BIN)/python -m tests -n auto --dist loadfile

# Slow tests, and more examples of each property, which `test` leaves out.
test-all: test
	$(BIN)/python -m tests -n auto --dist loadfile --all -m "slow or hypothesis"

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# sdist and wheel into dist/, checked, and the wheel run in a clean environment.
package:
	PYTHON=$(PYTHON) .ci/package

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@

# Build the documentation into build/site, with the present output of the commands; a broken link is an error.
# Its search needs a server: python3 -m http.server -d build/site
docs: $(VENV)/.docs-installed
	$(BIN)/python -m docs.build_site

bench: $(VENV)/.test-installed
	$(BIN)/python benchmarks/run.py

fit-timing: $(VENV)/.test-installed
	$(BIN)/pip install -q --disable-pip-version-check matplotlib
	$(BIN)/python benchmarks/fit_timing.py --write
	$(BIN)/python benchmarks/timing_docs.py

fuzz: $(VENV)/.test-installed
	$(BIN)/python -m tools.fuzz --networks $(N)

fuzz-logs: $(VENV)/.test-installed
	$(BIN)/python -m tools.fuzz_logs

fuzz-inputs: $(VENV)/.test-installed
	$(BIN)/python -m tools.fuzz_inputs --cases 50000 --processes 1000

# About an hour, before a release.
fuzz-all: $(VENV)/.test-installed
	$(BIN)/python -m tools.fuzz_inputs --seconds 1800 --processes 1000
	$(BIN)/python -m tools.fuzz_inputs.interrupts
	$(BIN)/python -m tools.fuzz_logs --files 1000000 --seconds 1200 --base $$(date +%s)
	$(BIN)/python -m tools.fuzz --networks 100000 --seconds 600 || [ $$? -eq 2 ]

# All cases take hours; the sample takes ten minutes.
growth: $(VENV)/.test-installed
	$(BIN)/python -m tools.growth

growth-sample: $(VENV)/.test-installed
	$(BIN)/python -m tools.growth --sample

$(VENV)/.mutants-installed: $(VENV)/.test-installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test,mutants]'
	touch $@

mutants: $(VENV)/.mutants-installed
	$(BIN)/python -m tools.mutants --mutants $(N) $(if $(SEED),--seed $(SEED)) $(P)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
