"""`nemotron3 explain`: what it lists is what `flags` passes, and it finds whatever was changed."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.launch import (
    Launch,
    ParallelLayout,
    TrainingSchedule,
    flags,
    published,
    published_layout,
    to_argv,
)
from megatron_nemotron3.launch.command_line import layout_of, read_launch
from megatron_nemotron3.launch.explain import (
    ORIGINS,
    ExplainedOption,
    Explanation,
    explain,
    explain_command,
    explain_nearest,
)
from megatron_nemotron3.launch.explain_text import render
from megatron_nemotron3.launch.gpu_start import require_attention_variables
from megatron_nemotron3.launch.parser import default
from megatron_nemotron3.launch.phases import PHASES, phase
from megatron_nemotron3.launch.reference import LAUNCHES, NOT_PASSED, WHY, reference, shown
from megatron_nemotron3.models import Nemotron3Config
from tests.support.programs import run_python

SMALL = ParallelLayout(tp=8, ep=8, dp=2)


def launch_words(config: Nemotron3Config) -> list[str]:
    """Our options for the published run of a model, or for one rank of a model without one."""
    launch = LAUNCHES.get(config.name)
    precision = launch.precision if launch else "bf16"
    file = "nvfp4.yaml" if precision == "nvfp4" else None
    return to_argv(
        flags(
            Launch.of(
                config,
                published_layout(config),
                precision=precision,
                backend="te",
                schedule=published(config),
                te_precision_config_file=file,
            )
        )
    )


def command(words: list[str]) -> str:
    return "torchrun --nproc-per-node 8 pretrain_hybrid.py " + shlex.join(words)


def by_name(explanation: Explanation) -> dict[str, ExplainedOption]:
    return {setting.name: setting for setting in explanation.settings}


def different(explanation: Explanation) -> dict[str, str | None]:
    return {setting.name: setting.published for setting in explanation.differences}


@pytest.mark.parametrize("name", ["super", "puzzle", "nano-4b", "super-tiny"])
def test_lists_what_flags_passes(name: str) -> None:
    config = models.get(name)
    emitted = flags(Launch.of(config, schedule=published(config), extra=("--seed", "7")))
    explained = explain(Launch.of(config, schedule=published(config), extra=("--seed", "7")))
    passed = [s for s in explained.settings if s.passed and s.name.startswith("--")]
    assert [(s.name, s.value) for s in passed] == [(f.name, shown(f.values)) for f in emitted]
    assert {s.origin for s in explained.settings} <= set(ORIGINS)
    assert len(by_name(explained)) == len(explained.settings)


@pytest.mark.parametrize("name", ["super", "nano", "ultra", "nemotron-h-8b"])
def test_the_nearest_model_of_a_partial_script(name: str) -> None:
    """What a script passes says which model it is, not what it leaves to a file or to defaults."""
    config = models.get(name)
    pattern = ["--hybrid-layer-pattern", config.pattern]
    hidden = ["--hidden-size", str(config.hidden_size)]
    assert explain_nearest(command([*pattern, *hidden])).config == config
    if config.is_moe:
        experts = [
            "--num-experts",
            str(config.num_moe_experts),
            "--moe-router-topk",
            str(config.moe_router_topk),
        ]
        assert explain_nearest(command([*experts, *hidden])).config == config


def test_options_of_a_fork_are_listed() -> None:
    found = explain_nearest(command([*launch_words(models.get("super")), "--my-fork-option", "3"]))
    assert "unknown-option" not in {violation.rule for violation in found.violations}
    [note] = [note for note in found.notes if note.startswith("not Megatron's")]
    assert "--my-fork-option" in note and "--hidden-size" not in note
    text = render(found, full=True)
    assert "--my-fork-option" in text[text.index("the user's own") :].partition("notes")[0]


def test_experts_that_differ_by_layer() -> None:
    """No option but --spec says them, so the stack is compared like a number of the model."""
    puzzle = models.get("puzzle")
    words = to_argv(flags(Launch.of(puzzle, SMALL, backend="te")))
    assert explain_nearest(command(words)).config == puzzle
    found = by_name(explain_command(puzzle, command(words)))["--spec"]
    ours = "megatron_nemotron3.specs nemotron3_puzzle_te_stack_spec"
    assert (found.value, found.published, found.differs, found.of_model) == (ours, ours, False, True)
    place = words.index("--spec")
    for module, name, same in (
        ("megatron_nemotron3.specs", "nemotron3_puzzle_torch_stack_spec", True),
        ("mine", "spec", True),  # nobody here knows
        ("megatron_nemotron3.specs", "nemotron3_te_stack_spec", False),
        ("megatron_nemotron3.specs", "nemotron3_puzzle_tiny_stack_spec", False),
        ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec", False),
    ):
        pasted = command([*words[: place + 1], module, name, *words[place + 3 :]])
        assert by_name(explain_command(puzzle, pasted))["--spec"].differs != same, name
    without = explain_command(puzzle, command(words[:place] + words[place + 3 :]))
    assert different(without)["--spec"] == ours
    assert "--spec" not in reference(models.SUPER)


def test_origins() -> None:
    explained = by_name(
        explain(
            Launch.of(
                models.SUPER,
                SMALL,
                backend="te",
                schedule=TrainingSchedule(seq_length=4096),
                extra=["--lr", "1e-4", "--recompute-granularity", "full"],
            )
        )
    )
    expected = {
        "--hidden-size": ("model", "config.hidden_size"),
        "--squared-relu": ("family", "family"),
        "--expert-model-parallel-size": ("layout", "layout.ep"),
        "--bf16": ("precision", "precision"),
        "--weight-decay": ("schedule", "schedule.weight_decay"),
        "--moe-grouped-gemm": ("backend", "backend"),
        "--log-throughput": ("default", "default"),
        "--lr": ("user", "schedule.lr"),
        "--recompute-granularity": ("user", "command line"),
    }
    assert {name: (explained[name].origin, explained[name].field) for name in expected} == expected
    assert explained["--seq-length"].origin == "schedule"
    assert by_name(explain(Launch.of(models.SUPER, SMALL)))["--seq-length"].origin == "model"
    assert explained["--lr"].section == "optimization"


@pytest.mark.parametrize("name", sorted(LAUNCHES))
def test_published_variables_that_megatron_refuses_are_named(name: str) -> None:
    config = models.get(name)
    explained = explain(Launch.of(config, published_layout(config), backend="te"))
    variables = dict(one.split("=", 1) for one in explained.environment)
    argv = to_argv(flags(Launch.of(config, published_layout(config), backend="te")))
    with pytest.raises(ValueError, match="NVTE_FUSED_ATTN=0 contradicts"):
        require_attention_variables(argv, variables)
    assert "leave out NVTE_FUSED_ATTN=0: Megatron" in render(explained)
    del variables["NVTE_FUSED_ATTN"]
    require_attention_variables(argv, variables)


def test_numbers_are_compared_as_numbers() -> None:
    config = models.NANO
    same = explain(
        Launch.of(config, published_layout(config), schedule=published(config), extra=["--lr", "1.0e-03"])
    )
    assert different(same) == {}
    assert "nothing differs from the published recipe" in render(same)


@pytest.mark.parametrize("name", ["nano", "super", "ultra", "lightning", "nano-4b", "super-tiny"])
def test_a_pasted_launch_of_ours_differs_in_nothing_else(name: str) -> None:
    config = models.get(name)
    found = explain_command(config, command(launch_words(config)))
    hybrid_ep = dict(LAUNCHES[name].options) if name in LAUNCHES else {}
    assert different(found) == hybrid_ep
    assert [v for v in found.violations if v.severity == "error"] == []


@pytest.mark.parametrize("name", ["nano", "super", "nano-4b"])
def test_every_number_of_a_pasted_command_is_checked(name: str) -> None:
    """Each option of the architecture in turn: with another value, and left out."""
    config = models.get(name)
    known = {option for option, row in reference(config).items() if row.of_model}
    parts = read_launch(command(launch_words(config))).flags
    checked = [flag for flag in parts if flag.name in known]
    assert len(checked) >= 19
    before = set(different(explain_command(config, command(to_argv(parts)))))
    for flag in checked:
        rest = [other for other in parts if other.name != flag.name]
        without = explain_command(config, command(to_argv(rest)))
        setting = by_name(without)[flag.name]
        assert not setting.passed and setting.value == (
            default(flag.name, {f.name: f.values for f in rest}) or NOT_PASSED
        )
        holds = setting.value == shown(flag.values)
        assert set(different(without)) - before == (set() if holds else {flag.name}), flag
        if flag.values:
            other = "1e9" if flag.values[0].replace(".", "").replace("e-", "").isdecimal() else "MM"
            changed = explain_command(config, command([*to_argv(rest), flag.name, other]))
            assert set(different(changed)) - before == {flag.name}, flag
            assert by_name(changed)[flag.name].of_model and by_name(changed)[flag.name].origin == "user"


def test_cuts_of_the_pipeline_are_no_other_model() -> None:
    config = models.SUPER
    words = to_argv(flags(Launch.of(config, ParallelLayout(tp=2, pp=4, ep=2))))
    assert "|" in words[words.index("--hybrid-layer-pattern") + 1]
    assert "--hybrid-layer-pattern" not in different(explain_command(config, command(words)))


def test_rules_speak_about_a_pasted_command() -> None:
    words = launch_words(models.SUPER)
    words[words.index("--tensor-model-parallel-size") + 1] = "16"
    found = explain_command(models.SUPER, command([*words, "--grad-reduce-in-bf16"]))
    assert {v.rule for v in found.violations} >= {"mamba-groups-tp", "grad-reduce-in-bf16"}
    assert "mamba_num_groups=8 is not divisible by TP=16" in render(found)


SCRIPT = r"""#!/bin/bash
# Don't trip over --this, or over the quote.
set -euo pipefail
TP=${TP:-2}
export EP=64
if [ -n "${X:-}" ]; then echo --no-option; fi
MODEL_ARGS=(
    --hybrid-override-pattern "ME*|ME" --mtp-hybrid-override-pattern "*E" --mtp-num-layers 2
    --tensor-model-parallel-size "${TP}"  # of the node
    --expert-model-parallel-size $EP --bf16
)
MODEL_ARGS+=(--sequence-parallel)
MORE_ARGS=" --lr=1e-3 --data-path $BLEND 0.5 --num-experts 4 "
NVTE_FUSED_ATTN=0 python -m torch.distributed.run --nproc_per_node 8 --nnodes "${NODES:-1}" \
    pretrain_hybrid.py "${MODEL_ARGS[@]}" $MORE_ARGS --num-experts 8 --save "/runs/super_tp${TP}" "$@" 2>&1
"""


def test_a_shell_script_is_read() -> None:
    options = {flag.name: flag.values for flag in read_launch(SCRIPT).flags}
    assert options == {
        "--mtp-num-layers": ("2",),
        "--tensor-model-parallel-size": ("2",),
        "--expert-model-parallel-size": ("64",),
        "--bf16": (),
        "--sequence-parallel": (),
        "--lr": ("1e-3",),
        "--data-path": ("$BLEND", "0.5"),
        "--num-experts": ("8",),  # argparse takes the last
        "--save": ("/runs/super_tp2",),
        "--hybrid-layer-pattern": ("ME*|ME/*E/*E",),
    }
    layout = layout_of(options)
    assert layout == ParallelLayout(tp=2, ep=64, etp=2, dp=64, sp=True)  # Megatron's ETP is TP
    assert layout_of({"--tensor-model-parallel-size": ("$TP",)}) is None
    assert layout_of({"--tensor-model-parallel-size": ("4",)}) == ParallelLayout(tp=4, sp=False)
    found = explain_command(models.SUPER, SCRIPT)
    assert "--hybrid-override-pattern is deprecated" in found.notes[0]
    assert any("--data-path" in note and "variable" in note for note in found.notes)


@pytest.mark.parametrize("text", ["", "just words", "python train.py", "--a 'open\n"])
def test_text_without_options_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="option|matching `'"):
        read_launch(text)


@pytest.mark.parametrize(("name", "which"), [(n, p) for n in LAUNCHES for p in PHASES])
def test_a_phase_is_compared_with_itself(name: str, which: str) -> None:
    """A run of what is published of a phase differs in nothing the report states."""
    config = models.get(name)
    try:
        chosen = phase(config, which)
    except ValueError:
        with pytest.raises(ValueError, match="no published phase"):
            explain(Launch.of(config), name=which)
        return
    if which == "published":
        return  # test_a_pasted_launch_of_ours_differs_in_nothing_else
    layout = chosen.layout or ParallelLayout()
    found = explain(Launch.of(config, layout, schedule=chosen.schedule, extra=chosen.options), name=which)
    assert different(found) == {}
    assert "user" not in {setting.origin for setting in found.settings}
    other = explain(Launch.of(config, layout, schedule=TrainingSchedule(seq_length=4352)), name=which)
    assert {"--seq-length", "--lr"} <= set(different(other))


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["super", "--tp", "8", "--ep", "8", "--dp", "2", "--schedule", "published"]
    assert cli.main(["explain", *words, "--json", "--", "--lr", "1e-4"]) == 0
    described = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in described["settings"]}
    assert (
        rows["--lr"]["differs"]
        and rows["--lr"]["published"] == "0.00045"
        and rows["--lr"]["origin"] == "user"
    )
    assert cli.main(["flags", *words, "--", "--lr", "1e-4"]) == 0
    printed = [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines() if line[0] == "-"]
    assert printed == [name for name, row in rows.items() if row["passed"] and name[0] == "-"]

    script = tmp_path / "launch.sh"
    script.write_text(SCRIPT)
    assert cli.main(["explain", "super", "--argv", str(script)]) == 0
    assert "config.num_moe_experts 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--argv", "x.sh", "--tp", "2"], "drop --tp"),
        (["--argv", "x.sh", "--", "--lr", "1"], "drop --lr 1"),
        (["--argv", "/no/such.sh"], "/no/such.sh"),
        (["--tp", "16"], "mamba_num_groups=8"),
        (["--argv", sys.executable], "not a text file"),
    ],
)
def test_bad_input(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "super", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""


def test_all_needs_megatron(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    assert cli.main(["explain", "super", "--tiny", "--all"]) == 2
    assert "--all asks the installed Megatron" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")
def test_defaults_and_names_are_megatrons() -> None:
    """In a process of its own: the parser's modules change the environment."""
    code = (
        "import json; from megatron_nemotron3 import cli;"
        "from megatron_nemotron3.launch.explain import installed_options; _, actions = installed_options();"
        "rows = {o: [a.default, a.nargs == 0] for a in actions for o in a.option_strings};"
        "cli.main(['explain', 'super', '--tiny', '--all', '--json']);"
        "print(json.dumps(rows, default=str))"
    )
    done = run_python(["-c", code], Path.cwd(), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-2000:]
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    parser = json.loads(last)
    rows = {name: row for config in LAUNCHES for name, row in reference(models.get(config)).items()}
    assert {*rows, *WHY} <= set(parser)
    # What is not in the table has no default: none, or a switch that is off.
    derived = {"--kv-channels", "--moe-ffn-hidden-size", "--expert-tensor-parallel-size"}
    refining = {"--fp4-recipe", "--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"}
    refining |= {"--moe-flex-dispatcher-backend"}
    for name in {name for name, row in rows.items() if row.required} - refining:
        value, switch = parser[name]
        if name in derived:
            assert value is None
        else:
            assert default(name, {}) == (None if switch or value is None else str(value)), name
    options = {"--first-last-layers-bf16": (), "--fp4-format": ("e2m1",)}
    options["--moe-token-dispatcher-type"] = ("flex",)
    for name in refining:
        assert default(name, options) == str(parser[name][0]) and default(name, {}) is None

    everything = [row for row in json.loads(printed)["settings"] if row["field"].startswith("megatron-core")]
    ours = {flag.name for flag in flags(Launch.of(models.get("super-tiny")))}
    assert len(everything) > 600 and not ours & {row["name"] for row in everything}
