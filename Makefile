# Front door of the project; every target is idempotent. `make help` lists them.

JOBS ?= $(shell nproc)
PYTHON := .venv/bin/python
# A file's tests share captures and reference runs, so one worker runs a file, in the order
# of test/conftest.py.
PYTEST = $(PYTHON) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=20 \
	$(PYTEST_FLAGS)
STAGE = @printf '== %s: %s\n' "$$(date +%T)"
CTEST := ctest -j $(JOBS) --output-on-failure --no-tests=error --test-dir
CXX_SOURCES = $(shell git ls-files --cached --others --exclude-standard '*.h' '*.cpp')

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup build build-runtime build-asan build-tsan test test-all \
	test-compiler test-unit test-runtime test-headers test-asan test-tsan test-python test-parity \
	test-kernels test-zoo demo bench docs check-docs check-format format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: ## install what is missing: Debian packages, Python packages in .venv
	@scripts/setup.sh

build: setup ## compiler and runtime (preset dev, build/)
	@scripts/build.sh dev $(JOBS)

build-runtime: setup ## the runtime with the system's compiler, without MLIR (build-runtime/)
	@scripts/build.sh runtime $(JOBS)

build-asan: setup ## the runtime under AddressSanitizer and UBSan (build-asan/)
	@scripts/build.sh asan $(JOBS)

build-tsan: setup ## the same with the system's compiler, under ThreadSanitizer (build-tsan/)
	@scripts/build.sh tsan $(JOBS) RuntimeTests

test: check-format check-docs test-compiler test-asan ## everything that CI runs
	$(STAGE) "test/python, test/parity, test/faults, test/zoo"
	@$(PYTEST) test/python test/parity test/faults test/zoo

test-all: PYTEST_FLAGS := --exhaustive
test-all: test-tsan test test-unit test-runtime test-headers test-kernels test-zoo ## the same, and what is exhaustive

test-compiler: build ## lit, and GoogleTest of what the sanitizers do not run
	$(STAGE) "lit"
	@ninja -C build check-fsdp-lit
	$(STAGE) "GoogleTest"
	@$(CTEST) build -LE runtime

test-unit: build ## GoogleTest, all of it, on the full build
	$(STAGE) "GoogleTest, all"
	@ninja -C build check-fsdp-unit

test-runtime: build build-runtime ## GoogleTest and bits of the runtime built without MLIR
	$(STAGE) "GoogleTest, runtime alone"
	@$(CTEST) build-runtime
	@$(PYTEST) --exhaustive test/parity/test_system_compiler.py

test-headers: setup ## the runtime without precompiled headers: each source includes what it needs
	@scripts/build.sh headers $(JOBS) fsdp-run fsdp-checkpoint FSDPPython

test-asan: build-asan ## GoogleTest under the sanitizers
	$(STAGE) "GoogleTest, sanitizers"
	@$(CTEST) build-asan

test-tsan: build-tsan ## plans on a thread a stream, under ThreadSanitizer
	$(STAGE) "GoogleTest, ThreadSanitizer"
	@$(CTEST) build-tsan

test-python: setup ## Python tests (capture, models)
	@$(PYTEST) test/python

test-parity: build ## bit parity with FSDP2, and bad input
	@$(PYTEST) test/parity

test-kernels: setup ## strides of fake tensors beside those of the CPU's kernels, on many layouts
	@$(PYTHON) test/python/kernel_calls.py

test-zoo: build ## every architecture of test/zoo beside FSDP2; writes docs/models.md
	@PYTHONPATH=test/parity $(PYTHON) test/zoo/zoo.py --write docs/models.md $(ARGS)

demo: build ## capture, compile, train beside FSDP2, compare; kill a run and resume it
	@$(PYTHON) scripts/demo.py

bench: build ## step time and memory beside FSDP2 (ARGS="--rounds 5 --batch 8")
	@$(PYTHON) bench/bench.py $(ARGS)

docs: build ## regenerate the documentation that is made from sources
	@$(PYTHON) scripts/docs.py

check-docs: build ## fail if generated documentation is stale
	$(STAGE) "documentation"
	@$(PYTHON) scripts/docs.py --check
	@$(PYTHON) scripts/rooms.py

check-format: setup ## ruff, clang-format
	$(STAGE) "format"
	@$(PYTHON) -m ruff format --check --quiet .
	@$(PYTHON) -m ruff check --quiet .
	@clang-format-22 --dry-run -Werror $(CXX_SOURCES)

format: setup ## apply ruff's and clang-format's formatting
	@$(PYTHON) -m ruff format .
	@$(PYTHON) -m ruff check --fix .
	@clang-format-22 -i $(CXX_SOURCES)

clean: ## remove what was built and written (not .venv)
	rm -rf build build-runtime build-headers build-gpu build-asan build-tsan out
