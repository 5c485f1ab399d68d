#!/usr/bin/env bash
# Nano Omni with both encoders on the ranks of the language model, without tensor parallelism. On 32 GPUs.
# Not run on GPUs so far. On a CPU (tested): TINY=1 DEVICE=cpu PRECISION=fp32 BACKEND=torch SEQ=64 GPUS=2 NNODES=1
# TP=2 EP=2 STEPS=3. DRY_RUN=1 prints the command only.
set -euo pipefail

GPUS=${GPUS:-8} NNODES=${NNODES:-4}

# parallelism: encoder DP must divide MBS * DP of the language model
TP=${TP:-2} EP=${EP:-8} MBS=${MBS:-2}
EVERY="tp=1,dp=$(( GPUS * NNODES )),offset=0"
VISION=${VISION:-$EVERY} SOUND=${SOUND:-$EVERY}

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
launch
