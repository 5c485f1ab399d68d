#!/usr/bin/env bash
# Pre-train Nemotron 3 Super 120B-A12B in NVFP4 with the published schedule; needs Blackwell and TransformerEngine.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: TE_PRECISION_CONFIG_FILE (a table of your own; nemotron3 precision super shows the default), variables
# below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show super)
MODEL=super

# parallelism: the published launch is 3072 GB200, TP2 EP64 PP1, MBS 1 (HybridEP there, alltoall here)
TP=${TP:-2} EP=${EP:-64}

# precision: the published mix: last layers, attention and latent projections, MTP BF16, Mamba out_proj MXFP8
PRECISION=nvfp4
OUTPUT=${OUTPUT:-runs/super/nvfp4}
precision_file

# schedule
SCHEDULE=published

# data
text_data

# logging and checkpoints
checkpoints

launch
