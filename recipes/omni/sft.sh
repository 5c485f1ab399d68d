#!/usr/bin/env bash
# Fine-tuning of Nano Omni on conversations with pictures, videos and sounds, packed. The encoders stay frozen.
# Needed: DATA_PATH (.jsonl of conversations), PROCESSOR (the model's HF folder) and LOAD: what nemotron3 convert wrote
# from it, or checkpoints of another run. Nothing of the schedule is published; these numbers are examples.
# Not run on GPUs so far; on a CPU (tested) with the variables of disjoint.sh. DRY_RUN=1 prints the command only.
set -euo pipefail

GPUS=${GPUS:-8} NNODES=${NNODES:-4}
OUTPUT=${OUTPUT:-runs/omni/sft}

# parallelism
TP=${TP:-2} EP=${EP:-8}
VISION=${VISION:-tp=1,dp=4} SOUND=${SOUND:-tp=1,dp=4}

# training: projectors and language model
FREEZE=${FREEZE-vision sound} LR=${LR:-2e-5} SEQ=${SEQ:-16384}

# shellcheck source-path=SCRIPTDIR source=common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
[ -n "${DATA_PATH:-}" ] || fail "set DATA_PATH: a .jsonl file of conversations"
[ -n "${LOAD:-}" ] || fail "set LOAD: the checkpoints folder of nemotron3 convert, or of another run"
launch
