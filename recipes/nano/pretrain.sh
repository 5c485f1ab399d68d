#!/usr/bin/env bash
# Pre-train Nemotron 3 Nano 30B-A3B with the published schedule: 25T tokens, 3072 x 8192 per step, WSD.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: variables below with := or :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show nano)
MODEL=nano

# parallelism: the published launch is 3072 H100, TP2 EP32 PP1, MBS 1
TP=${TP:-2} EP=${EP:-32}

# precision: the published model is BF16
PRECISION=${PRECISION:-bf16}

# schedule
SCHEDULE=published

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/nano/pretrain}
checkpoints

launch
