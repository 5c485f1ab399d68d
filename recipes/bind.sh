#!/usr/bin/env bash
# Run a command on the CPUs and memory of the NUMA node of this rank's GPU: bind.sh COMMAND WORDS...
# Started by torchrun, which sets LOCAL_RANK. Where the node is not known the command runs unbound, and one rank of the
# host says why. SYSFS: where the kernel's tree is mounted (/sys).
set -uo pipefail

SYSFS=${SYSFS:-/sys}
RANK_HERE=${LOCAL_RANK:-0}
GPUS=$(nvidia-smi --query-gpu=index,uuid,pci.bus_id --format=csv,noheader 2> /dev/null)

device() { # RANK: its index or UUID, as CUDA_VISIBLE_DEVICES orders them
    local visible
    IFS=, read -ra visible <<< "${CUDA_VISIBLE_DEVICES:-}"
    if (( ${#visible[@]} )); then echo "${visible[$1]:-none}"; else echo "$1"; fi
}

node() { # RANK: the NUMA node of its GPU; fails with the reason
    local index uuid bus wanted domain file found
    [ -n "$GPUS" ] || { echo "nvidia-smi lists no GPU"; return 1; }
    wanted=$(device "$1")
    while IFS=', ' read -r index uuid bus; do
        [[ $index = "$wanted" || $wanted = GPU-* && $uuid = "$wanted"* ]] || continue
        # nvidia-smi writes a domain in eight digits, the kernel in at least four.
        domain=$(( 16#${bus%%:*} )) bus=${bus#*:}
        file=$SYSFS/bus/pci/devices/$(printf '%04x:%s' "$domain" "${bus,,}")/numa_node
        found=$(cat "$file" 2> /dev/null) || { echo "$file does not exist"; return 1; }
        (( found >= 0 )) || { echo "$file says $found: the firmware names no node"; return 1; }
        [ -n "$(cat "$SYSFS/devices/system/node/node$found/cpulist" 2> /dev/null)" ] \
            || { echo "NUMA node $found of GPU $wanted has no CPU"; return 1; }
        echo "$found"
        return
    done <<< "$GPUS"
    echo "nvidia-smi does not list GPU $wanted"
    return 1
}

unbound() { # REASON: rank 0 speaks for the host, another rank only if rank 0 is bound
    if (( RANK_HERE == 0 )) || node 0 > /dev/null; then
        echo "bind.sh: ${HOSTNAME:-this host}, rank $RANK_HERE is not bound to a NUMA node: $1" >&2
    fi
}

if found=$(node "$RANK_HERE"); then
    # Preferred, not bound: a node whose memory is full takes from the other one instead of failing.
    for tool in "numactl --cpunodebind=$found --preferred=$found" \
        "taskset -c $(cat "$SYSFS/devices/system/node/node$found/cpulist")"; do
        read -ra words <<< "$tool"
        # A container may forbid the memory policy, and a job may lack the node's CPUs: try it first.
        if "${words[@]}" true 2> /dev/null; then exec "${words[@]}" "$@"; fi
    done
    unbound "neither numactl nor taskset can use node $found here"
else
    unbound "$found"
fi
exec "$@"
