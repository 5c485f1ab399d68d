# shellcheck shell=bash
# Sourced by the recipes of this folder: prints the command, runs it. See docs/omni.md.
#
# model        TINY=1: the small form of the model.
# parallelism  TP PP CP EP ETP: the language model. VISION SOUND: layouts of the encoders, "tp=1,dp=4"; they come
#              first, the language model has the other ranks. Unset: each on the language model's ranks.
# training     FREEZE: parts that are not trained (language vision vision-projector sound sound-projector).
#              RECOMPUTE: full, or modules of Megatron's selective recompute, in the language model.
# precision    PRECISION BACKEND
# schedule     STEPS SEQ (tokens) GBS and MBS (sequences) LR
# data         DATA_PATH (.jsonl of conversations with media) and PROCESSOR (a folder with transformers' processor);
#              without DATA_PATH random tokens and media. WORKERS of each rank.
# checkpoints  OUTPUT (holds checkpoints/ and tensorboard/) SAVE_INTERVAL (steps).
#              LOAD: the checkpoints folder of another run to start from, if OUTPUT has none.
# nodes        GPUS NNODES NODE_RANK MASTER_ADDR MASTER_PORT DEVICE NUMA
# other        MEGATRON_LM_DIR, EXTRA: further words for Megatron's command line, DRY_RUN=1: print and stop.

RECIPE=${0#./}
fail() { echo "$RECIPE: $*" >&2; exit 2; }
[ -n "${MEGATRON_LM_DIR:-}" ] || fail "set MEGATRON_LM_DIR to a Megatron-LM checkout (tag core_v0.19.0)"
[ -f "$MEGATRON_LM_DIR/examples/mimo/pretrain_mimo.py" ] \
    || fail "MEGATRON_LM_DIR=$MEGATRON_LM_DIR has no examples/mimo/pretrain_mimo.py: use tag core_v0.19.0"
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
GPUS=${GPUS:-8} NNODES=${NNODES:-1} TP=${TP:-1} PP=${PP:-1} CP=${CP:-1} EP=${EP:-1} ETP=${ETP:-1} MBS=${MBS:-1}
DATA=(--mock-data) CHECKPOINTS=()

conversations() { # the data of DATA_PATH
    [ -n "${PROCESSOR:-}" ] || fail "set PROCESSOR: a folder with transformers' processor, such as the model's HF folder"
    DATA=(--data-path "$DATA_PATH" --omni-processor "$PROCESSOR")
}
[ -z "${DATA_PATH:-}" ] || conversations

checkpoints() { # resume from OUTPUT, or start from LOAD with a new optimizer if OUTPUT has nothing
    local tracker=latest_checkpointed_iteration.txt
    # Reshardable: the optimizer's state loads into other layouts of the modules, too.
    CHECKPOINTS=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "${SAVE_INTERVAL:-200}"
        --dist-ckpt-optim-fully-reshardable --tensorboard-dir "$OUTPUT/tensorboard" --exit-signal-handler)
    [ -n "${LOAD:-}" ] || return 0
    [ -n "${DRY_RUN:-}" ] || [ -e "$OUTPUT/checkpoints/$tracker" ] || [ -e "$LOAD/$tracker" ] \
        || fail "LOAD=$LOAD has no $tracker: give a folder with a checkpoint"
    CHECKPOINTS+=(--pretrained-checkpoint "$LOAD")
}
[ -z "${OUTPUT:-}" ] || checkpoints

launch() {
    local flags command dp layouts given=() python=()
    layouts=(${VISION:+--vision-layout "$VISION"} ${SOUND:+--sound-layout "$SOUND"})
    dp=$(python3 -m megatron_nemotron3.train.omni.layouts --world $(( GPUS * NNODES )) --tp "$TP" --pp "$PP" --cp "$CP" \
        --ep "$EP" --etp "$ETP" --micro-batch-size "$MBS" "${layouts[@]}") || exit 2
    # shellcheck disable=SC2206 # words
    given=(${FREEZE:+--freeze $FREEZE} ${EXTRA:-})
    if [ "${RECOMPUTE:-}" = full ]; then
        given+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
    elif [ -n "${RECOMPUTE:-}" ]; then
        # shellcheck disable=SC2206
        given+=(--recompute-granularity selective --recompute-modules $RECOMPUTE)
    fi
    # On a line of its own: refused flags stop the recipe here.
    flags=$(python3 -m megatron_nemotron3 flags nano-omni ${TINY:+--tiny} --tp "$TP" --pp "$PP" --cp "$CP" --ep "$EP" \
        --etp "$ETP" --dp "$dp" --precision "${PRECISION:-bf16}" --backend "${BACKEND:-te}" --micro-batch-size "$MBS" \
        --global-batch-size "${GBS:-$(( 8 * MBS * dp ))}" --steps "${STEPS:-20}" --lr "${LR:-2e-4}" \
        ${SEQ:+--seq-length "$SEQ"} --shell -- --log-interval 1 --eval-iters 0 --rerun-mode disabled \
        --num-workers "${WORKERS:-2}" "${layouts[@]}" "${DATA[@]}" "${CHECKPOINTS[@]}" "${given[@]}") || exit 2
    eval "ARGS=( $flags )"
    # The checkout's examples are imported; they must not meet those of this repository.
    export PYTHONPATH=$MEGATRON_LM_DIR${PYTHONPATH:+:$PYTHONPATH}
    export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
    [ "${DEVICE:-auto}" = cpu ] || [ "${NUMA:-1}" = 0 ] || python=(--no-python bash "$HERE/../bind.sh" python3 -u)
    command=(python3 -m torch.distributed.run --nproc-per-node "$GPUS" --nnodes "$NNODES"
        --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}"
        "${python[@]}" -m megatron_nemotron3.run --device "${DEVICE:-auto}" "$HERE/pretrain_omni.py" "${ARGS[@]}")
    printf 'PYTHONPATH=%q ' "$PYTHONPATH"
    printf '%q ' "${command[@]}"
    echo
    [ -n "${DRY_RUN:-}" ] || exec "${command[@]}"
}
