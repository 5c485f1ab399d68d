#!/usr/bin/env bash
# Supervised fine-tuning of Nemotron 3 Super, constant rate 1e-5. The number of steps is UNKNOWN, so STEPS is needed.
#   PHASE=1 (default)  64 x 256K packed tokens a step, 30,000 samples of warm-up
#   PHASE=2            32 x 512K; the loss is a mean over conversations, as published (MEAN=tokens: over tokens)
# Needed: DATA_PATH (.jsonl of conversations), TOKENIZER, STEPS, and LOAD: checkpoints
# of the previous phase, or what nemotron3 convert from-hf wrote. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show super)
MODEL=super

# parallelism: not published. Nobody has run this layout
PHASE=${PHASE:-1} TP=${TP:-8} EP=${EP:-64}
case $PHASE in
    1) SCHEDULE=sft ;;
    2) SCHEDULE=sft-2; [ -n "${MEGATRON_LM_DIR:-}" ] || MEAN=${MEAN:-conversations} ;;
    *) fail "PHASE=$PHASE: use 1 or 2" ;;
esac

# precision: BF16
PRECISION=${PRECISION:-bf16}

# memory: not published
RECOMPUTE=${RECOMPUTE-full}

# data: conversations, packed; only the assistant's tokens count in the loss (docs/training.md)
conversation_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/super/sft-$PHASE}
checkpoints required

launch
