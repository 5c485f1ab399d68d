#!/usr/bin/env bash
# Vision encoder and Nemotron 3 Nano on ranks of their own, mock data, Megatron's MIMO training loop.
# Not run on GPUs so far. On a CPU (tested): TINY=1 DEVICE=cpu PRECISION=fp32 BACKEND=torch VOCABULARY=2048
# GPUS=3 NNODES=1 ENCODER_TP=1 ENCODER_DP=1 LLM_TP=1 LLM_DP=2 LLM_EP=1 STEPS=3. DRY_RUN=1 prints the command only.
set -euo pipefail

GPUS=${GPUS:-8}
NNODES=${NNODES:-4}

# parallelism: encoder first, the language model behind it; encoder DP must divide MICRO_BATCH_SIZE * LLM_DP
ENCODER_TP=${ENCODER_TP:-2}
ENCODER_DP=${ENCODER_DP:-4}
LLM_TP=${LLM_TP:-2}
LLM_DP=${LLM_DP:-12}
LLM_EP=${LLM_EP:-8}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-1}
PLACEMENT=(--encoder-tp "$ENCODER_TP" --encoder-dp "$ENCODER_DP" --llm-offset $(( ENCODER_TP * ENCODER_DP ))
    --llm-tp "$LLM_TP" --llm-dp "$LLM_DP" --llm-ep "$LLM_EP" --llm-expt-tp 1)

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
launch
