# kvdev: `make run` does the main job on the embedded target, `make test` runs the tests.
# Everything happens in $(VENV); PYTHON picks the interpreter: make test PYTHON=python3.13 VENV=.venv-3.13

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
KVDEV := $(VENV)/bin/kvdev
PYTEST := $(PY) -m pytest
PYTEST_ARGS ?=
RUN_ARGS ?=
CSRC := kvdev/csrc
STRICT := -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wconversion -Wshadow -Wvla -Wundef -Werror -fsyntax-only
comma := ,
SOURCES := pyproject.toml setup.py $(wildcard $(CSRC)/*.c $(CSRC)/*.h $(CSRC)/*.py)

# kernels/ and tools/ are source roots: without this, running from the checkout would make them importable.
export PYTHONSAFEPATH := 1
export KVDEV_INTEROP

.DEFAULT_GOAL := help
.PHONY: help need setup dev run build lint format typecheck test unit golden tidy property fuzz fuzz-short fuzz-coverage fuzz-minimize soak fault crash \
        interop long bench-smoke bench asan wheel clean ci

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

need:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is missing: apt-get install python3" >&2; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	    { echo "make: $(PYTHON) is $$($(PYTHON) -V 2>&1): kvdev needs 3.10 to 3.13; name one with PYTHON=" >&2; exit 2; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	    { echo "make: $(PYTHON) has no venv module: apt-get install python3-venv" >&2; exit 2; }
	@command -v gcc >/dev/null || { echo "make: gcc is missing: apt-get install gcc" >&2; exit 2; }
	@echo 'int main(void) { return 0; }' | gcc -x c - -o /dev/null 2>/dev/null || \
	    { echo "make: gcc cannot link a program: apt-get install gcc libc6-dev" >&2; exit 2; }
	@$(PYTHON) -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || \
	    { echo "make: Python.h is missing: apt-get install python3-dev" >&2; exit 2; }

# The wait is announced, since pip is told to be quiet about everything but trouble.
define install
@echo "make: setting up $(VENV): downloads about 70 MB the first time and compiles the C core; a minute or two"
@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(1)]'
endef

$(VENV)/.ready: $(SOURCES) | need
	$(call install,test)
	@touch $@

$(VENV)/.dev: $(SOURCES) | need
	$(call install,test$(comma)dev)
	@touch $@ $(VENV)/.ready

setup: $(VENV)/.ready ## make the virtual environment and build the C core

dev: $(VENV)/.dev ## the same, with the linters

build: setup ## the same as setup

run: setup ## the main job: offload and restore a request trace on the embedded target
	$(KVDEV) replay --embedded --kill-halfway $(RUN_ARGS)

test: setup ## every test this machine can run; skips say why
	$(PYTEST) $(PYTEST_ARGS)

unit golden tidy property fault crash: setup ## one folder of the tests
	$(PYTEST) tests/$@ $(PYTEST_ARGS)

# The core under sanitizers with the fuzzer in the kernel's place (tests/fuzz); gcc is enough, libFuzzer takes clang.
FUZZ := build/fuzz
FUZZ_SANITIZE := -g -O2 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
FUZZ_SOURCES := $(wildcard $(CSRC)/*.[ch] tests/fuzz/*.[ch])
FUZZ_SEED ?= $(shell date +%s)
FUZZ_JOBS ?= $(shell nproc)
FUZZ_MUTATED ?= 2000000
# SECONDS is the shell's own name for its age: only one given on the command line counts.
FUZZ_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),600)

define fuzz_build
@mkdir -p $(FUZZ)
for c in $(CSRC)/*.c; do $(1) -std=c11 -D_GNU_SOURCE $(2) -fno-strict-aliasing -pthread -I$(CSRC) -Itests/fuzz \
    -include tests/fuzz/seam.h -c -o $(FUZZ)/$(3)_$$(basename $$c .c).o $$c || exit 1; done
for c in tests/fuzz/*.c; do $(1) -std=c11 -D_GNU_SOURCE $(2) $(4) -pthread -I$(CSRC) -Itests/fuzz \
    -c -o $(FUZZ)/$(3)_fuzz_$$(basename $$c .c).o $$c || exit 1; done
$(1) $(2) $(4) -pthread -o $@ $(FUZZ)/$(3)_*.o -lm
endef

$(FUZZ)/pdu_fuzz: $(FUZZ_SOURCES)
	$(call fuzz_build,gcc,$(FUZZ_SANITIZE),gcc,)

$(FUZZ)/pdu_libfuzzer: $(FUZZ_SOURCES)
	$(call fuzz_build,clang,$(FUZZ_SANITIZE) -fsanitize=fuzzer-no-link,clang,-DKVDEV_FUZZ_LIBFUZZER -fsanitize=fuzzer)

fuzz: setup $(FUZZ)/pdu_fuzz ## mutated PDU streams through host and target, and the property tests with fresh seeds; SECONDS=n
	$(FUZZ)/pdu_fuzz tests/fuzz/corpus/*
	@if command -v clang >/dev/null; then $(MAKE) --no-print-directory fuzz-coverage SECONDS=$(FUZZ_SECONDS); \
	else $(FUZZ)/pdu_fuzz --seed $(FUZZ_SEED) --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS); fi
	KVDEV_HYPOTHESIS_PROFILE=fuzz $(PYTEST) tests/property $(PYTEST_ARGS)

# Half of the time guided by coverage from the kept corpus, half by seeds; what is new stays under build.
fuzz-coverage: $(FUZZ)/pdu_libfuzzer $(FUZZ)/pdu_fuzz
	@mkdir -p $(FUZZ)/corpus $(FUZZ)/crash
	$(FUZZ)/pdu_libfuzzer -max_total_time=$$(($(FUZZ_SECONDS) / 2)) -max_len=4096 -timeout=60 -print_final_stats=1 \
	    -fork=$(FUZZ_JOBS) -artifact_prefix=$(FUZZ)/crash/ $(FUZZ)/corpus tests/fuzz/corpus
	$(FUZZ)/pdu_fuzz --seed $(FUZZ_SEED) --seconds $$(($(FUZZ_SECONDS) / 2)) --jobs $(FUZZ_JOBS)

fuzz-short: $(FUZZ)/pdu_fuzz ## 2,000,000 mutated PDUs through host and target under the sanitizers, and the kept corpus
	$(FUZZ)/pdu_fuzz tests/fuzz/corpus/*
	$(FUZZ)/pdu_fuzz --seed $(if $(filter command line environment,$(origin FUZZ_SEED)),$(FUZZ_SEED),1) --mutated $(FUZZ_MUTATED) --jobs $(FUZZ_JOBS)

# The smallest set of inputs with the same coverage: what build/fuzz/corpus has found goes into the kept one.
fuzz-minimize: $(FUZZ)/pdu_libfuzzer
	rm -rf $(FUZZ)/corpus_new && mkdir -p $(FUZZ)/corpus_new
	$(FUZZ)/pdu_libfuzzer -merge=1 -max_len=4096 $(FUZZ)/corpus_new tests/fuzz/corpus $(FUZZ)/corpus

soak: setup ## mixed verified I/O with random faults on 8 queue pairs; SECONDS=n, 1800 by default
	KVDEV_SOAK_SECONDS=$(if $(filter command line,$(origin SECONDS)),$(SECONDS),1800) \
	    $(PYTEST) -s tests/fault/test_soak.py $(PYTEST_ARGS)

interop: setup ## real peers in QEMU; what is missing is a failure
	KVDEV_INTEROP=require $(PYTEST) tests/interop $(PYTEST_ARGS)

long: setup ## the full counts
	KVDEV_LONG=1 $(PYTEST) $(PYTEST_ARGS)

bench-smoke: setup ## every benchmark at toy size
	$(PYTEST) tests/bench $(PYTEST_ARGS)

bench: setup ## the benchmarks; leave the machine alone meanwhile
	$(PY) bench/kernels.py
	$(PY) bench/datapath.py
	$(PY) bench/store.py
	$(PY) bench/policies.py
	$(PY) bench/local.py
	$(PY) bench/reconnect.py

lint: dev ## ruff, formatting, and the C core under strict warnings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	for c in $(CSRC)/*.c tests/fuzz/*.c; do gcc $(STRICT) -I$(CSRC) $$c || exit 1; done

format: dev ## rewrite the Python sources in our format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

typecheck: dev ## mypy --strict
	$(VENV)/bin/mypy kvdev spdk_rpc kernels/kvdev_kernels tools/kvdev_tools tests bench

# The sanitized core lives in a copy of the tree, so that the ordinary one stays usable.
ASAN := build/asan
ASAN_TESTS ?= tests/unit/native tests/unit/block tests/unit/target tests/unit/store tests/golden tests/property tests/fault
# Python above the core that no sanitizer sees into: configuration, plans, the command line, Numba's kernels; and the
# soak, whose memory cannot stay flat while freed memory is kept back.
ASAN_SKIPS := $(addprefix --ignore=,$(addprefix tests/unit/target/test_rpc_,model.py recorded.py schema.py serve.py server.py) \
    tests/property/test_layout_moves.py tests/property/test_plan_apply.py tests/fault/test_cli_bad_input.py tests/fault/test_replay_target_gone.py tests/fault/test_soak.py)
asan: setup ## the tests that reach the C core, under AddressSanitizer and UBSan
	@$(PY) -c 'import setuptools' 2>/dev/null || \
	    $(PY) -m pip install --quiet --disable-pip-version-check 'setuptools>=68,<83'  # not in environments from Python 3.12 on
	rm -rf $(ASAN) && mkdir -p $(ASAN)
	cp -r kvdev spdk_rpc tests docs setup.py pyproject.toml README.md kernels tools $(ASAN)/
	rm -f $(ASAN)/kvdev/_core*.so
	cd $(ASAN) && KVDEV_SANITIZE=1 $(abspath $(PY)) setup.py --quiet build_ext --inplace
	cd $(ASAN) && PYTHONPATH=$(abspath $(ASAN)):$(abspath $(ASAN))/kernels:$(abspath $(ASAN))/tools \
	    LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:abort_on_error=0:allocator_may_return_null=1 KVDEV_EXPECT_SANITIZED=1 \
	    $(abspath $(PY)) -m pytest --capture=sys -p no:cacheprovider $(ASAN_SKIPS) $(ASAN_TESTS) $(PYTEST_ARGS)

wheel: setup ## build the wheel, install it in an empty environment, import it
	rm -rf build/wheel build/wheel-venv
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheel .
	$(PYTHON) -m venv build/wheel-venv
	build/wheel-venv/bin/python -m pip install --quiet --disable-pip-version-check build/wheel/kvdev-*-abi3-*.whl
	cd build && wheel-venv/bin/python -c 'import kvdev._core, spdk_rpc, kvdev_kernels, kvdev_tools; print(kvdev.__file__)'
	build/wheel-venv/bin/kvdev --version

clean: ## remove everything that was built
	rm -rf build *.egg-info $(VENV) kvdev/_core*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

ci: lint typecheck test asan wheel ## what every commit must pass
