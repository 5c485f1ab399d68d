#!/usr/bin/env bash
# Nemotron 3 Super 120B-A12B on the GPUs there are: every GPU does what it did in the published launch.
# The batch is weak-scaled: as many tokens per GPU and step. The learning rate stays the published one: no report says
# how to scale it; LR sets another. TINY=1 takes the small form instead of the whole model.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: STEPS (1000), what stands below with :-, and the launch (GPUS NNODES ... DRY_RUN=1): recipes/common.sh.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show super)
MODEL=super
SCHEDULE=published
if [ -n "${TINY:-}" ]; then # nothing published
    SCHEDULE=none TP=${TP:-1} EP=${EP:-1} GBS=${GBS:-$WORLD} LR=${LR:-1e-3}
fi

# parallelism: TP2 as published; EP64 halved until it divides the ranks of a pipeline stage
TP=${TP:-2} PP=${PP:-1}
if [ -z "${EP:-}" ]; then
    EP=64
    while (( WORLD / PP % EP )); do EP=$(( EP / 2 )); done
fi

# precision
PRECISION=${PRECISION:-bf16}

# schedule: published, 3072 sequences on 3072 GPUs; with STEPS warm-up is the first tenth, decay the last fifth
GBS=${GBS:-$WORLD}
STEPS=${STEPS:-1000}

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/super/proxy}
checkpoints

launch
