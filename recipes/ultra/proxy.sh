#!/usr/bin/env bash
# Nemotron 3 Ultra 550B-A55B on the GPUs you have: every GPU does what it did in the published launch.
# The batch is scaled with the GPUs: the same tokens per GPU and step. The learning rate stays the published one, since
# no report says how to scale it; LR sets another. TINY=1 selects the small form of the model.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: STEPS (1000), variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show ultra)
MODEL=ultra
SCHEDULE=published
if [ -n "${TINY:-}" ]; then # no published layout
    SCHEDULE=none TP=${TP:-1} EP=${EP:-1} GBS=${GBS:-$WORLD} LR=${LR:-1e-3}
fi

# parallelism: TP8 as published; EP64 halved until it divides the ranks of a pipeline stage
TP=${TP:-8} PP=${PP:-1}
if [ -z "${EP:-}" ]; then
    EP=64
    while (( WORLD / PP % EP )); do EP=$(( EP / 2 )); done
fi

# precision
PRECISION=${PRECISION:-bf16}

# schedule: published, 3072 sequences on 6144 GPUs; with STEPS warm-up is the first tenth, decay the last fifth
GBS=${GBS:-$(( WORLD / 2 ))}
STEPS=${STEPS:-1000}

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/ultra/proxy}
checkpoints

launch
