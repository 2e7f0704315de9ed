PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
SANITIZER ?= compute-sanitizer

.PHONY: demo test fuzz lint soak dist matrix sanitize clean

demo: $(INSTALLED)
	$(BIN)/python compile_examples/train_moe.py

test: $(INSTALLED)
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m kernels

# Of all ops together: make fuzz MOE_FUZZ_EXAMPLES=1000
MOE_FUZZ_EXAMPLES ?= 100000

fuzz: $(INSTALLED)
	$(BIN)/python -m moe_custom_ops.testing.fuzz --examples $(MOE_FUZZ_EXAMPLES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

soak: $(INSTALLED)
	$(BIN)/python -m moe_custom_ops.testing.soak

# The tests build it twice more, compare, look inside and install it.
dist: $(INSTALLED)
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --outdir dist
	$(BIN)/python -m pytest tests/test_dist.py tests/test_security.py

# By itself first, which compiles the kernels; then under each tool, with every tensor an allocation
# of its own, at whose end a tool sees an access go astray.
sanitize: $(INSTALLED)
	PYTHONPATH=. $(BIN)/python tests/sanitize.py
	for tool in memcheck racecheck initcheck synccheck; do \
		PYTHONPATH=. PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --error-exitcode 1 \
			$(BIN)/python tests/sanitize.py || exit 1; \
	done

matrix:
	$(PYTHON) tests/matrix.py

# pip fetches into a fresh environment only when what is asked for has changed. Of torchtitan only the
# dispatchers are tested, which need little of what it depends on.
$(INSTALLED): pyproject.toml requirements-dev.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Python 3.11 or newer is needed, this is {v.major}.{v.minor}; choose another with make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'torchtitan>=0.3,<0.4'
	touch $@

clean:
	rm -rf $(VENV) .venv-matrix out dist build
