# `make demo` and `make test` do all set-up themselves: a Python >= 3.12 is found, .venv is made and filled once
# (again only when pyproject.toml or constraints.txt changes).
#
#   PYTHON=/path/to/python3.13   the interpreter that makes the environment
#   PY=/path/to/python           an interpreter that has everything already: nothing is installed

VENV ?= .venv
ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif
PIP_INSTALL = install --quiet --disable-pip-version-check
NEWEST := .venv-newest
TESTS ?= tests
JOBS ?= 2

.PHONY: help demo test test-slow test-newest test-real test-gpu lint format clean

help:
	@echo "make demo         text from the small model that comes with the repository"
	@echo "make test         lint and the test suite, on the CPU (TESTS=tests/core for a part)"
	@echo "make test-slow    the tests marked slow, 10,000 random requests through the small model among them"
	@echo "make test-newest  the suite on the newest jax that pyproject.toml allows; appends to tests/newest.jsonl"
	@echo "make test-real    checks on a real Qwen3 checkpoint: JAXVLLM_QWEN3=DIR make test-real"
	@echo "make test-gpu     the tests that need a GPU"
	@echo "make lint         ruff and pyright;  make format  ruff's fixes;  make clean  removes what was built"

$(VENV)/.installed: pyproject.toml constraints.txt
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && echo "setting up $(VENV) with $$python (1.3 GB, a minute or two)" && \
	{ [ -x $(VENV)/bin/python ] && $(VENV)/bin/python -c '' || "$$python" -m venv --clear $(VENV); }
	@$(VENV)/bin/python -m pip $(PIP_INSTALL) -e '.[dev]' -c constraints.txt
	@touch $@

demo: $(READY)
	@$(PY) examples/demo.py

test: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-slow: $(READY)
	$(PY) -m pytest --slow -m slow $(TESTS)

test-newest:
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" -m venv --clear $(NEWEST)
	@grep -v -E '^(jax|jaxlib)==' constraints.txt > $(NEWEST)/constraints.txt
	@$(NEWEST)/bin/python -m pip $(PIP_INSTALL) --upgrade -e '.[dev]' jax -c $(NEWEST)/constraints.txt
	-$(NEWEST)/bin/python -m pytest -n $(JOBS) --dist worksteal --junitxml=$(NEWEST)/report.xml $(TESTS)
	$(NEWEST)/bin/python scripts/record_newest.py $(NEWEST)/report.xml tests/newest.jsonl "$(TESTS)"

test-real: $(READY)
	$(PY) -m pytest -m real $(TESTS)

# one process each: torch needs the memory that jax would still hold from the model before
test-gpu: $(READY)
	JAXVLLM_TEST_GPU=1 $(PY) -m pytest -m gpu tests/kernels
	JAXVLLM_TEST_GPU=1 $(PY) -m pytest -m gpu tests/gpu/test_several_processes.py
	for model in cut 0.6b 8b; do JAXVLLM_TEST_GPU=1 $(PY) -m pytest -m gpu tests/gpu -k $$model || exit 1; done

lint: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright --pythonpath $(PY)

format: $(READY)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:
	rm -rf $(VENV) $(NEWEST) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
