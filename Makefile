# Every target bootstraps what it needs, with nothing but python3 (3.11 or 3.12) and make on the machine.
SHELL := /bin/bash
.DEFAULT_GOAL := help
# A process that may not write compiled modules compiles all of its imports: three times the CPU of every start.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help up gpu tensorrt test test-gpu test-long check docs screenshots lock clean no-triton

PYTHON ?= $(shell for p in python3 python3.12 python3.11; do \
	"$$p" -c 'import sys; raise SystemExit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && { echo "$$p"; break; }; done)
VENV := .venv
TRITON_VENV := .venv-triton
BIN := $(VENV)/bin
# uv is quick; pip is the way out where only pip is configured for this machine's index. A lock is whole: nothing is
# resolved anew, so that what requirements/overrides.in leaves out stays out.
install = $(BIN)/uv pip install -q --no-deps --python $(1)/bin/python --require-hashes $(2) || $(BIN)/pip --python $(1)/bin/python install -q --no-deps --require-hashes $(2)
uninstall = $(BIN)/uv pip uninstall -q --python $(1)/bin/python $(2) || $(BIN)/pip --python $(1)/bin/python uninstall -q -y $(2)
LOCKS := requirements/bootstrap.txt requirements/load.txt
TRITON_LOCKS := requirements/triton.txt requirements/triton-server.txt
# Triton's wheel is for Linux on x86-64 with glibc 2.35 or newer.
RUNS_TRITON := $(shell [ "$$(uname -sm)" = "Linux x86_64" ] && \
	printf '%s\n' 2.35 "$$(getconf GNU_LIBC_VERSION 2>/dev/null | cut -d' ' -f2)" | sort -V -C && echo yes)
# Other people's clients, for the tests of the wire: KServe's own, and perf_analyzer.
CLIENTS_VENV := .venv-clients
CLIENTS_LOCKS := requirements/clients.txt requirements/perf-analyzer.txt
CLIENTS := $(if $(RUNS_TRITON),$(CLIENTS_VENV)/.ready)
TRITON := $(if $(RUNS_TRITON),$(TRITON_VENV)/.ready,no-triton)
# After `make gpu`, what installs onnxruntime anew is followed by what replaces it with onnxruntime-gpu.
GPU := $(if $(wildcard $(VENV)/.gpu),$(VENV)/.gpu)
# What `make gpu` and `make tensorrt` have added to Triton's environment stays in it.
ADDED = $(if $(wildcard $(TRITON_VENV)/.gpu),--gpu) $(if $(wildcard $(TRITON_VENV)/.tensorrt),--tensorrt)

help:  ## what can be made here
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

up: $(VENV)/.base $(GPU) $(TRITON)  ## the whole stack on this machine: engine, gateway, metrics (ARGS="--http-port 8080 …")
	@exec $(BIN)/penstock up $(ARGS)

serve: $(VENV)/.base $(GPU) $(TRITON)  ## the same with a model of yours (MODEL=best.onnx ARGS="--labels names.txt")
	@[ -n '$(MODEL)' ] || { echo 'give your model file: make serve MODEL=best.onnx'; exit 2; }
	@exec $(BIN)/penstock serve '$(MODEL)' $(ARGS)

gpu: $(if $(RUNS_TRITON),$(TRITON_VENV)/.gpu $(VENV)/.gpu,no-triton)  ## PyTorch and onnxruntime-gpu for models on a GPU, and what decodes video there (about 7 GB; CUDA 13: driver 580, Turing or newer)

tensorrt: $(if $(RUNS_TRITON),$(TRITON_VENV)/.tensorrt) $(VENV)/.tensorrt  ## TensorRT-RTX: builds engines on a CPU, and ONNX Runtime's plug-in that runs them (240 MB to download; NVIDIA's licence)

test: $(VENV)/.dev $(GPU) $(TRITON) $(CLIENTS)  ## every test that this machine can run (ARGS="-k image")
	@$(BIN)/python -m pytest -n 3 -p tests.work_units -m "not long and not gpu" $(ARGS)

test-gpu:  ## what needs an NVIDIA GPU, minutes; with PyTorch after make gpu (ARGS="-k mps -s --most-s 60 --within-s 300")
	@nvidia-smi -L >/dev/null 2>&1 || { echo "make test-gpu: no NVIDIA GPU answers here (nvidia-smi -L): nothing to run"; exit 2; }
	@$(MAKE) --no-print-directory $(VENV)/.dev $(GPU) $(TRITON) $(CLIENTS)
	@$(BIN)/python -m pytest -p no:randomly -p tests.gpu_session -m gpu -rs -W default tests/gpu $(ARGS)

test-long: $(VENV)/.dev $(TRITON) $(CLIENTS)  ## soak tests, fuzzing, mutation tests of tests/faults, property tests at length
	@$(BIN)/python -m pytest -m "long or hypothesis" --hypothesis-profile thorough --timeout 1800 $(ARGS)

check: $(VENV)/.dev  ## formatting, lint, types, architecture, spelling, container and compose files, workflows, scripts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python -m tests.plain_english
	@$(BIN)/codespell
	@$(BIN)/python -m deploy.helm.readme --check
	@if [ -d deploy/docker ]; then find deploy/docker -name 'Dockerfile*' | xargs -r $(BIN)/hadolint; fi
	@if command -v promtool >/dev/null; then promtool check rules deploy/monitoring/rules/*.yaml >/dev/null; fi
	@if [ -f compose.yaml ]; then $(BIN)/check-jsonschema --builtin-schema vendor.compose-spec compose*.yaml; fi
	@$(BIN)/check-jsonschema -q --builtin-schema vendor.github-workflows .github/workflows/*.yaml
	@$(BIN)/zizmor -q --offline --no-progress .github/workflows
	@$(BIN)/shellcheck .ci/run deploy/*/*.sh tests/deploy/*.sh

docs: $(VENV)/.dev  ## the documentation as a site, in build/site; links are checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q && echo "$(BIN)/python -m http.server -d build/site shows it"

screenshots: $(VENV)/.dev  ## every page of the console, three widths, light and dark, in build/screenshots (ARGS="--video …")
	@$(BIN)/python -m docs.screenshots $(ARGS)

lock: $(VENV)/.uv  ## resolve the requirements anew
	$(BIN)/python requirements/lock.py

clean:  ## remove the environments
	rm -rf $(VENV) $(TRITON_VENV) $(CLIENTS_VENV) .venv-peers

$(VENV)/.uv: requirements/bootstrap.txt
	@test -n "$(PYTHON)" || { echo "python3 3.11 or 3.12 is needed (numpy 1.26, which Triton's models use, has no wheel for others): install it, or say make PYTHON=/path/to/python3.12"; exit 1; }
	@echo "building $(VENV) from the locks" && $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	@touch $@

$(VENV)/.base: $(VENV)/.uv requirements/load.txt requirements/link.py pyproject.toml
	@echo "installing the packages: the first time they are downloaded"
	@$(call install,$(VENV),-r requirements/load.txt)
	@$(BIN)/python requirements/link.py
	@touch $@

$(VENV)/.dev: $(VENV)/.base requirements/dev.txt
	@echo "adding the development tools" && $(call install,$(VENV),-r requirements/dev.txt)
	@touch $@

no-triton:
	@echo "no Triton here (its wheel is for Linux on x86-64 with glibc 2.35 or newer): the embedded engine serves"

$(TRITON_VENV)/.ready: $(TRITON_LOCKS) | $(VENV)/.base
	@$(BIN)/penstock setup triton --folder $(TRITON_VENV) $(ADDED)
	@touch $@

$(TRITON_VENV)/.gpu: $(TRITON_VENV)/.ready requirements/triton-gpu.txt
	@$(BIN)/penstock setup triton --folder $(TRITON_VENV) $(sort --gpu $(ADDED))
	@touch $@

$(VENV)/.gpu: $(VENV)/.base $(wildcard $(VENV)/.dev) requirements/video-gpu.txt requirements/engine-gpu.txt
	@echo "adding what decodes video on a GPU to $(VENV)" && $(call install,$(VENV),-r requirements/video-gpu.txt)
	@echo "replacing onnxruntime by onnxruntime-gpu in $(VENV)" && $(call uninstall,$(VENV),onnxruntime onnxruntime-gpu)
	@$(call install,$(VENV),-r requirements/engine-gpu.txt)
	@touch $@

$(TRITON_VENV)/.tensorrt: $(TRITON_VENV)/.ready requirements/triton-tensorrt.txt
	@$(BIN)/penstock setup triton --folder $(TRITON_VENV) $(sort --tensorrt $(ADDED))
	@touch $@

$(VENV)/.tensorrt: $(VENV)/.base requirements/tensorrt.txt
	@echo "adding TensorRT-RTX to $(VENV): NVIDIA's licence applies" && $(call install,$(VENV),-r requirements/tensorrt.txt)
	@touch $@

$(CLIENTS_VENV)/.ready: $(VENV)/.uv $(CLIENTS_LOCKS)
	@echo "building $(CLIENTS_VENV): the clients that the wire is tried with" && $(PYTHON) -m venv --without-pip $(CLIENTS_VENV)
	@$(call install,$(CLIENTS_VENV),-r requirements/clients.txt)
	@$(call install,$(CLIENTS_VENV),-r requirements/perf-analyzer.txt)
	@touch $@
