#!/usr/bin/env bash
# Train only the MTP heads of a finished Nemotron 3 Ultra, so that more drafts are accepted (docs/post_training.md).
#   HEADS   loss=kl,temperature=2,mix=1: as published for Ultra; the words of NEMOTRON3_BOOST
#   DEPTHS  recursive steps: 7, as published for Ultra
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder),
# LR (not published), and LOAD: checkpoints of the finished model, or what nemotron3 convert from-hf wrote.
# Optional: variables below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: the catalog's, with MTP applied DEPTHS times
DEPTHS=${DEPTHS:-7}
OUTPUT=${OUTPUT:-runs/ultra/boost}
model_of_depths ultra

# parallelism: not published, and without context parallelism. Nobody has run this layout
TP=${TP:-8} PP=${PP:-6} EP=${EP:-32}

# precision: BF16
PRECISION=${PRECISION:-bf16}

# schedule: 12,000 steps of 64 x 8,192 tokens are published for Ultra, the rate is not
need LR "the peak learning rate"
SCHEDULE=none STEPS=${STEPS:-12000} GBS=${GBS:-64} SEQ=${SEQ:-8192} MBS=${MBS:-1}
LR_DECAY_STYLE=${LR_DECAY_STYLE:-constant}

# the heads
ENVIRONMENT+=("NEMOTRON3_BOOST=${HEADS:-loss=kl,temperature=2,mix=1}")

# data
text_data

# logging and checkpoints
checkpoints required

launch
