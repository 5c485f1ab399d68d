#!/usr/bin/env bash
# Pre-train Nemotron 3 Nano 30B-A3B in NVFP4 with the published schedule; needs Blackwell and TransformerEngine.
# Needed: DATA_PATH (prefix of a Megatron .bin/.idx, or weights and prefixes in turn), TOKENIZER (Hugging Face folder).
# Optional: TE_PRECISION_CONFIG_FILE (a table of your own; nemotron3 precision nano shows the default), variables
# below with :-, and those of ../common.sh (GPUS NNODES ... DRY_RUN=1).
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture: every number comes from the catalog (nemotron3 show nano)
MODEL=nano

# parallelism: the published launch is 3072 H100, TP2 EP32 PP1, MBS 1
TP=${TP:-2} EP=${EP:-32}

# precision: NVIDIA published no NVFP4 training of Nano; the table is that of Super (nemotron3 precision nano)
PRECISION=nvfp4
OUTPUT=${OUTPUT:-runs/nano/nvfp4}
precision_file

# schedule
SCHEDULE=published

# data
text_data

# logging and checkpoints
checkpoints

launch
