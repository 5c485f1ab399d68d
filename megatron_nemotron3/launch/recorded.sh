# Runs before a launch script (BASH_ENV): commands are recorded on descriptor 251 and not run.
# A record is pairs of a process and a word, each ended by a zero byte: a number of words, and as many words.

# Names that the script uses and does not assign, and names that it assigns. launch/script.py fills in both, and
# the values of --set.
__used=(@USED@)
__assigned=(@ASSIGNED@)
__line=1

__record() {
    local word
    for word in $# "$@"; do
        printf '%s\0%s\0' "$BASHPID" "$word" >&251
    done
}

__record_unset() {
    local name
    for name in "${__used[@]}"; do
        [[ -v $name ]] || __record unset "$name"
    done
}

# Every command that is no builtin and no function. Bash calls this in a process of its own.
command_not_found_handle() {
    trap - DEBUG
    set +eux
    local IFS=' ' line=${__outer_line-${BASH_LINENO[0]}} name
    [[ " $*" == *" --"* ]] && __record_unset
    for name in @REPORTED@; do
        local -n value=$name
        [[ ${value@a} == *x* || $name == WORLD_SIZE && -v $name ]] && __record value "$name" "$value"
    done
    __record call "$line" "$@"
    if [[ -p /dev/fd/1 ]]; then
        __record output "$1"
        printf '%s' "\$(${1##*/})"
    fi
    __outer_line=$line
    __trap
    __run_inner "$@"
    return 0
}

# `srun … bash -c 'torchrun …'`, `bash other.sh …` and `sbatch <<EOF` start what the inner text starts.
__run_inner() {
    while (($#)); do
        if [[ ${1##*/} == @(bash|sh|sbatch) ]]; then
            while [[ $2 == -* && $2 != -*c ]]; do shift; done
            if [[ $2 == -*c ]]; then
                (eval "$3")
            elif [[ -f $2 ]]; then
                (shift && source "$@")
            elif [[ -p /dev/fd/0 ]]; then
                (eval "$(</dev/fd/0)")
            fi
            return
        fi
        shift
    done
}

basename() {
    [[ $1 == -- ]] && shift
    local path=${1%/}
    path=${path##*/}
    printf '%s\n' "${path%"${2-}"}"
}
dirname() {
    [[ $1 == -- ]] && shift
    local path=${1%/}
    if [[ $path == */* ]]; then printf '%s\n' "${path%/*}"; else printf '.\n'; fi
}
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { realpath "$@"; }
which() { realpath "$@"; }
cat() {
    local file
    for file in "${@-/dev/fd/0}"; do
        [[ -r $file ]] && printf '%s\n' "$(<"$file")"
    done
}
seq() {
    local first=1 step=1 last=${@: -1}
    (($# > 1)) && first=$1
    (($# > 2)) && step=$2
    for ((; step > 0 ? first <= last : first >= last; first += step)); do printf '%s\n' "$first"; done
}
exec() {
    if (($#)); then
        "$@"
        exit
    fi
}
cd() { builtin cd "$@" 2>/dev/null || true; }
kill() { :; }
ulimit() { :; }

# Options in variables count where no command was recorded: a file that a launch script sources.
__at_end() {
    trap - DEBUG
    set +eux
    local IFS=' ' name
    __record_unset
    for name in "${__assigned[@]}"; do
        local -n value=$name
        [[ " ${value[*]}" == *" --"* ]] || continue
        if [[ ${value@a} == *a* ]]; then
            __record variable "$name" "${value[@]}"
        else
            set -f
            __record variable "$name" $value
        fi
    done
    __record exit "$__line" "$1"
}
trap '__at_end $?' EXIT

# Before every command: --set replaces what the script assigns, no program is found on PATH, and $0 is the path
# of the script of which this one is a copy.
__before() {
    [[ $1 == 1 || ${FUNCNAME[1]-} == __* ]] || __line=$1  # a trap's commands are line 1
    PATH=/nowhere BASH_ARGV0=@PATH@
    @FIXED@
}
__trap() { trap '__before $LINENO' DEBUG; }
set -T
__trap
