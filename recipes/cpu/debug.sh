#!/usr/bin/env bash
# Train the tiny form of a model on this machine's CPU through the stock pretrain_hybrid.py of a checkout.
# For finding out in a minute whether a change to flags, spec or script still trains.
set -euo pipefail

# architecture
MODEL=${MODEL:-super}

# parallelism: as many processes as the layout has ranks, on gloo
TP=${TP:-1} PP=${PP:-1} EP=${EP:-1} DP=${DP:-1}
RANKS=$(( TP * PP * DP ))

# precision
PRECISION=${PRECISION:-fp32}

# data: random tokens, no files; logging: every step
: "${MEGATRON_LM_DIR:?set MEGATRON_LM_DIR to a Megatron-LM checkout (tag core_v0.19.0)}"
flags=$(python3 -m megatron_nemotron3 flags "$MODEL" --tiny --tp "$TP" --pp "$PP" --ep "$EP" --dp "$DP" \
    --precision "$PRECISION" --backend torch --steps "${STEPS:-5}" --micro-batch-size 2 --global-batch-size 8 \
    --lr 1e-3 --shell -- --mock-data --tokenizer-type NullTokenizer --vocab-size 2047 \
    --log-interval 1 --eval-iters 1 ${EXTRA:-}) || exit 2
eval "ARGS=( $flags )"

command=(python3 -m torch.distributed.run --standalone --nproc-per-node "$RANKS"
    -m megatron_nemotron3.run --device cpu "$MEGATRON_LM_DIR/pretrain_hybrid.py" "${ARGS[@]}")
printf '%q ' "${command[@]}"
echo
[ -n "${DRY_RUN:-}" ] || exec "${command[@]}"
