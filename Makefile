# Every target is complete on a fresh machine: it sets up the environment first if it is missing.
VENV ?= .venv
export PYTHON
RUN = $(VENV)/bin/python -m

.PHONY: demo test test-full test-te lint bench fuzz environment clean

environment:
	@bash .ci/setup-environment $(VENV)

# Train a small Nemotron 3 Super on the CPU from real text, in a few minutes.
demo: environment
	$(RUN) megatron_nemotron3 train super --tiny --output runs/demo

test: environment
	$(RUN) pytest -m "not full" $(TESTS)

test-full: environment
	$(RUN) pytest $(TESTS)

# TE_PYTHON names an interpreter with TransformerEngine; a GPU is not needed.
test-te: environment
	@test -n "$(TE_PYTHON)" || { echo "set TE_PYTHON to an interpreter that has transformer-engine" >&2; exit 2; }
	$(RUN) pytest -m te tests/te

lint: environment
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# Those of this machine's CPU. On a GPU: python benchmarks/train_step_gpu.py
bench: environment
	@for name in train_step parts ssd memory monitor convert convert_shapes; do \
		echo "== $$name"; $(VENV)/bin/python benchmarks/$$name.py || exit 1; \
	done

# The readers of checkpoints, for ten minutes; what it finds is kept in tests/fuzz/findings.
fuzz: environment
	$(RUN) tests.fuzz --minutes 10

clean:
	rm -rf $(VENV) runs build *.egg-info
