# Each verb does all its own set-up. The environment is made once, again when a lock file or setup.cfg changes.
PYTHON ?= python3.11
BIN := .venv/bin
READY := .venv/ready
# Test files at once; the largest start a vLLM server each, of 2 GiB.
JOBS ?= 4
LOCKS := configs/requirements-cpu.lock configs/requirements-test.lock

.PHONY: demo test versions next py312 cartridges-test bench chaos docs lint clean

demo: $(READY)
	$(BIN)/lmcache-cartridge demo

test: $(READY)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# Every pair of vLLM and LMCache that has a build for CPU: downloads, and takes hours.
versions: $(READY)
	.ci/versions

# Every name of vLLM's and LMCache's, and the multiprocess part of the suite, with LMCache's next release.
next: $(READY)
	.ci/next

# The whole suite under Python 3.12 where there is one: downloads gigabytes.
py312:
	.ci/py312

# One tier of docs/measuring.md or several, `TIER=0,3cross`, or `TIER=all`, which takes ten minutes; MODEL is a directory.
TIER ?= -1,0,0.5,1,1b,2,3,3cross,5,7,10,11
MODEL ?= lmcache_cartridge/cli/recall/model
cartridges-test: $(READY)
	$(BIN)/lmcache-cartridge validate --model $(MODEL) --tier=$(TIER)

# The short forms, some fifteen minutes; `python benchmarks/NAME.py --help` for the long ones. BENCH_ARGS goes to each.
BENCHMARKS := replacement scale inject retrieval fleet saving cold_fetch ttft
bench: $(READY)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py $(BENCH_ARGS); done

# Everything around a server goes wrong, ten minutes in each mode; exit status 1 where an answer is wrong.
chaos: $(READY)
	$(BIN)/python benchmarks/chaos.py $(BENCH_ARGS)

# The tables in README and docs, figures among them; test_docs says when they are stale. Then the site, build/site/index.html:
# `python -m http.server -d build/site` serves it.
SITE := $(BIN)/python -m sphinx -q -E -a -W --keep-going -c docs -d build/doctrees . build/site
docs: $(READY)
	$(BIN)/python docs/generate.py
	$(SITE)
	cp build/site/README.html build/site/index.html

lint: $(READY)
	$(SITE)
	$(BIN)/ruff format --check lmcache_cartridge tests benchmarks docs
	$(BIN)/ruff check lmcache_cartridge tests benchmarks docs
	$(BIN)/mypy

# --no-deps: the locks are complete, and pip's own resolution would add CUDA builds that break a CPU torch.
# compileall: vLLM starts several processes, each of which would compile every module again. One file of torch is written
# for Python 3.12.
$(READY): $(LOCKS) setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-deps --no-compile $(addprefix -r ,$(LOCKS))
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m compileall -q -j 0 -x py312_ .venv/lib
	touch $@

clean:
	rm -rf .venv .venv312 .venvnext build
