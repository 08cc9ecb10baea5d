# Every target sets up .venv first, and again when the pins change.
#   make demo                          train one recipe on every backend and compare
#   make test | check | lint           all tests | the quick ones | style, types and layers
#   make test TORCH=torch==2.13.0+cpu  another build of torch; read when .venv is made (make clean makes it anew)

PYTHON ?= python3
TORCH ?= torch==2.13.0

BIN := .venv/bin
DEMO := runs/demo-$(shell date +%Y%m%d-%H%M%S)
READY := .venv/.ready

.PHONY: demo test check lint clean

demo: $(READY)
	$(BIN)/shardlab train recipes/demo.yaml --output $(DEMO)/longest --set train.steps=700 --set train.precision=bf16 \
		--set train.global_batch_size=4 --set train.optimizer.lr=2e-3 --set train.schedule.warmup_steps=10
	$(BIN)/shardlab generate $(DEMO)/longest/model --tokens 8 --prompt "        return"
	$(BIN)/shardlab compare recipes/demo.yaml --nproc 2 --output $(DEMO)/compare

test: $(READY)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup

check: $(READY)
	$(BIN)/python -m pytest -m "not slow and not soak" --numprocesses 2 --dist loadgroup --ignore=tests/distributed

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# torch goes first, as TORCH says; the rest must then leave it alone, so its pin is not among theirs.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	grep -v '^torch==' constraints.txt > .venv/constraints.txt
	$(BIN)/python -m pip install --quiet -c .venv/constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c .venv/constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find shardlab tests -name __pycache__ -type d -prune -exec rm -rf {} +
