#!/usr/bin/env bash
# Nano Omni with both encoders on ranks of their own. Vision on 4 GPUs, sound on 4, the language model on 24.
# Not run on GPUs so far. On a CPU (tested): TINY=1 DEVICE=cpu PRECISION=fp32 BACKEND=torch SEQ=64 GPUS=4 NNODES=1
# TP=2 EP=2 VISION=tp=1,dp=1 SOUND=tp=1,dp=1 STEPS=3. DRY_RUN=1 prints the command only.
set -euo pipefail

GPUS=${GPUS:-8} NNODES=${NNODES:-4}

# parallelism: encoder DP must divide MBS * DP of the language model, which is 12 here
TP=${TP:-2} EP=${EP:-8}
VISION=${VISION:-tp=1,dp=4} SOUND=${SOUND:-tp=1,dp=4}

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
launch
