#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
# Run a recipe on every node of a Slurm job, one torchrun per node:
#
#   export DATA_PATH=... TOKENIZER=...
#   sbatch --nodes 768 --gpus-per-node 4 --time 4:00:00 recipes/slurm.sh recipes/super/pretrain.sh
#
# From the folder with recipes/, on a file system that all nodes share. sbatch passes the environment. A job that is
# requeued or submitted again resumes. EXIT_MINUTES=225 saves and ends before a limit of four hours.
# CONTAINER: more words for srun, such as --container-image=... of Pyxis.
set -euo pipefail

fail() { echo "recipes/slurm.sh: $*" >&2; exit 2; }
[ $# -eq 1 ] || fail "give one recipe: sbatch recipes/slurm.sh recipes/super/pretrain.sh"
[ -f "$1" ] || fail "$1 does not exist below $PWD: submit from the folder with recipes/"
[ -n "${SLURM_JOB_NODELIST:-}" ] || fail "no Slurm job: submit it with sbatch, or run $1 directly"

# Each step sees the number of its own node; everything else is the same on all nodes.
export NNODES=$SLURM_JOB_NUM_NODES
export GPUS=${GPUS:-${SLURM_GPUS_ON_NODE:-8}}
# Read all names: with "| head -n 1" scontrol may fail on a closed pipe, and pipefail would end the job silently.
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${names%%$'\n'*}
export MASTER_PORT=${MASTER_PORT:-$(( 20000 + SLURM_JOB_ID % 10000 ))}

read -ra container <<< "${CONTAINER:-}"
# The variable belongs to the step, not to this shell.
# shellcheck disable=SC2016
exec srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 "${container[@]}" \
    bash -c 'NODE_RANK=$SLURM_NODEID exec bash "$1"' step "$1"
