# Sourced by every recipe: asks `nemotron3 flags` for the options, prints the command, runs it.
# Needs: MODEL, LAYOUT (options of `nemotron3 flags`), PRECISION, DATA (array), LOGGING (array).
# From the environment: NNODES NODE_RANK GPUS MASTER_ADDR MASTER_PORT MEGATRON_LM_DIR DRY_RUN EXTRA.

GPUS=${GPUS:-8}
NNODES=${NNODES:-1}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}
MASTER_PORT=${MASTER_PORT:-29500}
EXTRA=${EXTRA:-}

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
