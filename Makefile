PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# The model that imitates answers to sums, from which `make demo-grpo` and `make demo-async` start.
IMITATOR := runs/demo_grpo/sft/summary.json
# `make gpu-check READY= RUN=python3` uses an interpreter that already has the dependencies, and installs nothing.
READY ?= $(STAMP)
RUN ?= $(BIN)/python
# Named so that pytest does not collect the rest; tests/gpu/test_gpu_marks.py checks that no marked test is elsewhere.
GPU_TESTS := tests/gpu tests/engine/generation/test_shared_prompts.py tests/engine/test_parallel.py \
	tests/model/test_parity.py tests/runtime/learning/test_gpu.py tests/runtime/output/test_costs.py
# If this variable is set, as in some images, then every process compiles the package again.
unexport PYTHONDONTWRITEBYTECODE
# One more than there are cores, at most 4: many tests wait for processes that wait for each other.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(4, (os.cpu_count() or 1) + 1))')

.PHONY: demo demo-grpo demo-async demo-agent plan-demo docs test test-all lint format venv gpu-check gpu-bench bench clean

demo: $(STAMP)  ## RLHF on real human ratings, end to end
	$(BIN)/python demo/prepare.py
	$(BIN)/realrl tokenizer data/demo/sft_train.jsonl --out data/demo/tokenizer --vocab-size 2048 --overwrite
	$(BIN)/realrl train recipes/demo/sft.yaml
	$(BIN)/realrl train recipes/demo/reward.yaml
	$(BIN)/realrl train recipes/demo/ppo.yaml
	$(BIN)/realrl report runs/demo/sft runs/demo/reward runs/demo/ppo --out runs/demo

demo-grpo: $(IMITATOR)  ## GRPO with a verifier: a small model finds out how to add
	$(BIN)/realrl train recipes/demo_grpo/grpo.yaml
	$(BIN)/realrl report runs/demo_grpo/sft runs/demo_grpo/grpo --out runs/demo_grpo

demo-async: $(IMITATOR)  ## the same on two processes: one generates while the other one trains
	$(BIN)/realrl train recipes/demo_grpo/asynchronous.yaml
	$(BIN)/realrl report runs/demo_grpo/sft runs/demo_async/grpo --out runs/demo_async

$(IMITATOR): demo/arithmetic.py recipes/demo_grpo/sft.yaml | $(STAMP)
	$(BIN)/python demo/arithmetic.py
	$(BIN)/realrl tokenizer data/demo_grpo/answers.jsonl --out data/demo_grpo/tokenizer --vocab-size 259 --overwrite
	$(BIN)/realrl train recipes/demo_grpo/sft.yaml

demo-agent: $(STAMP)  ## GRPO in an environment: a small model finds out how to guess a letter in four turns
	$(BIN)/python demo/guessing.py
	$(BIN)/realrl tokenizer data/demo_agent/games.jsonl --out data/demo_agent/tokenizer --vocab-size 280 --overwrite
	$(BIN)/realrl train recipes/demo_agent/sft.yaml
	$(BIN)/realrl train recipes/demo_agent/grpo.yaml
	$(BIN)/realrl report runs/demo_agent/sft runs/demo_agent/grpo --out runs/demo_agent

plan-demo: $(STAMP)  ## plans PPO for 70B and 8B models on 128 H100: tables, plan file, page and timeline
	mkdir -p runs/plan-demo
	$(BIN)/realrl plan recipes/reference/ppo-70b.yaml --cluster h100:16x8 --out runs/plan-demo/plan.yaml \
		--html runs/plan-demo/plan.html --trace runs/plan-demo/trace.json

docs: $(STAMP)  ## the documentation as a site, in site/
	$(BIN)/mkdocs build --strict

test: lint  ## what CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-all:  ## also the tests marked `exhaustive`: further cases of the same checks
	REALRL_EVERY_RUN=1 $(MAKE) test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

gpu-check: $(READY)  ## the tests that need one CUDA device, and those that need two where there are two
	@$(RUN) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
		|| { echo "there is no CUDA device here" >&2; exit 2; }
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(RUN) -m pytest -m "gpu or gpu2" $(GPU_TESTS)

gpu-bench: $(READY)  ## training, decoding, GRPO and PPO on one GPU, into docs/notes/benchmarks-gpu.md
	PYTHONPATH=$(CURDIR)/src:$$PYTHONPATH $(RUN) bench/gpu/run.py

bench: $(STAMP)  ## the measurements that need no CUDA device
	$(BIN)/python demo/prepare.py
	$(BIN)/python bench/peers.py
	$(BIN)/python bench/reallocation.py
	$(BIN)/python bench/route_bounds.py
	$(BIN)/python bench/search.py
	$(BIN)/python bench/published_rows.py
	$(BIN)/python bench/reality.py

venv: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "realrl needs Python 3.11 or newer; name one with make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) -e '.[dev,demo,serve,verifiers]'
	@touch $@

clean:
	find src -name "*.nb[ci]" -delete
	rm -rf $(VENV) site runs/demo runs/demo_grpo runs/demo_async runs/plan-demo data/demo data/demo_grpo
