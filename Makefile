# SPDX-License-Identifier: Apache-2.0
# make           builds into .venv and installs the checkout there (editable)
# make demo      runs the demo
# make test      lint, C++ tests under sanitizers, Python tests; `make help` lists the rest
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
MINUTES := printf '== %s: %d min %02d s\n'

# Only the H200's code here; pip and wheels build every architecture (cpp/cmake/cuda.cmake).
export ENGRAM_CUDA_ARCHITECTURES ?= 90a-real
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# A strict editable install holds links to the files there were: its stamp is named after their list.
SOURCES := $(shell find builder plugins runtime -name '*.py' -o -path '*/data/*' -type f | sort)
INSTALLED := .venv/installed-$(firstword $(shell printf '%s\n' '$(SOURCES)' | cksum))
NATIVE := $(shell find cpp -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' -o -name '*.c' \
            | grep -v third_party)
BUILD_TOOLS = $(shell sed -nE 's/^ *"((cmake|ninja|setuptools|wheel)==[^"]*)",?$$/\1/p' pyproject.toml)

MISSING = $(shell for tool in $(PYTHON) g++ git; do command -v $$tool >/dev/null || echo $$tool; done; \
            $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv)

.PHONY: build demo tensorrt triton test test-all test-gpu sanitize-gpu test-mutants bench lint test-cpp \
        test-fuzz test-python clean help
build: $(INSTALLED)
	@$(BIN)/python setup.py --quiet build_library --editable-mode

.venv/tools: pyproject.toml
	$(if $(strip $(MISSING)),$(error missing $(strip $(MISSING)): apt-get install -y python3 python3-venv g++ make git))
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(BUILD_TOOLS)
	$(BIN)/python cpp/cmake/toolchain.py | xargs -r $(BIN)/python -m pip install --quiet
	touch $@

$(INSTALLED): .venv/tools setup.py
	$(BIN)/python -m pip install --quiet --no-build-isolation \
	  --config-settings editable_mode=strict --editable '.[dev]'
	rm -f .venv/installed-*
	touch $@

# The versions that plugins are tested on; 2 GB come, 1.7 GB stay (NVIDIA's license, see there).
tensorrt: .venv/tools
	@$(BIN)/python cpp/cmake/fetch_tensorrt.py

# The server that tests of serving start, with a Python of its own; 330 MB.
triton: build
	@$(BIN)/python tests/fetch_triton.py

demo: build
	@$(BIN)/trtllm-engram demo

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(NATIVE)
	$(BIN)/mypy

# Everything under ASan and UBSan, the tables' threads under TSan too.
test-cpp: .venv/tools
	cd cpp && PATH="$(CURDIR)/$(BIN):$$PATH" && for preset in sanitize thread; do \
	  cmake --preset $$preset --log-level=WARNING && cmake --build --preset $$preset \
	    && ctest --preset $$preset || exit; done

# libFuzzer is clang's; g++ has none.
FUZZER := echo 'extern "C" int LLVMFuzzerTestOneInput(const char*, long) { return 0; }' \
            | clang++ -x c++ -fsanitize=fuzzer - -o /dev/null
test-fuzz: .venv/tools
	@if $(FUZZER) 2>/dev/null; then cd cpp && PATH="$(CURDIR)/$(BIN):$$PATH" \
	  && cmake --preset fuzz --log-level=WARNING && cmake --build --preset fuzz && ctest --preset fuzz; \
	else echo 'NOT RUN: fuzzing of the C++ parsers: apt-get install -y clang libclang-rt-14-dev'; fi

test-python: build
	$(BIN)/pytest --numprocesses=auto --dist=loadgroup -m '$(or $(MARKERS),not slow)'

# $(call timed,target): runs it and says how long it took.
timed = start=$$SECONDS; $(MAKE) --no-print-directory $(1) && took=$$((SECONDS - start)) \
  && $(MINUTES) $(firstword $(1)) $$((took / 60)) $$((took % 60))

test:
	@$(call timed,build)
	@$(call timed,lint)
	@$(call timed,test-cpp)
	@$(call timed,test-fuzz)
	@$(call timed,test-python)

test-all:
	@$(MAKE) --no-print-directory test MARKERS='slow or not slow'
	@$(call timed,test-mutants)

# Ops, tables, engines and polygraphy; says at once what it lacks of
# `.venv/bin/pip install cuda-bindings tensorrt torch`, and runs no test then.
test-gpu: build
	TRTLLM_ENGRAM_REQUIRE=gpu,engine $(BIN)/pytest -m gpu

# compute-sanitizer over the same tests, on our own kernels: TensorRT's are not ours to judge, and
# codes of API calls are checked where they are made. A wrong access makes the exit code 9. The
# engines are built before, without it (tests/kept_plans.py); tests marked unsanitized build
# others, or run TensorRT's own kernels of FP8, of which racecheck breaks down.
SANITIZER = $(firstword $(wildcard $(CUDA_HOME)/bin/compute-sanitizer) \
              $(shell command -v compute-sanitizer) \
              $(wildcard .venv/lib/python3*/site-packages/nvidia/cu*/bin/compute-sanitizer))
SANITIZED ?= $(addprefix tests/test_,hash.py lookup.py stage.py project.py gate.py network.py \
               network_ranks.py prefetch.py engine.py)
sanitize-gpu: build
	$(if $(SANITIZER),,$(error compute-sanitizer: expected in CUDA_HOME or PATH, found none: \
	  .venv/bin/pip install nvidia-cuda-sanitizer-api==13.0.*))
	test="$(BIN)/python -m pytest -m 'gpu and not unsanitized' --keep-plans build/plans \
	  $(SANITIZED)"; \
	rm -rf build/plans; export TRTLLM_ENGRAM_REQUIRE=gpu,engine; $$test || exit; \
	for tool in memcheck racecheck synccheck; do \
	  $(SANITIZER) --tool $$tool --error-exitcode 9 --kernel-name kernel_substring=engram \
	    --report-api-errors no $$test || exit; \
	done

# RIVALS: a folder of rival kernels, measured in turns with ours.
bench: build
	$(BIN)/trtllm-engram bench gpu $(if $(RIVALS),--rivals $(RIVALS)) \
	  --output docs/performance.json --plot docs/performance.png

test-mutants: build
	$(BIN)/python tests/mutants/run.py

clean:
	rm -rf .venv build dist *.egg-info plugins/*.so .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find builder plugins runtime tests cpp -name __pycache__ -prune -exec rm -rf {} +

help:
	@echo "make [build] | demo | lint | clean"
	@echo "make test          what CI runs: lint, C++ and Python tests; says what it could not run"
	@echo "make tensorrt      brings the TensorRT versions that the plugins are tested on (2 GB)"
	@echo "make triton        brings the Triton Inference Server that tests start (330 MB)"
	@echo "make test-fuzz     a part of it: libFuzzer over the C++ parsers, where clang has it"
	@echo "make test-all      with slow tests and mutants; test-mutants runs those alone"
	@echo "make test-gpu      ops, engines and polygraphy on a GPU; before, once:"
	@echo "                   .venv/bin/pip install cuda-bindings tensorrt torch"
	@echo "make bench         GPU kernels, with RIVALS=DIR against others'; writes docs/performance.*"
	@echo "make sanitize-gpu  those under compute-sanitizer's memcheck, racecheck, synccheck"
