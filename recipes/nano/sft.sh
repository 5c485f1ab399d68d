#!/usr/bin/env bash
# Supervised fine-tuning of Nemotron 3 Nano: 13,000 steps of 64 x 256K packed tokens, rate 5e-5, warm-up 800 steps.
# The schedule after the warm-up is UNKNOWN, so LR_DECAY_STYLE (constant, cosine ...) is needed.
# Needed: DATA_PATH (.jsonl of conversations), TOKENIZER, LR_DECAY_STYLE, and LOAD: checkpoints
# of the previous phase, or what nemotron3 convert from-hf wrote. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show nano)
MODEL=nano

# parallelism: not published for 256K; TP4 CP8 EP8 passes the rules; nobody has run it
SCHEDULE=sft PHASE=1 TP=${TP:-4} CP=${CP:-8} EP=${EP:-8}

# precision: BF16
PRECISION=${PRECISION:-bf16}

# memory: not published
RECOMPUTE=${RECOMPUTE-full}

# data: conversations, packed; only the assistant's tokens count in the loss (docs/training.md)
conversation_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/nano/sft-$PHASE}
checkpoints required

launch
