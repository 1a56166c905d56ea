# `make demo` and `make test` build their own environment in .venv; only python3 (3.10 or later), make and git are needed.
PYTHON  ?= python3
WORKERS ?= 2
BIN     := .venv/bin
STAMP   := .venv/.installed
DOCS_STAMP := .venv/.docs

.PHONY: venv demo test test-portable browser lint format bench docs wheel-check clean
.DEFAULT_GOAL := test

venv: $(STAMP)

# torch goes in first and pinned: pip then keeps whichever build (CPU or CUDA) the machine's index offers for that version.
# In a terminal pip shows its own progress; in a log only these lines and errors appear.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "pullback needs Python 3.10 or later; choose one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "[venv] creating .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv || { echo "on Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@test -t 1 && quiet= || quiet=-qq; \
	    echo "[venv] installing torch (a large download the first time)"; \
	    $(BIN)/pip install $$quiet --disable-pip-version-check -c constraints.txt torch && \
	    echo "[venv] installing pullback and its tools" && \
	    $(BIN)/pip install $$quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: venv
	@$(BIN)/pullback demo --out demo-out

lint: venv
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# One thread per worker, so that workers do not compete for cores and sums are added in the same order every time.
test: lint
	@OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/pytest -q -n $(WORKERS) --dist worksteal

# The numerical tests as other CPUs would run them: torch and MKL are told which vector instructions to use, and once how
# many threads. Each configuration is run, even after one that failed; those that this CPU has not are named and skipped.
NUMERICAL := $(addprefix tests/,randnla operators geometry theory evaluation pruning probes)
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
test-portable: venv
	@failed= workers=$(WORKERS); \
	portable() { \
	    echo "[portable] $$*"; \
	    env "$$@" $(BIN)/pytest -q -n $$workers --dist worksteal $(NUMERICAL) || failed="$$failed\n[portable] failed: $$*"; \
	}; \
	portable $(ONE_THREAD) ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE; \
	for width in avx2 avx512; do \
	    if grep -qsw "$$width\|$${width}f" /proc/cpuinfo; \
	    then portable $(ONE_THREAD) ATEN_CPU_CAPABILITY=$$width MKL_CBWR=$$(echo $$width | tr a-z A-Z); \
	    else echo "[portable] skipped: $$width, which /proc/cpuinfo does not name"; fi; \
	done; \
	workers=$$((($(WORKERS) + 1) / 2)); portable OMP_NUM_THREADS=2 MKL_NUM_THREADS=2; \
	test -z "$$failed" || { printf "$${failed#??}\n"; exit 1; }

# Debian's Chromium, in which `make test` opens the report of the experiments; without one those tests are skipped.
browser:
	@if command -v chromium >/dev/null; then echo "[browser] there already: $$(command -v chromium)"; \
	elif ! command -v apt-get >/dev/null; then \
	    echo "[browser] no apt-get here: install Chromium or Chrome in another way, so that it is on the PATH"; exit 1; \
	else \
	    as_root=; test "$$(id -u)" = 0 || as_root=sudo; \
	    if test -n "$$as_root" && ! command -v sudo >/dev/null; then \
	        echo "[browser] as root: apt-get install --no-install-recommends chromium"; exit 1; fi; \
	    echo "[browser] installing Debian's chromium"; \
	    $$as_root apt-get -qq update && $$as_root apt-get -qq install -y --no-install-recommends chromium >/dev/null && \
	    chromium --version; \
	fi

format: venv
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format .

# A short version of every benchmark that runs without weights and without a GPU, and the commands of all others.
bench: venv
	@$(BIN)/python benchmarks/quick.py

# The documentation as a site in site/, with the reference generated from the code. A broken link is an error.
docs: $(DOCS_STAMP)
	@$(BIN)/mkdocs build --quiet --strict && echo "[docs] open site/index.html"

$(DOCS_STAMP): $(STAMP)
	@echo "[docs] installing mkdocs"
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# The package as a user gets it: a wheel with its dependencies in an environment of its own, used without network.
# It is built from a copy, since a build leaves files behind.
wheel-check: venv
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	    mkdir "$$folder/tree" "$$folder/empty" && cp -r src pyproject.toml README.md LICENSE "$$folder/tree" && \
	    rm -rf "$$folder"/tree/src/*.egg-info && \
	    echo "[wheel] building" && \
	    $(BIN)/pip wheel -qq --no-deps --no-build-isolation -w "$$folder" "$$folder/tree" && ls -sh "$$folder"/*.whl && \
	    echo "[wheel] installing it and its dependencies into an empty environment" && \
	    $(PYTHON) -m venv "$$folder/env" && \
	    "$$folder/env/bin/pip" install -qq --disable-pip-version-check -c constraints.txt "$$folder"/*.whl && \
	    if unshare -rn true 2>/dev/null; then offline="unshare -rn"; else offline="env HF_HUB_OFFLINE=1"; fi && \
	    echo "[wheel] diagnosing the embedded model with: $$offline" && cd "$$folder/empty" && \
	    $$offline "$$folder/env/bin/python" -I "$(CURDIR)/tests/helpers/offline_diagnosis.py"

# Keeps .venv, which is expensive to make; remove it by hand to start afresh.
clean:
	@rm -rf demo-out build dist site .pytest_cache .mypy_cache .ruff_cache src/*.egg-info
	@find src tests benchmarks tools -name __pycache__ -type d -prune -exec rm -rf {} +
