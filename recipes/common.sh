# shellcheck shell=bash
# Sourced by every recipe. The command goes to stdout, everything else to stderr. See docs/launching.md.
#
# launch       GPUS (per node) NNODES NODE_RANK MASTER_ADDR MASTER_PORT: slurm.sh sets them from Slurm.
#              DRY_RUN=1 prints and stops. NO_DOCTOR=1 skips `nemotron3 doctor`.
#              MEGATRON_LM_DIR: a checkout of Megatron-LM; without it, the entry of this package.
# model        TINY=1: the small form of the model.
# parallelism  TP PP VPP CP EP ETP; DP follows from the number of GPUs.
# hardware     GPU (h100, gb200 ...): the options and variables published for it; WITHOUT: options of it to leave out.
# precision    PRECISION BACKEND TE_PRECISION_CONFIG_FILE
# schedule     STEPS SEQ (tokens) GBS and MBS (sequences) LR MIN_LR LR_DECAY_STYLE: replace the published values.
# memory       RECOMPUTE: full, or modules of Megatron's selective recompute ("moe layernorm"); empty: none.
# data         DATA_PATH TOKENIZER SPLIT; for fine-tuning MEAN (tokens, conversations), and PROMPT_FORMAT with
#              MEGATRON_LM_DIR.
# checkpoints  OUTPUT (holds checkpoints/ and tensorboard/) SAVE_INTERVAL (steps) EXIT_MINUTES (save and stop).
#              LOAD: the checkpoints folder of another run to start from, if OUTPUT has none.
#              ASYNC_SAVE: who writes them beside training, mcore or nvrx (nvidia-resiliency-ext); 0: training waits.
# nodes        NUMA NVLINK_ORDER KERNEL_CACHE (0 turns each off) KERNEL_CACHE_LOCAL: node.sh.
# other        EXTRA: further words for Megatron's command line.

RECIPE=${0#./}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
fail() { echo "$RECIPE: $*" >&2; exit 2; }
need() { [ -n "${!1:-}" ] || fail "set $1: $2"; }
# shellcheck source-path=SCRIPTDIR source=node.sh
. "$HERE/node.sh"
number() { # NAME...: each is 1 or more
    local name
    for name; do [[ ${!name} =~ ^[1-9][0-9]*$ ]] || fail "$name=${!name}: give a number from 1 on"; done
}

GPUS=${GPUS:-8} NNODES=${NNODES:-1} NODE_RANK=${NODE_RANK:-0}
number GPUS NNODES
[[ $NODE_RANK =~ ^[0-9]+$ ]] || fail "NODE_RANK=$NODE_RANK: give a number from 0 on"
WORLD=$(( GPUS * NNODES ))
(( NNODES == 1 )) || [ -n "${DRY_RUN:-}" ] || need MASTER_ADDR "the host name of node 0"
DEVICE=auto DATA=() CHECKPOINTS=() ENVIRONMENT=()

# The stock script of a Megatron-LM checkout, or the entry in this package.
if [ -n "${MEGATRON_LM_DIR:-}" ]; then
    SCRIPT=$MEGATRON_LM_DIR/pretrain_hybrid.py
    [ -f "$SCRIPT" ] \
        || fail "MEGATRON_LM_DIR=$MEGATRON_LM_DIR has no pretrain_hybrid.py: use a checkout of tag core_v0.19.0"
else
    SCRIPT=$(python3 -c 'import megatron_nemotron3 as m; print(m.__path__[0])' 2> /dev/null)/train/pretrain_script.py \
        || fail "python3 has no megatron_nemotron3: pip install megatron-nemotron3, or set PYTHONPATH"
fi

environment() { # WORDS of nemotron3 flags...: what was published for GPU, or what NVIDIA's public launch scripts export
    local exports names name
    if [ -n "${GPU:-}" ]; then
        exports=$(python3 -m megatron_nemotron3 "$@" --environment 2> /dev/null) || exit 2
        names=$(sed -n 's/^export \([A-Z0-9_]*\)=.*/\1/p' <<< "$exports")
        eval "$exports"
    else # without NVTE_FUSED_ATTN=0, which Megatron refuses unless --attention-backend says so
        export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
        export NVTE_FWD_LAYERNORM_SM_MARGIN=${NVTE_FWD_LAYERNORM_SM_MARGIN:-16}
        export NVTE_BWD_LAYERNORM_SM_MARGIN=${NVTE_BWD_LAYERNORM_SM_MARGIN:-16}
        export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
        names="CUDA_DEVICE_MAX_CONNECTIONS NVTE_FWD_LAYERNORM_SM_MARGIN NVTE_BWD_LAYERNORM_SM_MARGIN
            PYTORCH_CUDA_ALLOC_CONF"
    fi
    for name in $names; do ENVIRONMENT+=("$name=${!name}"); done
}

rendezvous() { # where torchrun's agents meet
    RENDEZVOUS=(--standalone)
    (( NNODES == 1 )) || RENDEZVOUS=(--nnodes "$NNODES" --node-rank "$NODE_RANK"
        --master-addr "${MASTER_ADDR:-node0}" --master-port "${MASTER_PORT:-29500}")
}

text_data() { # --data-path takes alternating weights and prefixes, hence words
    need DATA_PATH "the prefix of a Megatron .bin/.idx, or weights and prefixes in turn"
    need TOKENIZER "a Hugging Face tokenizer folder"
    read -ra DATA <<< "--data-path $DATA_PATH"
    DATA+=(--split "${SPLIT:-99,1,0}" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
}

conversation_data() { # the entry of this package packs conversations; the stock script makes a row of each line
    need DATA_PATH "a .jsonl file of conversations, or weights and files in turn"
    need TOKENIZER "a Hugging Face tokenizer folder"
    read -ra DATA <<< "--data-path $DATA_PATH"
    DATA+=(--split "${SPLIT:-99,1,0}" --tokenizer-type SFTTokenizer --tokenizer-model "$TOKENIZER"
        --sft-tokenizer-prompt-format "${PROMPT_FORMAT:-default}")
    case ${MEAN:-tokens} in tokens | conversations) ;; *) fail "MEAN=$MEAN: use tokens or conversations" ;; esac
    if [ "${MEAN:-tokens}" = conversations ]; then
        [ -z "${MEGATRON_LM_DIR:-}" ] || fail "MEAN=$MEAN is not the stock script's: unset MEGATRON_LM_DIR"
        ENVIRONMENT+=("NEMOTRON3_SFT_MEAN=$MEAN")
    fi
}

checkpoints() { # [required]: resume from OUTPUT, or start from LOAD with a new optimizer if OUTPUT has nothing
    local tracker=latest_checkpointed_iteration.txt
    CHECKPOINTS=(--save "$OUTPUT/checkpoints" --load "$OUTPUT/checkpoints" --save-interval "${SAVE_INTERVAL:-200}"
        --tensorboard-dir "$OUTPUT/tensorboard" --exit-signal-handler)
    case ${ASYNC_SAVE:-mcore} in
        0) ;;
        # Without the second word Megatron drops the first; its default, nvrx, needs another package.
        mcore | nvrx) [ "$DEVICE" = cpu ] || CHECKPOINTS+=(--async-save --use-persistent-ckpt-worker
            --async-strategy "${ASYNC_SAVE:-mcore}") ;;
        *) fail "ASYNC_SAVE=$ASYNC_SAVE: use mcore, nvrx or 0" ;;
    esac
    [ -z "${EXIT_MINUTES:-}" ] || CHECKPOINTS+=(--exit-duration-in-mins "$EXIT_MINUTES")
    if [ ! -e "$OUTPUT/checkpoints/$tracker" ]; then
        [ -z "${1:-}" ] || need LOAD "the checkpoints folder of the previous phase, or of nemotron3 convert from-hf"
        [ -z "${LOAD:-}" ] || [ -n "${DRY_RUN:-}" ] || [ -e "$LOAD/$tracker" ] \
            || fail "LOAD=$LOAD has no $tracker: give a folder with a checkpoint"
    fi
    if [ -n "${LORA:-}" ]; then # adapters on the weights of LOAD, which are read when the model is built (docs/training.md)
        need LOAD "the checkpoint that adapters are trained on"
        export NEMOTRON3_LORA="base=$LOAD,$LORA"
    elif [ -n "${LOAD:-}" ]; then
        CHECKPOINTS+=(--pretrained-checkpoint "$LOAD")
    fi
}

model_of_depths() { # NAME: MODEL is a file that says the catalog's NAME, with MTP applied DEPTHS times
    number DEPTHS
    MODEL=$OUTPUT/model.$NODE_RANK.json
    [ -z "${DRY_RUN:-}" ] || { MODEL=$(mktemp -d)/model.json; trap 'rm -r "${MODEL%/*}"' EXIT; }
    mkdir -p "${MODEL%/*}"
    echo "{\"base\": \"$1\", \"name\": \"$1-boost\", \"mtp_num_layers\": $DEPTHS}" > "$MODEL"
}

precision_file() { # write the format of every linear of MODEL, unless the user gives a file
    [ -z "${TE_PRECISION_CONFIG_FILE:-}" ] || return 0
    TE_PRECISION_CONFIG_FILE=$OUTPUT/precision.yaml
    [ -z "${DRY_RUN:-}" ] || return 0
    mkdir -p "$OUTPUT"
    local mine=$TE_PRECISION_CONFIG_FILE
    [ -e "$mine" ] || mine=$mine.$NODE_RANK.$$ # nodes write at the same time, so each writes its own file and moves it
    python3 -m megatron_nemotron3 precision "$MODEL" ${TINY:+--tiny} --output "$mine" > /dev/null || exit 2
    [ "$mine" = "$TE_PRECISION_CONFIG_FILE" ] || mv -f "$mine" "$TE_PRECISION_CONFIG_FILE"
}

report() { # print versions, GPUs and environment
    echo "# $RECIPE on ${HOSTNAME:-this host}, node $NODE_RANK of $NNODES, $GPUS processes a node"
    python3 - megatron-nemotron3 megatron-core torch transformer-engine flash-attn mamba-ssm causal-conv1d <<'PYTHON'
import platform, sys
from importlib import metadata
print("# python", platform.python_version())
for name in sys.argv[1:]:
    try:
        print("#", name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print("#", name, "not installed")
PYTHON
    [ -z "${MEGATRON_LM_DIR:-}" ] \
        || echo "# Megatron-LM $MEGATRON_LM_DIR $(git -C "$MEGATRON_LM_DIR" describe --tags --always 2> /dev/null)"
    ! command -v nvidia-smi > /dev/null \
        || nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | sed 's/^/# GPU /' || true
    env | grep -E '^(CUDA|NVTE|NCCL|PYTORCH|TORCH|OMP|NEMOTRON3|SLURM_JOB)_' | sort | sed 's/^/# /'
}

launch() {
    local flags words layout batch given ranks dp experts samples without python=()
    CP=${CP:-1} PP=${PP:-1}
    number TP PP CP EP ${ETP:+ETP} ${MBS:+MBS} ${GBS:+GBS}
    ranks=$(( TP * PP * CP ))
    (( WORLD % ranks == 0 )) || fail "GPUS*NNODES=$WORLD is not a multiple of TP*PP*CP=$ranks: change one of them"
    experts=$(( EP * ${ETP:-1} )) dp=$(( WORLD / ranks )) samples=$(( ${MBS:-1} * WORLD / ranks ))
    (( WORLD / PP % experts == 0 )) \
        || fail "GPUS*NNODES/PP=$(( WORLD / PP )) is not a multiple of EP*ETP=$experts: change one of them"
    (( ${GBS:-$samples} % samples == 0 )) \
        || fail "GBS=$GBS is not a multiple of MBS*DP=$samples, with DP=GPUS*NNODES/(TP*PP*CP)=$dp: change one of them"
    nodes_in_nvlink_order "$experts"
    layout=(--tp "$TP" --pp "$PP" --cp "$CP" --ep "$EP" --dp "$dp"
        ${VPP:+--vpp "$VPP"} ${ETP:+--etp "$ETP"})
    batch=(--schedule "$SCHEDULE" ${STEPS:+--steps "$STEPS"} ${SEQ:+--seq-length "$SEQ"}
        ${MBS:+--micro-batch-size "$MBS"} ${GBS:+--global-batch-size "$GBS"} ${LR:+--lr "$LR"})
    read -ra given <<< "${MIN_LR:+--min-lr $MIN_LR} ${LR_DECAY_STYLE:+--lr-decay-style $LR_DECAY_STYLE}"
    if [ "${RECOMPUTE:-}" = full ]; then
        given+=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
    elif [ -n "${RECOMPUTE:-}" ]; then
        read -ra words <<< "$RECOMPUTE"
        given+=(--recompute-granularity selective --recompute-modules "${words[@]}")
    fi
    read -ra words <<< "${EXTRA:-}"
    given+=("${DATA[@]}" "${CHECKPOINTS[@]}" "${words[@]}")
    words=(flags "$MODEL" ${TINY:+--tiny} "${layout[@]}" --precision "$PRECISION"
        ${TE_PRECISION_CONFIG_FILE:+--te-precision-config-file "$TE_PRECISION_CONFIG_FILE"}
        --backend "${BACKEND:-te}" "${batch[@]}" ${GPU:+--gpu "$GPU"})
    for without in ${WITHOUT:-}; do words+=(--without "$without"); done
    # On its own line, so that refused flags stop the recipe here.
    flags=$(python3 -m megatron_nemotron3 "${words[@]}" --shell -- "${given[@]}") || exit 2
    environment "${words[@]}"
    eval "ARGS=( $flags )"
    [ "$DEVICE" = cpu ] || kernel_caches "$OUTPUT/kernels"
    if [ "$DEVICE" != cpu ] && [ "${NUMA:-1}" != 0 ]; then
        python=(--no-python bash "$HERE/bind.sh" python3 -u)
    fi
    rendezvous
    COMMAND=(env "${ENVIRONMENT[@]}" python3 -m torch.distributed.run --nproc-per-node "$GPUS" "${RENDEZVOUS[@]}"
        "${python[@]}" -m megatron_nemotron3.run --device "$DEVICE" "$SCRIPT" "${ARGS[@]}")
    (( NODE_RANK )) || report >&2
    printf '%q ' "${COMMAND[@]}"
    echo
    [ -z "${DRY_RUN:-}" ] || exit 0
    [ -n "${NO_DOCTOR:-}" ] || python3 -m megatron_nemotron3 doctor >&2 \
        || fail "nemotron3 doctor found a problem; NO_DOCTOR=1 launches anyway"
    share_kernels "$(( WORLD / PP ))"
    exec "${COMMAND[@]}"
}
