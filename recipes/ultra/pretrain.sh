#!/usr/bin/env bash
# Pre-train Nemotron 3 Ultra 550B-A55B with the published schedule: 25T tokens, 3072 x 8192 per step, WSD.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: variables below with := or :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show ultra)
MODEL=ultra

# parallelism: the published launch is 6144 GB200, TP8 EP64 PP1, MBS 2 (HybridEP there, alltoall here)
TP=${TP:-8} EP=${EP:-64}

# precision: the published model is an NVFP4 mix, which is nvfp4.sh; this recipe uses BF16
PRECISION=${PRECISION:-bf16}

# schedule
SCHEDULE=published

# data
text_data

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/ultra/pretrain}
checkpoints

launch
