#!/usr/bin/env bash
# Train the tiny form of a model on this machine's CPU: whether a change to flags, spec or script still trains.
# Through the stock pretrain_hybrid.py of MEGATRON_LM_DIR if that is set, else through the entry of this package.
#
#   MODEL (super) TP PP CP EP DP (1 each) STEPS (5) SEQ GBS (8) MBS (2) LR (1e-3) PRECISION (fp32) EXTRA
#   OUTPUT: save there and resume; LOAD: start from these checkpoints. DRY_RUN=1 prints the command only.
set -euo pipefail

# parallelism: as many processes as the layout has ranks, on gloo
TP=${TP:-1} PP=${PP:-1} CP=${CP:-1} EP=${EP:-1} DP=${DP:-1}
GPUS=$(( TP * PP * CP * DP )) NNODES=1

# shellcheck source-path=SCRIPTDIR source=../common.sh
. "$(dirname "$0")/../common.sh"

# architecture
MODEL=${MODEL:-super} TINY=1

# precision
PRECISION=${PRECISION:-fp32} BACKEND=torch DEVICE=cpu NO_DOCTOR=${NO_DOCTOR:-1}

# schedule
SCHEDULE=none STEPS=${STEPS:-5} GBS=${GBS:-8} MBS=${MBS:-2} LR=${LR:-1e-3}

# data: random tokens, no files; logging: every step
DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size 2047 --log-interval 1 --eval-iters 1)
[ -z "${OUTPUT:-}" ] || checkpoints

launch
