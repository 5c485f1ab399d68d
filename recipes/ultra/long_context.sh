#!/usr/bin/env bash
# Long-context phase of Nemotron 3 Ultra: constant rate 2.5e-6, 25,165,824 tokens a step, 33B in all.
#   PHASE=1 (default)  92 % of the steps: 24 x 1M
#   PHASE=4k           8 % of the steps: 6144 x 4K
# A run has one length, so a published mixture becomes several runs: docs/launching.md.
# Needed: DATA_PATH, TOKENIZER, and LOAD: checkpoints of the previous phase. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show ultra)
MODEL=ultra

# parallelism: the published layout is TP8 CP32 EP128 PP2 on GB200; at 4K the layout of pre-training
PHASE=${PHASE:-1}
case $PHASE in
    1) SCHEDULE=long-context TP=${TP:-8} CP=${CP:-32} EP=${EP:-128} PP=${PP:-2} ;;
    4k) SCHEDULE=long-context-4k TP=${TP:-8} EP=${EP:-64} ;;
    *) fail "PHASE=$PHASE: use 1 or 4k" ;;
esac

# precision: not published for this phase
PRECISION=${PRECISION:-bf16}

# memory: no recomputation is published
RECOMPUTE=${RECOMPUTE-}

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/ultra/long_context-$PHASE}
SAVE_INTERVAL=${SAVE_INTERVAL:-20}
checkpoints required

launch
