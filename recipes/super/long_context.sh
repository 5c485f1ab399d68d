#!/usr/bin/env bash
# Long-context phase of Nemotron 3 Super: constant rate 4.5e-6, 16 x 1M a step.
#   PHASE=1 (default)  34B tokens at 1M
#   PHASE=2            17B tokens alternating between 1M and 4K, the part at 1M. The shares are UNKNOWN: set STEPS
#   PHASE=4k           the part at 4K; its batch is UNKNOWN, so GBS is needed as well
# A run has one length, so a published mixture becomes several runs: docs/launching.md.
# Needed: DATA_PATH, TOKENIZER, and LOAD: checkpoints of the previous phase. SEQ sets another length.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show super)
MODEL=super

# parallelism: the published layout is TP2 CP64 EP64 on GB200; at 4K the layout of pre-training
PHASE=${PHASE:-1}
case $PHASE in
    1) SCHEDULE=long-context TP=${TP:-2} CP=${CP:-64} EP=${EP:-64} ;;
    2) SCHEDULE=long-context-2 TP=${TP:-2} CP=${CP:-64} EP=${EP:-64} ;;
    4k) SCHEDULE=long-context-4k TP=${TP:-2} EP=${EP:-64} ;;
    *) fail "PHASE=$PHASE: use 1, 2 or 4k" ;;
esac

# precision: not published for this phase
PRECISION=${PRECISION:-bf16}

# memory: NVIDIA's configuration recomputes E layers
RECOMPUTE=${RECOMPUTE-moe}

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/super/long_context-$PHASE}
SAVE_INTERVAL=${SAVE_INTERVAL:-20}
checkpoints required

launch
