# Sourced by every recipe: asks `nemotron3 flags` for the options, prints the command, runs it.
# A recipe sets MODEL, TP and EP. From the environment: DATA_PATH TOKENIZER SPLIT OUTPUT SAVE_INTERVAL PRECISION
# BACKEND TP PP CP EP GPUS NNODES NODE_RANK MASTER_ADDR MASTER_PORT MEGATRON_LM_DIR DRY_RUN EXTRA.

GPUS=${GPUS:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
EXTRA=${EXTRA:-}

# parallelism: DP follows from the number of GPUs, world size / (TP * PP * CP)
WORLD=$(( GPUS * NNODES ))
PP=${PP:-1}
CP=${CP:-1}
LAYOUT="--tp $TP --pp $PP --cp $CP --ep $EP --dp $(( WORLD / (TP * PP * CP) ))"

# precision
PRECISION=${PRECISION:-bf16}

# data
DATA=(--data-path ${DATA_PATH:?set DATA_PATH to the prefix of a Megatron .bin/.idx}
    --split "${SPLIT:-99,1,0}"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "${TOKENIZER:?set TOKENIZER to a Hugging Face tokenizer folder}")

# logging and checkpoints
OUTPUT=${OUTPUT:-runs/$MODEL}
LOGGING=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "${SAVE_INTERVAL:-200}"
    --tensorboard-dir "$OUTPUT/tensorboard" --exit-signal-handler)

# what NVIDIA's public launch scripts export
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
export NVTE_FUSED_ATTN=${NVTE_FUSED_ATTN:-0}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# The stock script of a Megatron-LM checkout, or the entry in this package, which needs only the wheel.
if [ -n "${MEGATRON_LM_DIR:-}" ]; then
    SCRIPT=$MEGATRON_LM_DIR/pretrain_hybrid.py
else
    SCRIPT=$(python3 -c 'import importlib.util as u; print(u.find_spec("megatron_nemotron3").submodule_search_locations[0])')/pretrain.py
fi

launch() {
    local flags command
    # On a line of its own: refused flags stop the recipe here.
    # shellcheck disable=SC2086
    flags=$(python3 -m megatron_nemotron3 flags "$MODEL" $LAYOUT --precision "$PRECISION" \
        --backend "${BACKEND:-te}" --schedule published --shell -- $EXTRA) || exit 2
    eval "ARGS=( $flags )"
    command=(python3 -m torch.distributed.run --nproc-per-node "$GPUS" --nnodes "$NNODES"
        --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"
        -m megatron_nemotron3.run "$SCRIPT" "${ARGS[@]}" "${DATA[@]}" "${LOGGING[@]}")
    printf '%q ' "${command[@]}"
    echo
    [ -n "${DRY_RUN:-}" ] || exec "${command[@]}"
}
