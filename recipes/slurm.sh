#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
# Run a recipe on every node of a Slurm job, one torchrun per node:
#
#   export DATA_PATH=... TOKENIZER=...
#   sbatch --nodes 768 --gpus-per-node 4 --segment 16 --time 4:00:00 recipes/slurm.sh recipes/super/pretrain.sh
#
# `nemotron3 recipe --output recipes` makes the folder, which all nodes must see. sbatch passes the environment. A job
# that is requeued or submitted again resumes. EXIT_MINUTES=225 saves and ends before a limit of four hours.
# CONTAINER: more words for srun, such as --container-image=... of Pyxis.
# --segment (EP*ETP over GPUs per node): as many nodes in a row share an NVLink domain, where Slurm has a block topology.
# NVLINK_ORDER=0: do not ask the nodes for their domain, and leave them in Slurm's order (docs/launching.md).
set -euo pipefail

fail() { echo "slurm.sh: $*" >&2; exit 2; }
[ $# -eq 1 ] || fail "give one recipe: sbatch recipes/slurm.sh recipes/super/pretrain.sh"
[ -f "$1" ] || fail "$1 does not exist below $PWD: submit from the folder that has it, or give the whole path"
[ -n "${SLURM_JOB_NODELIST:-}" ] || fail "no Slurm job: submit it with sbatch, or run $1 directly"

# Each step sees the number of its own node; everything else is the same on all nodes.
export NNODES=$SLURM_JOB_NUM_NODES
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
# Read all names: with "| head -n 1" scontrol may fail on a closed pipe, and pipefail would end the job silently.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${names%%$'\n'*}
export MASTER_PORT=${MASTER_PORT:-$(( 20000 + SLURM_JOB_ID % 10000 ))}

# The NVLink domain of every node, for the recipe to order nodes by: host=1 host=1 host=2 ...
if (( NNODES > 1 )) && [ "${NVLINK_ORDER:-1}" != 0 ]; then
    fabric=$(srun --label --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 \
        bash -c 'nvidia-smi -q | grep -iE "CliqueId|ClusterUUID" || true') || fabric=
    if [ -n "$fabric" ]; then
        # A node whose fabric has no UUID, or one of zeros, is a domain of its own.
        NVLINK_NODES=$(names=$names awk -F ': *' '
            tolower($2) ~ /cliqueid/ && !(($1 + 0) in clique) { clique[$1 + 0] = $NF }
            tolower($2) ~ /clusteruuid/ && $NF ~ /[1-9a-f]/ { uuid[$1 + 0] = $NF }
            END {
                count = split(ENVIRON["names"], host, "\n")
                for (n = 0; n < count; n++) {
                    domain = n in uuid ? uuid[n] "." clique[n] : n
                    if (!(domain in number)) number[domain] = ++domains
                    printf "%s%s=%d", n ? " " : "", host[n + 1], number[domain]
                }
            }' <<< "$fabric")
        export NVLINK_NODES
    else
        echo "slurm.sh: nvidia-smi names no NVLink domain here, so the nodes keep Slurm's order" >&2
    fi
fi

read -ra container <<< "${CONTAINER:-}"
# All CPUs of a node are torchrun's, which starts ranks on those of their GPU: Slurm must not bind it to some.
# The variable belongs to the step, not to this shell.
# shellcheck disable=SC2016
exec srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --cpu-bind none --kill-on-bad-exit=1 \
    "${container[@]}" \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$1"' step "$1"
