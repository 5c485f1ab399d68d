"""Shell scripts are followed as bash follows them, or refused with the line that cannot be decided."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_nemotron3 import cli
from megatron_nemotron3.launch import script

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
#: Scripts that leave nothing open.
DECIDED = {
    "case": SIZES,
    "case by a pattern": SIZES.replace('"small" #', '"large" #').replace('"large" | huge', "l* | h?ge"),
    "if and elif": """
        TP=4
        if [ "$TP" = 1 ]; then A="--lr 1"; elif [[ $TP -gt 2 && -n "$TP" ]]; then A="--lr 2"
        else A="--lr 3"; fi
        torchrun pretrain_hybrid.py $A
    """,
    "not, and, or": """
        X=
        ARGS=(--lr 1)
        [ -z "$X" ] && ARGS+=(--seed 2)
        [ -n "$X" ] && ARGS+=(--seed 3)
        [[ "$X" == abc ]] || ARGS+=(--bf16)
        if ! [ -n "$X" ]; then ARGS+=(--num-layers 1); fi
        cd . && torchrun pretrain_hybrid.py "${ARGS[@]}"
    """,
    "a default": """
        MODE=${MODE:-fast}
        if test "$MODE" = fast; then STEPS=3; else STEPS=9; fi
        torchrun pretrain_hybrid.py --train-iters $STEPS
    """,
    "a string that grows": """
        options="--lr 1"
        if false; then
            options="$options --seed 9"
        fi
        if true; then options="${options} --seed 1"; fi
        torchrun pretrain_hybrid.py $options --bf16
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
    """,
    "nested": """
        A=1; B=2
        if [ $A -eq 1 ]; then
            case $B in
                1) S=10 ;;
                2) if [ $A != $B ]; then S=20; else S=30; fi ;;
            esac
        else
            S=40
        fi
        torchrun pretrain_hybrid.py --seed $S
    """,
    "a branch after the command": """
        torchrun pretrain_hybrid.py --seed 1
        if [ 2 -lt 1 ]; then torchrun pretrain_hybrid.py --seed 2; fi
        exit 0
        torchrun pretrain_hybrid.py --seed 3
    """,
    "a loop over one word": """
        for size in 8; do
            torchrun pretrain_hybrid.py --num-layers $size
        done
    """,
    "a here-document": """
        cat > /dev/null <<EOF
if [ this is not a script; --seed 5
EOF
        torchrun pretrain_hybrid.py --seed 6  # --seed 7
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
}
#: Of texts that are no scripts.
PIECES = (
    *(
        "if ",
        "then ",
        "fi\n",
        "case x in ",
        "esac ",
        "a) ",
        ";; ",
        "$(",
        "${",
        '"',
        "'",
        "(",
        ")",
        "{ ",
        "} ",
    ),
    *(
        "[ ",
        "]",
        " && ",
        " || ",
        "|",
        "\n",
        "A=1 ",
        "A=(",
        "--lr ",
        "x.py ",
        "<<E ",
        "E\n",
        "for i in ",
        "do ",
    ),
    *(
        "done ",
        "f() ",
        "$A ",
        "\\",
        "#",
        "`",
        "eval ",
        "[[ ",
        "]] ",
        "function ",
        "else ",
        "elif ",
        "! ",
        ";",
    ),
    *("<(", ">(", "((", "))", "exit 1 ", "while ", "2>&1", "> ", "declare ", "f ", "return "),
)


def of_bash(text: str, folder: Path) -> dict[str, tuple[str, ...]]:
    """What bash passes to the first pretrain_hybrid.py of a script."""
    program = folder / "torchrun"
    program.write_text('#!/bin/bash\nprintf "%s\\0" "$@" >&9; printf "\\n" >&9\n')
    program.chmod(0o755)
    words = folder / "words"
    subprocess.run(
        ["bash", "-c", f'exec 9>"{words}"\n{text}'],
        check=True,
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
def test_followed_as_bash_follows_it(name: str, tmp_path: Path) -> None:
    assert script.follow(DECIDED[name]).options == of_bash(DECIDED[name], tmp_path)


def test_given_values_replace_the_scripts_own(tmp_path: Path) -> None:
    large = script.follow(SIZES, {"SIZE": "large"})
    assert large.options == of_bash(SIZES.replace('"small" #', '"large" #'), tmp_path)
    assert large.options["--num-layers"] == ("4",)
    assert large.notes == ['line 3: case "${SIZE}" is large; --set SIZE=VALUE for another']
    empty = script.follow("X=1\nif [ -z $X ]; then S=2; else S=3; fi\npretrain.py --seed $S", {"X": ""})
    assert empty.options == {"--seed": ("2",)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            SIZES.replace('"small" #', "$1 #"),
            r'--num-layers uses LAYERS, and line 3 cannot be decided: case "\$',
        ),
        (SIZES.replace('"small" #', "$1 #"), "give --set SIZE=VALUE"),
        (SIZES.replace('"small" #', "$(cat size) #"), "line 3 cannot be decided"),
        (SIZES.replace('"small" #', '"tiny" #'), "line 13: with these variables the script ends with exit 1"),
        ("if [ -f x ]; then\n  A='--lr 1'\nfi\npretrain.py $A", r"--lr \(line 2\): line 1 cannot be decided"),
        (
            "if grep -q x y; then S=1; fi\npretrain.py --seed $S",
            "--seed uses S, and line 1 cannot be decided",
        ),
        ("S=1\ngrep -q x y && S=2\npretrain.py --seed $S", "--seed uses S, and line 2"),
        (
            "for S in 1 2; do\npretrain.py --seed $S\ndone",
            r"--seed \(line 2\): line 1 repeats what sets it: for S",
        ),
        ("S=1\nwhile [ $# -gt 0 ]; do S=$1; shift; done\npretrain.py --seed $S", "--seed uses S, and line 2"),
        (
            "f() { pretrain.py --lr 1; }\nif [ -d x ]; then f; fi",
            r"--lr \(line 1\): line 2 cannot be decided",
        ),
        ("f() { f; }\nf\npretrain.py --lr 1", "call each other more than 20 deep"),
        ("if true; then\npretrain.py --lr 1", "line 1: if has no fi"),
        ("case x in\na) pretrain.py --lr 1", "line 1: case has no esac"),
        ("if " * 5000, "nested more than"),
        ("(" * 5000, "nested more than|bracket is not closed"),
        ("A='", "line 1: a quote is not closed"),
        ("A=(--lr 1", "line 1: a bracket is not closed"),
        ("cat <<E\n--lr 1", "here-document E is not closed"),
        ("fi", "no Megatron option"),
        ("a) b", "has no beginning"),
    ],
)
def test_what_cannot_be_decided_is_refused(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launch.sh"
    file.write_text(text)
    assert cli.main(["explain", "nano", "--argv", str(file)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(printed.err)


def test_a_branch_that_changes_no_option_does_not_matter() -> None:
    text = """
    if [ -z ${CHECKPOINT} ]; then CHECKPOINT=here; TOKENIZER=here; fi
    if [ ! -d logs ]; then mkdir logs; echo --made; fi
    for host in $(cat hosts); do ping $host; done
    pretrain_hybrid.py --lr 1 --load $OTHER
    """
    assert script.follow(text).options == {"--lr": ("1",), "--load": ("$OTHER",)}


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        script.follow(text)


def test_what_is_not_read_is_said() -> None:
    found = script.follow("source common.sh\nif [ 1 = 1 ]; then S=2; fi\npretrain.py --seed $S")
    assert found.notes == ["line 1: source common.sh is not read", "line 2: if [ 1 = 1 ] is taken as true"]
    assert script.follow('eval "python -m x pretrain.py --seed 1"').options == {"--seed": ("1",)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nano", "--set", "A=1"], "--set A=1 sets a variable of the script of --argv"),
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
