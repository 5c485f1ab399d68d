# Runs before a launch script (BASH_ENV): commands are recorded on descriptor 251 and not run.
# A record is pairs of a process and a word, each ended by a zero byte: a number of words, and as many words.
# Names begin with __, because functions see and hide the script's own.

# Names that the script uses and does not assign, and names that it assigns. launch/script.py fills in both, and
# the values of --set.
__used=(@USED@)
__assigned=(@ASSIGNED@)
__line=1

__record() {
    local __word
    for __word in $# "$@"; do
        builtin printf '%s\0%s\0' "$BASHPID" "$__word" >&251
    done
}

__record_unset() {
    local __name
    for __name in "${__used[@]}"; do
        local -n __value=$__name
        [[ -v $__name || ${#__value[@]} != 0 ]] || __record unset "$__name"
        unset -n __value
    done
}

__record_command() {
    local IFS=' ' __name
    [[ " $*" == *" --"* ]] && __record_unset
    for __name in @REPORTED@; do
        local -n __value=$__name
        [[ ${__value@a} == *x* || $__name == WORLD_SIZE && -v $__name ]] && __record value "$__name" "$__value"
        unset -n __value
    done
    __record call "$__at" "$@"
    if [[ -p /dev/fd/1 ]]; then
        __record output "$1"
        builtin printf '%s\n' "\$(${1##*/})"
    fi
}

# Every command that is no builtin and no function. Bash calls this in a process of its own.
command_not_found_handle() {
    builtin trap - DEBUG
    set +eux
    __at=${__at-${BASH_LINENO[0]}}
    __record_command "$@"
    __run_inner "$@"
    return 0
}

# `srun … bash -c 'torchrun …'`, `bash other.sh …` and `sbatch <<EOF` start what the inner text starts.
__run_inner() {
    while (($#)); do
        if [[ ${1##*/} == @(bash|sh|sbatch) ]]; then
            while [[ $2 == -* && $2 != -c && $2 != -[!-]*c ]]; do
                [[ $2 == -o || $2 == -[!-]*o ]] && shift
                shift
            done
            if [[ $2 == -* ]]; then
                (__begin_inner "${4-bash}" && __text=$3 && shift $(($# > 3 ? 4 : 3)) && eval "$__text")
            elif [[ -f $2 ]]; then
                (__begin_inner "$2" && shift && builtin source "$@")
            elif [[ -p /dev/fd/0 ]]; then
                (__begin_inner bash && eval "$(</dev/fd/0)")
            fi
            return
        fi
        shift
    done
}

# Another shell has the variables that are exported, and a name of its own.
__begin_inner() {
    local __name
    for __name in "${__assigned[@]}"; do
        local -n __value=$__name
        [[ ${__value@a} == *x* ]] && unset -n __value && continue
        unset -n __value
        unset "$__name"
    done
    __path=$1
    __trap
}

basename() {
    [[ $1 == -- ]] && shift
    local __path=${1%/}
    __path=${__path##*/}
    printf '%s\n' "${__path%"${2-}"}"
}
dirname() {
    [[ $1 == -- ]] && shift
    local __path=${1%/}
    if [[ $__path == */* ]]; then printf '%s\n' "${__path%/*}"; else printf '.\n'; fi
}
realpath() { printf '%s\n' "${@: -1}"; }
readlink() { realpath "$@"; }
which() { realpath "$@"; }
cat() {
    local __file
    for __file in "${@-/dev/fd/0}"; do
        if [[ -r $__file ]]; then
            printf '%s\n' "$(<"$__file")"
        else
            (__at=${BASH_LINENO[0]} && __record_command cat "$__file")
        fi
    done
}
seq() {
    local __first=1 __step=1 __last=${@: -1}
    (($# > 1)) && __first=$1
    (($# > 2)) && __step=$2
    for ((; __step > 0 ? __first <= __last : __first >= __last; __first += __step)); do printf '%s\n' "$__first"; done
}
exec() {
    if (($#)); then
        "$@"
        exit
    fi
}
command() {
    if [[ $1 == -[vV] ]]; then printf '%s\n' "${2-}"; else builtin command "$@"; fi
}
# What is written to a file fails if the script reads another file at the same time (jail.py).
echo() { builtin echo "$@" 2>&- || true; }
printf() { builtin printf "$@" 2>&- || true; }
# The script's folders may be on another machine.
cd() {
    builtin cd "$@" 2>/dev/null || case ${*: -1} in /*) PWD=${*: -1} ;; *) PWD+=/${*: -1} ;; esac
}
pwd() { printf '%s\n' "$PWD"; }
type() { :; }
hash() { :; }
ulimit() { :; }
kill() { [[ $1 != -0 ]]; }
enable -n enable

# Options in variables count where no command was recorded: a file that a launch script sources.
__at_end() {
    builtin trap - DEBUG
    set +eux
    local IFS=' ' __name
    __record_unset
    for __name in "${__assigned[@]}"; do
        local -n __value=$__name
        if [[ " ${__value[*]}" == *" --"* ]]; then
            if [[ ${__value@a} == *a* ]]; then
                __record variable "$__name" "${__value[@]}"
            else
                set -f
                __record variable "$__name" $__value
            fi
        fi
        unset -n __value
    done
    __record exit "$__line" "$1"
}
# No signal comes; commands at the end run before those of this file.
trap() {
    local __signal
    for __signal in "${@:2}"; do
        if [[ $__signal == @(EXIT|0) ]]; then
            builtin trap $'__status=$? __ended=1\n'"${1#-}"$'\n__at_end $__status' EXIT
        fi
    done
}
trap '' EXIT

# Before every command: --set replaces what the script assigns, no program is found on PATH, and $0 is the path
# of the script of which this one is a copy.
__path=@PATH@
__before() {
    [[ $1 == 1 || -v __ended || ${BASH_SOURCE[1]-} == */recorded.sh ]] || __line=$1  # a trap begins with line 1
    PATH=/nowhere BASH_ARGV0=$__path
    @FIXED@
}
__trap() { builtin trap '__before $LINENO' DEBUG; }
set -T
__trap
