#!/usr/bin/env bash
# Pre-train Nemotron 3 Super 120B-A12B with its published schedule. DRY_RUN=1 prints the command only.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

# architecture: every number comes from the catalog (nemotron3 show super)
MODEL=super

# parallelism: the published launch is 3072 GB200, TP2 EP64 PP1, MBS 1 (HybridEP dispatch there, alltoall here).
# Its DP follows from the number of GPUs: world size / (TP * PP * CP).
WORLD=$(( ${GPUS:-8} * ${NNODES:-1} ))
TP=${TP:-2}
PP=${PP:-1}
CP=${CP:-1}
EP=${EP:-64}
LAYOUT="--tp $TP --pp $PP --cp $CP --ep $EP --dp $(( WORLD / (TP * PP * CP) ))"

# precision: the published model is an NVFP4 mix; this recipe trains BF16 (docs/everything.md, Precision)
PRECISION=${PRECISION:-bf16}

# data
DATA=(--data-path ${DATA_PATH:?set DATA_PATH to the prefix of a Megatron .bin/.idx}
    --split "${SPLIT:-99,1,0}"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER:?set TOKENIZER to a Hugging Face tokenizer folder}")

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/super}
LOGGING=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "${SAVE_INTERVAL:-200}"
    --tensorboard-dir "$OUTPUT/tensorboard" --exit-signal-handler)

# what NVIDIA's public launch scripts export
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
export NVTE_FUSED_ATTN=${NVTE_FUSED_ATTN:-0}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

. "$here/../common.sh"
launch
