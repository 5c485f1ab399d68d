#!/usr/bin/env bash
# Vision encoder and Nemotron 3 Nano on the same ranks, the encoder without tensor parallelism; mock data.
# The stock entry of core_v0.19.0 cannot do this; pretrain_omni.py beside this file says what it adds.
# Not run on GPUs so far. On a CPU (tested): TINY=1 DEVICE=cpu PRECISION=fp32 BACKEND=torch VOCABULARY=2048
# GPUS=2 NNODES=1 LLM_TP=2 LLM_DP=1 LLM_EP=2 STEPS=3. DRY_RUN=1 prints the command only.
set -euo pipefail

GPUS=${GPUS:-8}
NNODES=${NNODES:-4}

# parallelism: TP * DP is the world on both sides; encoder DP must divide MICRO_BATCH_SIZE * LLM_DP
LLM_TP=${LLM_TP:-2}
LLM_DP=${LLM_DP:-16}
LLM_EP=${LLM_EP:-8}
ENCODER_TP=${ENCODER_TP:-1}
ENCODER_DP=${ENCODER_DP:-$(( GPUS * NNODES / ENCODER_TP ))}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-2}
PLACEMENT=(--colocated --encoder-tp "$ENCODER_TP" --encoder-dp "$ENCODER_DP" --llm-offset 0
    --llm-tp "$LLM_TP" --llm-dp "$LLM_DP" --llm-ep "$LLM_EP" --llm-expt-tp 1)

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
launch
