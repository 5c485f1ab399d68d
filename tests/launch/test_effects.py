"""The effect of every option on this stack: the table is whole, and agrees with megatron-core's source."""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import Launch, check, effects, flags, parser, published
from tests.launch.make_options import with_effect

#: Files that read every option to check it, print it, or hand it to a config.
_READ_ALL = (
    *("training/arguments.py", "training/argument_utils.py", "training/yaml_arguments.py"),
    *("training/checkpointing.py", "training/config/", "training/theoretical_memory_usage.py"),
    *("training/models/", "core/transformer/transformer_config.py", "core/model_parallel_config.py"),
)
#: Option -> the argument that it sets, where the names differ otherwise than by "no-" or "disable-".
_ARGUMENTS = {
    "bert-no-binary-head": "bert_binary_head",
    "use-same-sampling-seed-across-dp-ranks": "offset_sampling_seed_by_dp_rank",
}
#: Arguments whose names are used for other things, too: those of functions, files and classes.
_COMMON = {"img_h", "img_w", "patch_dim", "sample_rate", "refit_method", "enable_chunked_prefill"}


@cache
def _readers() -> dict[str, set[str]]:
    """Attribute or quoted name -> the files of the installed Megatron that have it."""
    found = defaultdict(set)
    spec = find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    root = Path(next(iter(spec.submodule_search_locations)))
    for path in [*root.glob("core/**/*.py"), *root.glob("training/**/*.py")]:
        code = re.sub(r"^\s*#.*$", "", path.read_text(encoding="utf-8"), flags=re.M)
        for name in set(re.findall(r"(?:\.|['\"])([a-z]\w+)", code)):
            found[name].add(str(path.relative_to(root)))
    return found


def _argument(name: str) -> str:
    argument = _ARGUMENTS.get(name, name.replace("-", "_"))
    return argument if argument in _readers() else re.sub("^(no|disable)_", "", argument)


def test_every_option_has_an_effect() -> None:
    table = parser.table()
    assert {row["effect"] for row in table["options"].values()} == set(table["effects"])
    kinds = {row["effect"] for row in table["effects"].values()}
    assert kinds == {*effects.SEVERITY, "works", "ruled", "unknown"}
    for row in table["effects"].values():
        assert (row["effect"] in effects.SEVERITY) == all(
            row.get(key) for key in ("why", "instead", "source")
        )
        assert row["effect"] != "unknown" or row["why"]


@pytest.mark.parametrize(
    "name", [name for name, row in parser.table()["effects"].items() if "readers" in row], ids=str
)
def test_only_other_parts_read_it(name: str) -> None:
    """The files that read such an option are those that its row names.

    This stack does not run them, or they count operations and write logs there; that it trains the same with
    all such options is in tests/properties/evidence.py.
    """
    row = parser.table()["effects"][name]
    allowed = (*row["readers"], *_READ_ALL)
    options = [n for n in with_effect(row["effect"]) if parser.table()["options"][n]["effect"] == name]
    assert options
    for option in options:
        others = {file for file in _readers()[_argument(option)] if not file.startswith(allowed)}
        assert _argument(option) in _COMMON or not others, (option, others)


def test_options_with_a_rule_of_their_own() -> None:
    rules = "".join(path.read_text() for path in Path(effects.__file__).parent.glob("rules_*.py"))
    for name in with_effect("ruled"):
        assert f'"--{name}"' in rules or f'"{name}"' in rules, name


def _said(*extra: str, backend: str = "te") -> list[tuple[str, str]]:
    found = check(Launch.of(models.get("nano"), extra=extra, backend=backend))
    return [(violation.rule, str(violation)) for violation in found]


def test_values_backends_and_other_options_decide() -> None:
    assert _said("--optimizer", "adam") == []
    ((rule, text),) = _said("--optimizer", "muon", "--muon-num-ns-steps", "7")
    assert rule == "option-layout" and text.startswith("note: --optimizer muon: ")
    assert _said("--optimizer", "muon", "--muon-tp-mode", "distributed") == []
    assert _said("--moe-apply-probs-on-input") == []
    assert [rule for rule, _ in _said("--moe-apply-probs-on-input", backend="torch")] == ["option-refused"]
    assert _said("--eod-mask-loss", "--calculate-per-token-loss") == []
    assert _said("--moe-layer-freq", "1", "--kv-lora-rank", "32", "--glu-linear-offset", "0") == []
    assert "option-refused" in dict(_said("--norm-epsilon", "1e-6"))
    assert _said("--export-real-quant-cfg", "None") == []
    for words in (
        ["--modelopt-enabled"],
        ["--export-quant-cfg", "x"],
        ["--export-real-quant-cfg", "fp8_real_quant"],
    ):
        assert [rule for rule, _ in _said(*words)] == ["option-refused"]
    assert [rule for rule, _ in _said("--finetune-hf-dataset", "x")] == ["option-unused"]


@pytest.mark.parametrize("backend", ["te", "torch"])
def test_silent_on_our_own_options(backend: str) -> None:
    for name in models.names():
        launch = Launch.of(name, backend=backend, schedule=published(models.get(name)))
        emitted = {flag.name: flag.values for flag in flags(launch)}
        assert not [said for kind in effects.SEVERITY for said in effects.sentences(kind, emitted, backend)]
