#!/usr/bin/env bash
# Supervised fine-tuning of Nemotron 3 Ultra, cosine.
#   PHASE=1 (default)  204,800 samples of 294,912 packed tokens, 64 a step, rate 1.5e-5 to 1e-6
#   PHASE=2            19,200 samples of 515,000, rate 1e-5 to 2e-6
# Needed: DATA_PATH (.jsonl of conversations), TOKENIZER, and LOAD: checkpoints
# of the previous phase, or what nemotron3 convert from-hf wrote. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show ultra)
MODEL=ultra

# parallelism: NVIDIA's configuration is TP2 PP6 CP8 EP32 (TP=2 CP=8); this one needs no CP
PHASE=${PHASE:-1} TP=${TP:-8} PP=${PP:-6} EP=${EP:-32}
case $PHASE in
    1) SCHEDULE=sft ;;
    2) SCHEDULE=sft-2 ;;
    *) fail "PHASE=$PHASE: use 1 or 2" ;;
esac

# precision: BF16
PRECISION=${PRECISION:-bf16}

# memory: as in NVIDIA's configuration
RECOMPUTE=${RECOMPUTE-full}

# data: conversations, packed; only the assistant's tokens count in the loss (docs/training.md)
conversation_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/ultra/sft-$PHASE}
checkpoints required

launch
