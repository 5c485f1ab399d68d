# Every target works on a fresh machine: it creates the environment first if it is missing.
VENV ?= .venv
export PYTHON
# Images of containers often set it. Then every process compiles torch and Megatron again, for three times as long as
# their import takes.
export PYTHONDONTWRITEBYTECODE =
RUN = $(VENV)/bin/python -m
# A file's tests stay in one process: they share what they built. Long files start first (tests/conftest.py).
PYTEST = OMP_NUM_THREADS=1 $(RUN) pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: demo certificates quick test test-full test-te test-bridge test-rl test-upstream test-matrix test-main lint docs docs-look bench gpu gpu-pack \
	fuzz environment clean

environment:
	@bash .ci/setup-environment $(VENV)

# Train a small Nemotron 3 Super on the CPU from real text and let it write: 2 to 5 minutes. QUICK=1: a tenth of the
# steps, in a folder of its own, so that the long run does not go on from it.
# Its four sequences a step are shared by 1, 2 or 4 ranks, as there are cores; what it learns is the same.
RANKS = $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n >= 4 ? 4 : n >= 2 ? 2 : 1)))
DEMO = runs/demo$(if $(QUICK),-quick)
demo: environment
	$(RUN) megatron_nemotron3 train super --tiny --dp $(RANKS) --output $(DEMO)$(if $(QUICK), --steps 30)
	@echo; echo "the model continues '    def ':"
	$(RUN) megatron_nemotron3 generate $(DEMO) --prompt "    def " --max-new-tokens 80 --temperature 0.7 --top-p 0.9
	@echo; echo "on text that it has not seen: its loss, and how many of the tokens that MTP drafts it accepts:"
	$(RUN) megatron_nemotron3 evaluate $(DEMO) --draft 3 --tokens 8192
	@test -z "$(QUICK)" || { echo; echo "30 steps teach it common words, not Python; make demo trains 300."; }

# The light files, of every package: an answer in about a minute on two cores.
quick: environment
	$(PYTEST) --maxprocesses 2 -m "not full" --quick --durations=0 --durations-min=5 $(TESTS)

test: environment
	$(PYTEST) -m "not full" $(TESTS)

test-full: environment
	$(PYTEST) $(TESTS)

# Certificates of the recipes (recipes/*/*.certificate.json) that are missing or of another command.
certificates: environment
	$(RUN) tests.recipes.certificates

# TE_PYTHON names an interpreter with TransformerEngine; a GPU is not needed.
test-te: environment
	@test -n "$(TE_PYTHON)" || { echo "set TE_PYTHON to an interpreter that has transformer-engine" >&2; exit 2; }
	$(RUN) pytest -m te tests/te

# Megatron's own unit tests of what we replace, with the stock stack and with ours (docs/reference/upstream_tests.md).
test-upstream: environment
	@test -d "$(MEGATRON_LM_DIR)" || { echo "set MEGATRON_LM_DIR to a checkout of Megatron-LM" >&2; exit 2; }
	$(RUN) tests.upstream --megatron-lm $(MEGATRON_LM_DIR)
	$(RUN) tests.docs.pages

# BRIDGE_PYTHON names an interpreter with Megatron-Bridge; by default one is made (no GPU, no TransformerEngine).
# MAIN=1: the checkouts MEGATRON_BRIDGE_DIR and MEGATRON_LM_DIR are imported in front of the installed packages.
BRIDGE_PYTHON ?= $(VENV)-bridge/bin/python
FRONT = $(if $(MAIN),$(abspath $(MEGATRON_BRIDGE_DIR))/src:$(CURDIR)/build/main:)
put_in_front = test -z "$(MAIN)" || { test -d "$(MEGATRON_BRIDGE_DIR)/src/megatron/bridge" -a -d "$(MEGATRON_LM_DIR)/megatron/core" || \
	{ echo "set MEGATRON_BRIDGE_DIR and MEGATRON_LM_DIR to checkouts" >&2; exit 2; }; \
	mkdir -p build/main && ln -sfn "$(abspath $(MEGATRON_LM_DIR))/megatron" build/main/megatron; }
test-bridge: environment
	@$(put_in_front)
	@test "$(BRIDGE_PYTHON)" != "$(VENV)-bridge/bin/python" || bash .ci/bridge-environment $(VENV) $(VENV)-bridge
	PYTHONPATH=$(FRONT). OMP_NUM_THREADS=1 $(BRIDGE_PYTHON) -m pytest -p no:xdist -m bridge tests/bridge

# Checkouts of RL frameworks: VERL_DIR, NEMO_RL_DIR, SLIME_DIR, as many as there are. RL_PYTHON as BRIDGE_PYTHON.
RL_PYTHON ?= $(VENV)-rl/bin/python
test-rl: environment
	@$(put_in_front)
	@test -n "$(VERL_DIR)$(NEMO_RL_DIR)$(SLIME_DIR)" || { echo "set VERL_DIR, NEMO_RL_DIR or SLIME_DIR to a checkout" >&2; exit 2; }
	@test "$(RL_PYTHON)" != "$(VENV)-rl/bin/python" || { \
		bash .ci/bridge-environment $(VENV) $(VENV)-bridge && bash .ci/rl-environment $(VENV)-bridge $(VENV)-rl; }
	PYTHONPATH=$(FRONT). OMP_NUM_THREADS=1 $(RL_PYTHON) -m pytest -p no:xdist -m rl tests/rl

# A short suite at the pinned, the lowest and the newest packages, and on megatron-core's main (noxfile.py).
# SESSION=floor: one of pinned, floor, newest, main.
test-matrix: environment
	$(RUN) nox $(if $(SESSION),-s $(SESSION))

# The same and the stock script on a checkout of Megatron-LM's main, in front of the installed wheel.
test-main: environment
	@test -n "$(MEGATRON_LM_DIR)" || { echo "set MEGATRON_LM_DIR to a checkout of Megatron-LM's main" >&2; exit 2; }
	MEGATRON_LM_DIR_MAIN="$(MEGATRON_LM_DIR)" $(RUN) nox -s main

lint: environment
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

# The documentation as a site, build/site/index.html. Warnings are errors; the variable turns off an advertisement.
docs: environment
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

# Every page in Chromium at 1366 and 390 pixels: what does not fit, and a picture of each in build/look.
docs-look: docs
	$(RUN) tests.docs.look build/site --pictures build/look

# On a machine with a GPU: all that is measured there, in about 25 minutes (docs/contributing.md). GPU_PYTHON has torch;
# OPTIONS are those of benchmarks/gpu.py, --packages build/gpu-pack for one without megatron-core.
GPU_PYTHON ?= python3
RESULTS ?= build/gpu/results.jsonl
gpu:
	$(GPU_PYTHON) benchmarks/gpu.py --results $(RESULTS) $(OPTIONS)

# On a machine with a package index: what `make gpu` needs on one without, in folders of at most 52 MiB.
PACK ?= build/gpu-pack
gpu-pack: environment
	$(VENV)/bin/python benchmarks/gpu_pack.py $(PACK) $(OPTIONS)

# The benchmarks that run on a CPU.
bench: environment
	@for name in train_step monitor convert convert_shapes nvfp4 boundary plan_error generate refit_plan; do \
		echo "== $$name"; $(VENV)/bin/python benchmarks/$$name.py || exit 1; \
	done

# Fuzz the readers of checkpoints for ten minutes; findings are kept in tests/fuzz/findings.
fuzz: environment
	$(RUN) tests.fuzz --minutes 10

clean:
	rm -rf $(VENV) .nox runs build *.egg-info
