"""Bash reads launch scripts: what it would pass to Megatron is what is read, and nothing else happens."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.common import limits
from megatron_nemotron3.launch import jail, script
from megatron_nemotron3.launch.command_line import read_launch
from megatron_nemotron3.launch.script import LaunchSource

SIZES = r"""
SIZE="small" # or "large"
case "${SIZE}" in
    "small")
        LAYERS=2
        HIDDEN=64
        ;;
    "large" | huge)
        LAYERS=4
        HIDDEN=128
        ;;
    *)
        echo "no such size"; exit 1
        ;;
esac
options=" \
    --num-layers ${LAYERS} \
    --hidden-size ${HIDDEN} \
    --split 99,1,0"
torchrun --nproc_per_node 8 pretrain_hybrid.py ${options} --bf16
"""
#: Scripts that need nothing from outside.
DECIDED = {
    "case": SIZES,
    "conditions": """
        X=; TP=4; MODE=${MODE:-fast}
        ARGS=(--lr 1)
        [ -z "$X" ] && ARGS+=(--seed 2)
        [[ "$X" == abc ]] || ARGS+=(--bf16)
        if [ "$TP" = 1 ]; then A="--train-iters 1"; elif [[ $TP -gt 2 && -n "$TP" ]]; then A="--train-iters 2"
        else A="--train-iters 3"; fi
        if ! test "$MODE" = fast; then A="$A --num-layers 1"; fi
        cd . && torchrun pretrain_hybrid.py "${ARGS[@]}" $A
    """,
    "functions": """
        launch() {
            local steps=5
            torchrun pretrain_hybrid.py --train-iters $steps "$@"
        }
        never() { torchrun pretrain_hybrid.py --train-iters 7; }
        if [ 1 -eq 2 ]; then
            never
        else
            launch
        fi
        exit 0
        torchrun pretrain_hybrid.py --seed 3
    """,
    "loops and strings": r"""
        layers=0; NAME=model-8b.yaml; declare -A MAP=([x]=4 [y]=5)
        for size in 8 16 24; do ((layers += size)); done
        while [ $layers -gt 40 ]; do layers=$((layers - 1)); done
        printf -v padded '%05d' 42
        torchrun pretrain_hybrid.py --num-layers $layers --wandb-exp-name "${NAME%.yaml}" \
            --seed ${MAP[y]} --train-iters $padded
    """,
    "here-documents": """
        cat > /dev/null <<EOF
if [ this is not a script; --seed 5
EOF
        ARGS=$(cat <<EOF
--seed 5
--lr $((1 + 1))
EOF
)
        torchrun pretrain_hybrid.py $ARGS  # --seed 7
    """,
    "tools": """
        D=$(dirname /data/text/part.bin); B=$(basename /data/text/part.bin .bin)
        for i in $(seq 1 3); do BLEND+="$i $D/${B}_$i "; done
        torchrun pretrain_hybrid.py --data-path $BLEND --seed $(echo 7)
    """,
    "comments and continuation": r"""
        ARGS=(
            --seed 1  # don't stop here
            # --seed 2
            --split "99, 1,0"
        )
        torchrun \
            pretrain_hybrid.py \
            "${ARGS[@]}" 2>&1 | cat
    """,
    "a log": """
        LOG=log_$((1 + 1)).txt
        torchrun pretrain_hybrid.py --seed 1 > $LOG 2>&1
    """,
    "a word as one": "CMD='torchrun pretrain_hybrid.py --seed 1'\neval $CMD --lr 2",
    "errors end it": "set -euo pipefail\nmkdir -p out || exit 1\ntorchrun pretrain_hybrid.py --seed 1",
}
#: Of texts that are no scripts.
PIECES = (
    "if ", "then ", "else ", "fi\n", "case x in ", "esac ", "a) ", ";; ", "for i in ", "do ", "done ",
    "f() ", "f ", "function ", "return ", "declare ", "eval ", "exit 1 ", "! ", "[ ", "]", "[[ ", "]] ",
    "$(", "${", "$A ", "<(", ">(", "((", "))", "(", ")", "{ ", "} ", "A=1 ", "A=(", "--lr ", "x.py ",
    " && ", " || ", "|", ";", "\n", "<<E ", "E\n", "2>&1", "> ", '"', "'", "\\", "#", "`", "\0", "\x1b[2J",
)  # fmt: skip


def follow(text: str, variables: dict[str, str] | None = None, path: str = "launch.sh") -> script.Script:
    return script.follow(LaunchSource(text, variables or {}, path))


def running(mark: Path) -> list[psutil.Process]:
    """Processes that have MARK=mark in their environment; a zombie has none."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process] if process.environ().get("MARK") == str(mark) else []
    return found


def of_bash(text: str, folder: Path) -> dict[str, tuple[str, ...]]:
    """What bash passes to the first pretrain_hybrid.py of a script."""
    program = folder / "torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >&9; printf "\\n" >&9\n')
    program.chmod(0o755)
    words = folder / "words"
    subprocess.run(
        ["bash", "-c", f'exec 9>"{words}"\n{text}'],
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
    )
    first = words.read_text().split("\n")[0].rstrip("\0").split("\0")
    first = first[first.index("pretrain_hybrid.py") + 1 :]
    options: dict[str, tuple[str, ...]] = {}
    for word in first:
        if word.startswith("--"):
            options[word] = ()
        else:
            last = next(reversed(options))
            options[last] = (*options[last], word)
    return options


@pytest.mark.parametrize("name", DECIDED)
def test_read_as_bash_runs_it(name: str, tmp_path: Path) -> None:
    assert follow(DECIDED[name]).options == of_bash(DECIDED[name], tmp_path)


def test_given_values_replace_the_scripts_own(tmp_path: Path) -> None:
    large = follow(SIZES, {"SIZE": "large"})
    assert large.options == of_bash(SIZES.replace('"small" #', '"large" #'), tmp_path)
    assert large.options["--num-layers"] == ("4",) and large.world_size == 8
    empty = follow("X=1\nif [ -z $X ]; then S=2; else S=3; fi\npretrain.py --seed $S", {"X": ""})
    assert empty.options == {"--seed": ("2",)}
    text = "f() { local SIZE=1; pretrain.py --seed $SIZE --lr ${1:-0}; }\nexport SIZE=2\nf $1"
    assert follow(text, {"SIZE": "it's 5"}).options["--seed"] == ("it's", "5")
    assert follow(text, {"1": "9"}).options == {"--seed": ("1",), "--lr": ("9",)}


def test_variables_without_a_value_show_their_names() -> None:
    """Where they decide more than a value, they are empty, as in bash, and named."""
    text = """
    if [ -z ${CHECKPOINT} ]; then CHECKPOINT=here; TOKENIZER=here; fi
    for host in $(cat hosts); do ping $host; done
    [ -n "$DEBUG" ] && ARGS="--bf16"
    pretrain_hybrid.py --lr 1 --load $OTHER/x --seed $((NODES * 2)) --save ${SAVE:-out} $ARGS
    """
    found = follow(text)
    assert found.options == {"--lr": ("1",), "--load": ("$OTHER/x",), "--seed": ("0",), "--save": ("out",)}
    assert "not set, so empty: DEBUG, NODES; --set DEBUG=VALUE gives a value" in found.notes
    assert follow(text, {"NODES": "4"}).options["--seed"] == ("8",)
    assert follow("set -u\npretrain.py --lr $RATE").options == {"--lr": ("$RATE",)}
    assert follow("DATA=$1\npretrain.py --data-path $DATA --seed 1").options["--data-path"] == ("$1",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('if [[ -z "$KEY" ]]; then W=(--seed 1); else W=(--seed 2); fi; pretrain.py "${W[@]}"', ("1",)),
        ("S=2; [[ $PROC -eq 0 ]] && S=1; pretrain.py --seed $S", ("1",)),
        ('case "$STAGE" in "") S=1;; *) S=2;; esac\npretrain.py --seed $S', ("1",)),
        ("S=$((NODES * 8)); pretrain.py --seed $S", ("0",)),
        ("A[1]=x; declare -A M; M[lr]=1; pretrain.py --seed \"${A[@]}\"", ("x",)),
        ("export name=foo; srun bash -c 'pretrain.py --seed $name'", ("foo",)),
        ("NAME=x; srun bash -c 'pretrain.py --seed /c/$NAME'", ("/c/",)),
        ("srun bash -euo pipefail -c 'pretrain.py \"$@\"' _ --seed 1", ("1",)),
        ("S=1; pretrain.py --seed /data/starcoder/python", ("/data/starcoder/python",)),
        ("PY=/opt/conda/bin/python3\nexport PATH=/opt:$PATH\n$PY -m x pretrain.py --seed 3", ("3",)),
        ("PATH=/usr/bin:$PATH python3 pretrain.py --seed 3", ("3",)),
        ("/usr/bin/env python3 pretrain.py --seed 3", ("3",)),
        ("set -e\ncd /cluster/megatron\npretrain.py --seed $PWD/x", ("/cluster/megatron/x",)),
        ("set -e; cat <<E > f\na\nE\nwhile read h; do echo $h > f; done <<< a\npretrain.py --seed 1", ("1",)),
        ("set -e; read -r M < <(scontrol show); pretrain.py --seed $M", ("$(scontrol)",)),
        ("command -v python || exit 1\ntype torchrun || exit 1\npretrain.py --seed 1", ("1",)),
        ("until [ -f x ]; do sleep 1; done\nwhile kill -0 9; do sleep 1; done\npretrain.py --seed 1", ("1",)),
    ],
)  # fmt: skip
def test_as_bash_starts_it(text: str, expected: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that real bash passes (with stub programs); what decides more than a value is not replaced."""
    monkeypatch.setattr(jail, "SECONDS", 3)
    assert follow(text).options == {"--seed": expected}


def test_what_bash_does_otherwise_is_said() -> None:
    found = follow("torchrun pretrain.py \\\n # comment\n --seed 1")
    assert found.notes == ["line 3: the line before does not continue, so bash ends the command"]
    found = follow("S=$(cat nowhere.txt)\npretrain.py --seed $S")
    assert found.notes == ["line 1: cat is not run and counts as successful, with unknown output"]
    with pytest.raises(ValueError, match="line 2: the script ends with status 3 before a training: missing"):
        follow("trap 'rm -f t' EXIT\necho missing >&2; exit 3")
    found = follow("builtin enable -f ./x.so x\npretrain.py --seed 1")  # no library is loaded
    assert found.notes == ["bash: line 1: builtin: enable: not a shell builtin"]
    with pytest.raises(ValueError, match="ends with status 97"):
        follow("A=1; exit 97")
    with pytest.raises(ValueError, match="no Megatron option"):
        follow(f"echo {'launch ' * 20000}")
    text = "#SBATCH --nodes=4 --ntasks-per-node=8\nip=$(srun -N 1 -n 1 hostname)\nsrun pretrain.py --seed 1"
    assert follow(text).world_size == 32
    assert follow("srun -N2 --ntasks-per-node=4 pretrain.py --seed 1 $A").world_size == 8


def test_what_is_not_run_is_said() -> None:
    text = """GPUS=$(nvidia-smi -L | wc -l)
    curl x.org && STEPS=4
    if [ ! -d logs ]; then mkdir logs; fi
    torchrun --nproc_per_node $GPUS pretrain.py --seed $STEPS --run job_$(hostname)
    """
    found = follow(text)
    assert found.options == {"--seed": ("4",), "--run": ("job_$(hostname)",)} and found.world_size is None
    assert found.notes == [
        "line 1: nvidia-smi is not run and counts as successful, with unknown output",
        "line 1: wc is not run and counts as successful, with unknown output",
        "line 2: curl is not run and counts as successful",
        "line 4: hostname is not run and counts as successful, with unknown output",
    ]


def test_what_the_script_reads(tmp_path: Path) -> None:
    """Files next to it are sourced; a missing one is named."""
    (tmp_path / "common.sh").write_text('SEED=7\nexport NEMOTRON3_EMULATE=nvfp4\nARGS=(--lr "$1")\n')
    text = (
        'source "$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)/common.sh" 3\n. gone.sh\n'
        'srun -N 2 --ntasks-per-node 4 bash -c "python $(dirname $0)/pretrain.py --seed $SEED ${ARGS[*]}" &'
    )
    found = follow(text, path=str(tmp_path / "launch.sh"))
    assert found.options == {"--seed": ("7",), "--lr": ("3",)} and found.world_size == 8
    assert found.notes == ["bash: line 2: gone.sh: No such file or directory"]
    assert found.environment == {"NEMOTRON3_EMULATE": "nvfp4"}


@pytest.mark.parametrize(
    ("prefix", "emulated", "adapters", "heads"),
    [
        ("NEMOTRON3_EMULATE=nvfp4", True, None, None),
        ("export NEMOTRON3_EMULATE=nvfp4 NEMOTRON3_LORA=1;", True, "", None),
        ("NEMOTRON3_EMULATE=nvfp4; ", False, None, None),
        ("NEMOTRON3_LORA=rank=4 NEMOTRON3_BOOST=depths=2", False, "rank=4", "depths=2"),
        ("export NEMOTRON3_LORA=$UNKNOWN;", False, None, None),
        ("NEMOTRON3_EMULATE=0", False, None, None),
    ],
)
def test_variables_of_this_package(
    prefix: str, emulated: bool, adapters: str | None, heads: str | None
) -> None:
    """They count where the training processes get them: exported, or before the command."""
    found = read_launch(LaunchSource(f"{prefix} pretrain.py --seed 1"))
    assert (found.emulate is not None, found.adapters, found.heads) == (emulated, adapters, heads)


def test_several_trainings_and_none() -> None:
    found = follow("for S in 1 2; do\npretrain.py --seed $S\ndone\npython tools/prepare.py --input x")
    assert found.options == {"--seed": ("1",)}
    assert "2 commands are trainings: read is the first, of line 2" in found.notes
    found = follow("MODEL=(--seed 1)\nexport MORE='--lr 2 --bf16'\nNAME=x")
    assert found.options == {"--seed": ("1",), "--lr": ("2",), "--bf16": ()}
    assert found.notes == ["no command is a training: read are the options in MODEL, MORE"]
    text = "for i in 0 1; do python train.py --seed $i > log.$i & done; wait"
    assert follow(text).options["--seed"] in [("0",), ("1",)]  # they run at the same time
    looped = follow("while ! pretrain.py --seed 1 --load $X; do sleep 60; done")
    assert looped.options == {"--seed": ("1",), "--load": ("$X",)} and looped.notes == []


def test_files_of_the_cluster() -> None:
    """A script that ends because a file is missing on this machine is read as if it were there."""
    text = """if [ ! -f "/cluster/tokenizer" ] || [[ ! -d "/cluster/data" ]]; then
        echo "no tokenizer"; exit 1
    fi
    pretrain.py --seed 1"""
    found = follow(text)
    assert found.options == {"--seed": ("1",)}
    note = "the script ends with status 1 in line 2; it is read as if every file that it tests existed"
    assert found.notes == [note]


def test_placeholders_count_as_values() -> None:
    text = """CHECKPOINT=<PATH_OF_MODEL> (e.g., /357m)
    export DATA=<PATH>/text \\
            (e.g., /data)
    pretrain.py --seed 1 --load $CHECKPOINT --data-path ${DATA} --lr 2"""
    found = follow(text)
    assert found.options == {
        "--seed": ("1",),
        "--load": ("<PATH_OF_MODEL>",),
        "--data-path": ("<PATH>/text",),
        "--lr": ("2",),
    }
    assert found.notes == ["placeholders count as values: <PATH_OF_MODEL>, <PATH>"]
    # What bash understands is not touched.
    assert follow("A=<nowhere>x\npretrain.py --seed 1 --lr $A").options["--lr"] == ()


ENDS = "the script ends with status"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SIZES.replace('"small" #', '"tiny" #'), f"line 13: {ENDS} 1 before a training: no such size"),
        ("echo 'no $DATA given'; exit 1; echo $SEED $DATA", "no $DATA given; give --set DATA=VALUE"),
        ("echo 'the first argument is missing'; exit 1", "missing; give --set 1=VALUE"),
        ("echo 'error: --ckpt is required'; exit 1; $A", "give --set 1=--ckpt --set 2=VALUE"),
        ("$PYTHON $ARGUMENTS", "no Megatron option in the text (not set: PYTHON, ARGUMENTS)"),
        (
            "[ $# -eq 1 ] || { echo usage; exit 2; }\npretrain.py --lr $1",
            f"line 1: {ENDS} 2 before a training",
        ),
        ("pretrain.py --lr ${RATE:?is missing}", "RATE: is missing; give --set RATE=VALUE"),
        (
            "if true; then\npretrain.py --lr 1",
            f"line 1: {ENDS} 2 before a training: syntax error: unexpected end",
        ),
        ("A='", "unexpected EOF while looking for matching"),
        ("fi; pretrain.py --lr 1", "syntax error near unexpected token"),
        ("echo $'\\e[2J'; exit 3", r"status 3 before a training: \x1b[2J"),
        ("echo hello", "no Megatron option"),
        ("", "no Megatron option"),
        ("# nothing", "no Megatron option"),
    ],
)
def test_what_starts_no_training_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(text)
    assert cli.main(["explain", "nano", "--argv", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert message in printed.err


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
@settings(max_examples=10, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        follow(text)


#: What no script may do. FOLDER and PORT are filled in.
HOSTILE = {
    "writes": ": > FOLDER/new; echo x >> FOLDER/kept; echo x > FOLDER/kept; echo x &> FOLDER/new",
    "opens": "exec 3> FOLDER/a; echo x >&3; exec 4<> FOLDER/kept; echo x >&4; set -C; echo x >| FOLDER/kept",
    "links": "ln -s / FOLDER/a; mkdir FOLDER/a; rm FOLDER/kept; mkfifo FOLDER/a; mv FOLDER/kept FOLDER/b",
    "a program": "/bin/touch FOLDER/a; /usr/bin/env touch FOLDER/a; /bin/../bin/cp FOLDER/kept FOLDER/b",
    "exec": "exec /bin/touch FOLDER/new",
    "builtin exec": "builtin exec /bin/touch FOLDER/new",
    "command": "command -p touch FOLDER/a; builtin command /bin/touch FOLDER/new",
    "PATH": "PATH=/usr/bin:/bin; touch FOLDER/a; export PATH=/bin; touch FOLDER/new",
    "PATH without the trap": "trap - DEBUG; PATH=/usr/bin:/bin; touch FOLDER/a; $(touch FOLDER/new)",
    "hash": "trap - DEBUG; hash -p /usr/bin/touch x; x FOLDER/new",
    "no handler": "unset -f command_not_found_handle exec; PATH=/bin; touch FOLDER/a; exec touch FOLDER/b",
    "substitution": "x=$(/bin/touch FOLDER/a); cat <(/bin/touch FOLDER/b); : > >(/bin/cp /bin/sh FOLDER/c)",
    "coprocess": "coproc /bin/touch FOLDER/a; wait",
    "a script": "bash -c '/bin/touch FOLDER/new'; sh -c ': > FOLDER/new'; bash FOLDER/script.sh",
    "eval": 'eval "$(printf "%s" "/bin/touch FOLDER/new")"',
    "prompt": "PROMPT_COMMAND=': > FOLDER/new'; PS4='$(: > FOLDER/new)'; set -x; true",
    "a trap": "trap '/bin/touch FOLDER/new' EXIT ERR DEBUG; false",
    "arithmetic": "a[$(/bin/touch FOLDER/new)]=1; echo $((a[$(/bin/touch FOLDER/new)]))",
    "a socket": "exec 3<> /dev/tcp/127.0.0.1/PORT; echo > /dev/tcp/localhost/PORT; read < /dev/udp/::1/1",
    "signals": "builtin kill -9 PARENT; builtin kill -9 $PPID; unset -f kill; kill -9 -1; kill 0",
    "truncation": "exec 7< FOLDER/kept; : 7<> FOLDER/kept; builtin enable -f FOLDER/x.so x",
    "a library": "enable -f FOLDER/x.so evil; enable -f /usr/lib/bash/mkdir mkdir; mkdir FOLDER/new",
    "limits": "unset -f ulimit; ulimit -v unlimited; ulimit -f unlimited; umask 0; : > FOLDER/new",
    "history": "HISTFILE=FOLDER/new; set -o history; history -s x; history -w; history -a FOLDER/b",
    "the record": "echo garbage >&251; printf '1\\0' >&251; exec 251>&-; pretrain.py --seed 1",
    "a directory": "cd FOLDER; : > new; pushd /; popd; echo x > ../$(basename FOLDER)/new",
    "logs": "exec > FOLDER/new 2>&1; echo x; pretrain.py --seed 1 | tee FOLDER/new",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_script_does_anything(name: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    (tmp_path / "script.sh").write_text(f"/bin/touch {tmp_path}/new; : > {tmp_path}/new\n")
    before = sorted(os.listdir(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        text = HOSTILE[name].replace("FOLDER", str(tmp_path)).replace("PARENT", str(os.getpid()))
        text = text.replace("PORT", str(server.getsockname()[1]))
        for piece in (text, text.replace("; ", "\n"), f"f() {{ {text}; }}\nf\nf | f &\nwait"):
            with contextlib.suppress(ValueError):
                follow(f"{piece}\npretrain.py --seed 1")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert sorted(os.listdir(tmp_path)) == before and kept.read_text() == "as it was"


#: What takes time, memory or processes without end.
ENDLESS = {
    "a loop": "while :; do :; done",
    "output": "while :; do echo xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; done",
    "a string": "x=x; while :; do x=$x$x; done",
    "processes": "f() { f | f & }; f; while :; do :; done",
    "a device": "read -d x < /dev/zero; x=$(< /dev/zero)",
    "signals": "trap '' TERM INT HUP XCPU; while :; do :; done",
    "left behind": "(trap '' HUP TERM; while :; do :; done) & exit 0",
    "records": "while :; do pretrain.py --seed 1; done",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_every_script_ends(name: str, tmp_path: Path) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(ENDLESS[name])
    environment = {"PATH": "/nowhere", "MARK": f"{tmp_path}", "BASH_ENV": str(tmp_path / "before")}
    (tmp_path / "before").write_text("command_not_found_handle() { echo $* >&251; }\n")
    assert jail.run([str(file)], environment, tmp_path, seconds=0.25)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 100 << 20
    assert not running(tmp_path)


def test_no_script_outruns_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = []
    allow = jail._Forks.allow
    monkeypatch.setattr(jail._Forks, "allow", lambda forks, number: allowed.append(allow(forks, number)))
    text = "while :; do (while :; do :; done) & done"
    assert jail.run(["-c", text], {}, tmp_path) == "starts more than 64 processes"
    assert len(allowed) < 2 * jail.PROCESSES  # some have ended: bash may fork twice for one


def test_limits_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "SECONDS", 60)  # others may use the machine
    with pytest.raises(ValueError, match="the script starts more than 64 processes before a training"):
        follow("while :; do (while :; do :; done) & done")
    monkeypatch.setattr(jail, "SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"the script takes more than 0\.5 s before a training"):
        follow("while :; do :; done")
    notes = follow("pretrain.py --seed 1\nwhile :; do :; done").notes
    assert "the script takes more than 0.5 s and was ended" in notes


SLOW = {
    "exponential": "$ab" * 40 + "!\ntorchrun pretrain.py --seed 1",
    "quadratic": "(" * 1_000_000 + "\ntorchrun pretrain.py --seed 1",
    "aliases": "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    + "MODEL_ARGS:\n  --num-layers: *a9\n",
}


@pytest.mark.parametrize("name", SLOW)
def test_a_text_that_takes_too_long_is_ended(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SECONDS", 1)
    with pytest.raises(ValueError, match="the text of the launch takes more than 1 s"):
        read_launch(LaunchSource(SLOW[name]))


def test_all_runs_of_a_script_have_one_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable without a value is tried; calls of three grow as 3^n."""
    monkeypatch.setattr(jail, "SECONDS", 1)
    monkeypatch.setattr(script, "_ALL", 1)
    calls = "f0(){ :; }\n" + "".join(f"f{i}(){{ f{i - 1}; f{i - 1}; f{i - 1}; }}\n" for i in range(1, 30))
    runs: list[float] = []
    run = jail.run

    def counted(*words: Any, seconds: float, **options: Any) -> str:
        runs.append(seconds)
        return run(*words, seconds=seconds, **options)

    monkeypatch.setattr(jail, "run", counted)
    words = " ".join(f"--seed $U{i}" for i in range(40))
    with pytest.raises(ValueError, match="the script takes more than 1 s before a training"):
        follow(f"{calls}f29\ntorchrun pretrain.py {words}\n")
    assert len(runs) == 2 and sum(runs) <= 2


def test_memory_and_options_have_limits() -> None:
    with pytest.raises(ValueError, match="takes more than 192 MiB of memory in one process before"):
        follow("A=xxxxxxxxxxxxxxxx\n" + 'A="$A$A"\n' * 25 + "pretrain.py --seed 1")
    with pytest.raises(ValueError, match="2,001 different options: Megatron has fewer than 2,000"):
        read_launch("pretrain.py " + " ".join(f"--o{i}" for i in range(2001)))
    with pytest.raises(ValueError, match="30,001 words of options"):
        read_launch("pretrain.py --data-path" + " a" * 30_000)


def test_without_a_filter_a_script_needs_trust(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the file that asks for a library which no system has."""
    source = Path(jail.__file__).read_text()
    copy = tmp_path / "jail.py"
    copy.write_text(source.replace("libseccomp.so.2", "libnosuch.so.2"))
    monkeypatch.setattr(jail, "__file__", str(copy))
    file = tmp_path / "launch.sh"
    file.write_text("X=5\npretrain_hybrid.py --seed $X")
    assert cli.main(["explain", "nano", "--argv", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "no filter of system calls (libnosuch.so.2" in printed.err and "--trust-script" in printed.err
    assert cli.main(["explain", "nano", "--argv", str(file), "--full", "--trust-script"]) == 0
    assert "--seed" in capsys.readouterr().out
    file.write_text("torchrun pretrain_hybrid.py \\\n  --seed 5 --hybrid-layer-pattern 'M*|E'")
    assert cli.main(["explain", "nano", "--argv", str(file)]) == 0  # nothing to compute


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while bash runs ends its whole group."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    environment = {"PATH": "/nowhere", "MARK": f"{tmp_path}"}
    file = tmp_path / "launch.sh"
    file.write_text("while :; do (while :; do :; done); done")
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            jail.run([str(file)], environment, tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not running(tmp_path)


@pytest.mark.parametrize("given", ["", "/script"])
def test_the_library_path_of_python_is_not_that_of_the_script(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Python of environment modules finds its libpython there; without it, it says so and no more."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "/libraries/of/python")
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/bash\n[ "$LD_LIBRARY_PATH" = /libraries/of/python ] || {{ echo no libpython; exit 1; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    environment = {"LD_LIBRARY_PATH": given} if given else {}
    file = tmp_path / "launch.sh"
    file.write_text("echo ${LD_LIBRARY_PATH-none}")
    assert jail.run([str(file)], environment, tmp_path) == ""
    assert (tmp_path / "printed").read_text().strip() == (given or "none")
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(jail.JailError, match=r"no filter of system calls arrived \(no libpython\)"):
        jail.run([str(file)], {}, tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nano", "--set", "A=1"], "--set A=1 is about the script of --argv"),
        (["nano", "--argv", "FILE", "--set", "A"], "--set A: give VARIABLE=VALUE"),
        (["nano", "--argv", "FILE", "--set", "NO=1"], "--set NO: the script has no such variable"),
        (["--tp", "2"], "give the NAME of a model"),
        (["--argv", "FILE", "--tiny"], "give the NAME of a model"),
    ],
)
def test_bad_input(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(SIZES)
    assert cli.main(["explain", *(str(file) if word == "FILE" else word for word in words)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
