# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer; everything lands in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
N ?= 1000
GROWTH := tests/test_growth.py
# `make mutants N=200 SEED=7 P="calibration qdqtool/insertion"`: without SEED a new one, without P every package.
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

# Some minutes on two cores; what it took is printed in the end.
test: $(VENV)/.test-installed
	$(BIN)/python -m tests -n auto --dist loadgroup

# What `test` leaves out: slow tests, and 20 more examples of each property.
test-all: test
	$(BIN)/python -m tests -n auto --dist loadgroup --all -m "slow or hypothesis"

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/mypy

# sdist and wheel into dist/, checked, and the wheel run in a clean environment.
package:
	PYTHON=$(PYTHON) .ci/package

$(VENV)/.docs-installed: $(VENV)/.installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[docs]'
	touch $@

# The documentation into build/site, with what the commands print now; a broken link ends it.
# Its search needs a server: python3 -m http.server -d build/site
docs: $(VENV)/.docs-installed
	$(BIN)/python docs/build_site.py

bench: $(VENV)/.test-installed
	$(BIN)/python benchmarks/run.py

fit-timing: $(VENV)/.test-installed
	$(BIN)/pip install -q --disable-pip-version-check matplotlib
	$(BIN)/python benchmarks/fit_timing.py --write
	$(BIN)/python benchmarks/timing_docs.py

fuzz: $(VENV)/.test-installed
	$(BIN)/python -m tests.fuzz --networks $(N)

fuzz-logs: $(VENV)/.test-installed
	$(BIN)/python -m tests.fuzz_logs

fuzz-inputs: $(VENV)/.test-installed
	$(BIN)/python -m tests.fuzz_inputs --cases 50000 --processes 1000

# About an hour: what to run before a release.
fuzz-all: $(VENV)/.test-installed
	$(BIN)/python -m tests.fuzz_inputs --seconds 1800 --processes 1000
	$(BIN)/python -m tests.fuzz_inputs.interrupts
	$(BIN)/python -m tests.fuzz_logs --files 1000000 --seconds 1200 --base $$(date +%s)
	$(BIN)/python -m tests.fuzz --networks 100000 --seconds 600 || [ $$? -eq 2 ]

# All cases take hours; the sample takes some minutes, and asks for the same.
growth: $(VENV)/.test-installed
	$(BIN)/pytest -q $(GROWTH) -m growth --growth

growth-sample: $(VENV)/.test-installed
	$(BIN)/pytest -q $(GROWTH) -m sampled --growth

$(VENV)/.mutants-installed: $(VENV)/.test-installed
	$(BIN)/pip install -q --disable-pip-version-check -e '.[test,mutants]'
	touch $@

mutants: $(VENV)/.mutants-installed
	$(BIN)/python -m tests.mutants --mutants $(N) $(if $(SEED),--seed $(SEED)) $(P)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
