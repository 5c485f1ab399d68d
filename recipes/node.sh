# shellcheck shell=bash
# Sourced by common.sh of the recipes: what a launch does with the nodes that it runs on. See docs/launching.md.
#
#   NUMA=0                do not bind ranks to the NUMA node of their GPU (bind.sh)
#   NVLINK_ORDER=0        keep the order of Slurm's nodes, and do not ask which NVLink domain they are in
#   KERNEL_CACHE=0        leave Triton's and inductor's caches where they are. FOLDER: share kernels there, on a file
#                         system that all nodes see (OUTPUT/kernels)
#   KERNEL_CACHE_LOCAL    each node's own copy, the same path on all (/tmp/nemotron3-kernels-UID)

nodes_in_nvlink_order() { # RANKS of an expert group: NVLINK_NODES (host=domain ...) become NODE_RANK and MASTER_ADDR
    # Megatron counts ranks through TP, CP and EP before DP and PP, so an expert group is EP*ETP ranks in a row, whatever
    # --use-tp-pp-dp-mapping says. Whole groups of each domain come first, what is left of the domains after them.
    local order
    [ -n "${NVLINK_NODES:-}" ] && [ "${NVLINK_ORDER:-1}" != 0 ] || return 0
    order=$(tr ' ' '\n' <<< "$NVLINK_NODES" | awk -F= -v group="$1" -v gpus="$GPUS" -v rank="$NODE_RANK" '
        { host[NR - 1] = $1; domain[NR - 1] = $2; if (!size[$2]++) names[++domains] = $2 }
        END {
            step = group % gpus ? 1 : group / gpus
            for (pass = 0; pass < 2; pass++)
                for (d = 1; d <= domains; d++) {
                    seen = 0; whole = size[names[d]] - size[names[d]] % step
                    if (size[names[d]] > largest) largest = size[names[d]]
                    for (n = 0; n < NR; n++)
                        if (domain[n] == names[d] && (seen++ >= whole) == pass) { place[n] = p; at[p++] = n }
                }
            groups = int(NR * gpus / group)
            for (g = 0; g < groups; g++) {
                first = int(g * group / gpus); last = int(((g + 1) * group - 1) / gpus)
                for (n = first + 1; n <= last; n++)
                    if (domain[at[n]] != domain[at[first]]) { crossing++; break }
            }
            print place[rank] + 0, host[at[0]], crossing + 0, groups, step, largest
        }')
    local crossing groups step largest
    # shellcheck disable=SC2034 # common.sh reads MASTER_ADDR
    read -r NODE_RANK MASTER_ADDR crossing groups step largest <<< "$order"
    # Where every node is a domain of its own, no order could do better.
    (( NODE_RANK == 0 && crossing && largest > 1 )) || return 0
    if (( step > largest )); then
        echo "$RECIPE: EP*ETP=$1 GPUs are $step nodes, and the largest NVLink domain here has $largest: lower EP" >&2
    else
        echo "$RECIPE: $crossing of $groups expert groups cross an NVLink domain: submit with sbatch --segment $step" >&2
    fi
}

kernel_caches() { # DEFAULT: set the caches to the node's own copy of the shared folder, which is KERNEL_CACHE or DEFAULT
    KERNEL_CACHE=${KERNEL_CACHE:-$1}
    # A cache that the user has chosen stays.
    [ -z "${TRITON_CACHE_DIR:-}${TORCHINDUCTOR_CACHE_DIR:-}" ] || KERNEL_CACHE=0
    [ "$KERNEL_CACHE" != 0 ] || return 0
    # One path on all nodes: Triton stores absolute paths. Not the shared folder itself: inductor names its temporary
    # files by process and thread, which containers on two nodes have in common, and locks them with flock.
    local own=${KERNEL_CACHE_LOCAL:-/tmp/nemotron3-kernels-$UID}
    if [ -z "${DRY_RUN:-}" ]; then
        if ! (umask 077 && mkdir -p "$own") 2> /dev/null || [ ! -O "$own" ]; then
            echo "$RECIPE: $own cannot be written or belongs to another user, so compiled kernels are not shared" >&2
            KERNEL_CACHE=0
            return 0
        fi
        _take_kernels "$own"
    fi
    export TRITON_CACHE_DIR=$own/triton TORCHINDUCTOR_CACHE_DIR=$own/inductor
    ENVIRONMENT+=("TRITON_CACHE_DIR=$TRITON_CACHE_DIR" "TORCHINDUCTOR_CACHE_DIR=$TORCHINDUCTOR_CACHE_DIR")
}

_take_kernels() { # FOLDER: add what other runs shared. A hard link appears whole, also to a run that is going on here.
    local archive fresh
    for archive in "$KERNEL_CACHE"/kernels-*.tar; do
        [ -e "$archive" ] || continue
        fresh=$(mktemp -d "$1/.fresh.XXXXXX") || return 0
        if tar -xf "$archive" -C "$fresh" 2> /dev/null; then
            cp -rl --no-clobber "$fresh/." "$1/" 2> /dev/null
        else
            echo "$RECIPE: $archive cannot be read and is not used" >&2
        fi
        rm -rf "$fresh"
    done
    return 0
}

share_kernels() { # RANKS of a pipeline stage: where a stage begins on this node, share its kernels while the launch runs
    # Every node would write the same kernels; those of a stage are what its first node compiled.
    local first=$(( NODE_RANK * GPUS ))
    [ "${KERNEL_CACHE:-0}" != 0 ] && (( (first + $1 - 1) / $1 * $1 < first + GPUS )) || return 0
    local own=${TRITON_CACHE_DIR%/*} files
    # Counted before the "&": what stands behind it is expanded in the background, perhaps after the launch compiled.
    files=$(_kernels "$own" 2> /dev/null | wc -l)
    _share_until_end $$ "$own" "$files" > /dev/null 2>&1 < /dev/null &
}

_share_until_end() { # PID FOLDER FILES: every ten minutes, and once it has ended, if there are more than FILES
    local pid=$1 seconds=0 count shared=$3
    trap '' TERM INT HUP # the signal that ends the launch, which saves first
    while kill -0 "$pid"; do
        sleep 1
        (( ++seconds % 600 )) || _share "$2"
    done
    _share "$2"
}

_kernels() { # FOLDER: files of its caches that are complete
    (cd "$1" && for part in triton inductor; do
        [ ! -d "$part" ] || find "$part" -type f ! -name '.*' ! -name '*.lock' ! -path '*/tmp.*' ! -path '*/locks/*'
    done)
}

_share() { # FOLDER: write the archive beside the old one and move it there
    local mine=$KERNEL_CACHE/.kernels-$NODE_RANK.$HOSTNAME.$$
    count=$(_kernels "$1" | wc -l)
    (( count > shared )) || return 0
    mkdir -p "$KERNEL_CACHE"
    # tar fails if a file changes below it: then the next time.
    if _kernels "$1" | tar -cf "$mine" -C "$1" -T -; then
        mv -f "$mine" "$KERNEL_CACHE/kernels-$NODE_RANK.tar"
        shared=$count
    else
        rm -f "$mine"
    fi
}
