# shellcheck shell=bash
# Sourced by disjoint.sh and colocated.sh: prints the command, runs it. They set GPUS, NNODES, PLACEMENT, LLM_DP,
# MICRO_BATCH_SIZE. From the environment, too: MODEL TINY STEPS GLOBAL_BATCH_SIZE SEQ_LENGTH PRECISION BACKEND
# DEVICE LR VOCABULARY OUTPUT NODE_RANK MASTER_ADDR MASTER_PORT MEGATRON_LM_DIR DRY_RUN EXTRA, and NUMA of ../node.sh.

: "${MEGATRON_LM_DIR:?set MEGATRON_LM_DIR to a Megatron-LM checkout (tag core_v0.19.0)}"
[ -f "$MEGATRON_LM_DIR/examples/mimo/pretrain_mimo.py" ] || {
    echo "MEGATRON_LM_DIR=$MEGATRON_LM_DIR has no examples/mimo/pretrain_mimo.py: use tag core_v0.19.0" >&2
    exit 2
}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# architecture: language model from the catalog; RADIO ViT-H and a linear projector from the checkout
MODEL=${MODEL:-nano}
SIZE=(--seq-length "${SEQ_LENGTH:-8192}")
VISION=(--model-provider nemotron-moe-vlm --disable-vision-class-token --pixel-shuffle --patch-dim 16)
if [ -n "${TINY:-}" ]; then # a trial: tiny language model, one vision layer, pictures of one size
    SIZE=(--tiny)
    VISION+=(--vision-num-layers 1 --img-h 64 --img-w 64)
else
    VISION+=(--dynamic-resolution)
fi

# precision
PRECISION=${PRECISION:-bf16}
BACKEND=${BACKEND:-te}

# data: the checkout's entry has random tokens and empty pictures, nothing else
VOCABULARY=${VOCABULARY:-131072}
DATA=(--dataset-provider mock --vocab-size "$VOCABULARY" --image-token-id 511)

# logging: every step
LOGGING=(--rerun-mode disabled)
[ -z "${OUTPUT:-}" ] || LOGGING+=(--tensorboard-dir "$OUTPUT/tensorboard")

# parallelism: Megatron's own sizes stay 1, those of the modules are in PLACEMENT
launch() {
    local flags command python=()
    # On a line of its own: refused flags stop the recipe here.
    # shellcheck disable=SC2086
    flags=$(python3 -m megatron_nemotron3 flags "$MODEL" "${SIZE[@]}" --precision "$PRECISION" --backend "$BACKEND" \
        --dp "$LLM_DP" --micro-batch-size "$MICRO_BATCH_SIZE" \
        --global-batch-size "${GLOBAL_BATCH_SIZE:-$(( 8 * MICRO_BATCH_SIZE * LLM_DP ))}" --steps "${STEPS:-20}" --lr "${LR:-2e-4}" \
        --shell -- --calculate-per-token-loss --log-interval 1 --eval-iters 0 ${EXTRA:-}) || exit 2
    eval "ARGS=( $flags )"
    # The checkout's examples are imported; they must not meet those of this repository.
    export PYTHONPATH=$MEGATRON_LM_DIR${PYTHONPATH:+:$PYTHONPATH}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    [ "${DEVICE:-auto}" = cpu ] || [ "${NUMA:-1}" = 0 ] || python=(--no-python bash "$HERE/../bind.sh" python3 -u)
    command=(python3 -m torch.distributed.run --nproc-per-node "$GPUS" --nnodes "$NNODES"
        --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        "${python[@]}" -m megatron_nemotron3.run --device "${DEVICE:-auto}" "$HERE/pretrain_omni.py"
        "${ARGS[@]}" "${PLACEMENT[@]}" "${VISION[@]}" "${DATA[@]}" "${LOGGING[@]}")
    printf 'PYTHONPATH=%q ' "$PYTHONPATH"
    printf '%q ' "${command[@]}"
    echo
    [ -n "${DRY_RUN:-}" ] || exec "${command[@]}"
}
