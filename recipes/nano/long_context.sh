#!/usr/bin/env bash
# Long-context phase of Nemotron 3 Nano: constant rate 1e-5, 48 x 512K a step, 121B tokens at 512K and 4K together.
# The share of each length is UNKNOWN, so STEPS is needed (4808: all tokens at 512K).
#   PHASE=1 (default)  512K
#   PHASE=4k           4K; its batch is UNKNOWN, so GBS is needed as well
# A run has one length, so a published mixture becomes several runs: docs/launching.md.
# Needed: DATA_PATH, TOKENIZER, and LOAD: checkpoints of the previous phase. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show nano)
MODEL=nano

# parallelism: the published layout is TP8 CP8 EP8 PP4 on H100; at 4K the layout of pre-training
PHASE=${PHASE:-1}
case $PHASE in
    1) SCHEDULE=long-context TP=${TP:-8} CP=${CP:-8} EP=${EP:-8} PP=${PP:-4} ;;
    4k) SCHEDULE=long-context-4k TP=${TP:-2} EP=${EP:-32} ;;
    *) fail "PHASE=$PHASE: use 1 or 4k" ;;
esac

# precision: not published for this phase
PRECISION=${PRECISION:-bf16}

# memory: no recomputation is published
RECOMPUTE=${RECOMPUTE-}

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/nano/long_context-$PHASE}
SAVE_INTERVAL=${SAVE_INTERVAL:-20}
checkpoints required

launch
