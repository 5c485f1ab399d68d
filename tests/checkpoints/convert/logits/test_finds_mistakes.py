"""A wrong conversion fails, and the report names the layer of the mistake and no later one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.logits.compare import LogitsCheckOptions, check_logits
from megatron_nemotron3.checkpoints.convert.logits.report import LogitsReport
from megatron_nemotron3.models import get
from tests.support.checkpoint_pair import InMemory, Pair, pair
from tests.support.world import world_of_one

pytest.importorskip("transformers")

#: Experts are square, so that a transposed expert has a valid shape.
CONFIG = get("super-tiny").but(
    name="mistakes",
    pattern="M-M*E",
    vocab_size=300,
    dense_ffn_hidden_size=128,
    num_moe_experts=8,
    moe_router_topk=3,
    moe_ffn_hidden_size=32,
    moe_latent_size=32,
)
TOKENS = 140
QUIET = LogitsCheckOptions(TOKENS, echo=lambda line: None)


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with world_of_one():
        yield pair(CONFIG, tmp_path_factory.mktemp("hf"), seed=3, padded=4)


def run(
    right: Pair, change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None, **fields: Any
) -> LogitsReport:
    """Check the pair with some of Hugging Face's tensors changed."""
    hf = dict(right.hf.content)
    change(hf)
    config = right.config.but(**fields)
    return check_logits(right.megatron, InMemory(hf, right.hf.folder), config, QUIET)


def swap(a: str, b: str) -> Callable[[dict[str, Tensor]], None]:
    def change(hf: dict[str, Tensor]) -> None:
        hf[a], hf[b] = hf[b], hf[a]

    return change


def rows(name: str, make: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(hf: dict[str, Tensor]) -> None:
        hf[name] = make(hf[name]).contiguous()

    return change


def exchange_bc(weight: Tensor) -> Tensor:
    inner, bc = CONFIG.mamba_inner_size, CONFIG.mamba_num_groups * CONFIG.mamba_state_dim
    z, x, b, c, dt = weight.split([inner, inner, bc, bc, CONFIG.mamba_num_heads])
    return torch.cat([z, x, c, b, dt])


def contiguous_qkv(hf: dict[str, Tensor]) -> None:
    """Megatron's interleaved groups read as [q, k, v], as a converter without the group rule does."""
    names = [f"backbone.layers.3.mixer.{p}_proj.weight" for p in "qkv"]
    q, k, v = (hf[n].unflatten(0, (CONFIG.num_query_groups, -1)) for n in names)
    packed = torch.cat([q, k, v], 1).flatten(0, 1)
    for name, part in zip(names, packed.split([hf[n].shape[0] for n in names])):
        hf[name] = part.contiguous()


X, E = "backbone.layers.3.mixer.", "backbone.layers.4.mixer."
LAYER = "decoder.layers.{n} and backbone.layers.{n} ({kind})"
#: Mistake -> the change, and what the report names.
MISTAKES: dict[str, tuple[Callable[[dict[str, Tensor]], None], list[str]]] = {
    "k and v swapped": (swap(X + "k_proj.weight", X + "v_proj.weight"), [LAYER.format(n=3, kind="*")]),
    "qkv not by group": (contiguous_qkv, [LAYER.format(n=3, kind="*")]),
    "expert transposed": (rows(E + "experts.5.up_proj.weight", torch.t), [LAYER.format(n=4, kind="E")]),
    "expert bias in BF16": (
        rows(E + "gate.e_score_correction_bias", lambda b: b.bfloat16().float()),
        [LAYER.format(n=4, kind="E")],
    ),
    "B and C swapped": (
        rows("backbone.layers.0.mixer.in_proj.weight", exchange_bc),
        [LAYER.format(n=0, kind="M")],
    ),
    "conv taps reversed": (
        rows("backbone.layers.2.mixer.conv1d.weight", lambda w: w.flip(-1)),
        [LAYER.format(n=2, kind="M")],
    ),
    "norm of another layer": (
        swap("backbone.layers.1.norm.weight", "backbone.layers.2.norm.weight"),
        [LAYER.format(n=1, kind="-"), LAYER.format(n=2, kind="M")],
    ),
    "vocabulary shifted by a row": (
        rows("backbone.embeddings.weight", lambda w: w.roll(1, 0)),
        ["embedding", "mtp.layers.0.eh_proj and mtp.layers.0.eh_proj"],
    ),
    "final norm": (
        rows("backbone.norm_f.weight", lambda w: w + 1),
        ["logits: final norm"],
    ),
    "output layer": (
        rows("lm_head.weight", lambda w: torch.cat([w[1:], w[:1]])),
        ["logits: final norm", "logits of MTP depth 1: final norm"],
    ),
    "halves of eh_proj swapped": (
        rows("mtp.layers.0.eh_proj.weight", lambda w: w.roll(w.shape[1] // 2, 1)),
        ["mtp.layers.0.eh_proj and mtp.layers.0.eh_proj"],
    ),
    "expert of MTP": (
        swap("mtp.layers.1.mixer.experts.0.up_proj.weight", "mtp.layers.1.mixer.experts.3.up_proj.weight"),
        ["mtp.layers.0.mtp_model_layer.layers.1 and mtp.layers.1 (E)"],
    ),
    "NaN": (
        rows("backbone.layers.2.mixer.D", lambda d: d.index_fill(0, torch.tensor([3]), torch.nan)),
        [LAYER.format(n=2, kind="M")],
    ),
}


def test_without_a_mistake(right: Pair) -> None:
    assert run(right).passed


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_layer_is_named(right: Pair, mistake: str) -> None:
    change, named = MISTAKES[mistake]
    report = run(right, change)
    assert not report.passed
    # Logits that differ because of a layer are reported as well; NaN affects everything after it.
    blamed = [p for p in report.problems if "they differ by" not in p]
    blamed = blamed[: len(named)] if mistake == "NaN" else blamed
    assert len(blamed) == len(named), report.problems
    assert all(found.startswith(start) for found, start in zip(blamed, named)), report.problems
    assert report.lines()[-1].startswith("FAILED ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda hf: hf.pop(X + "k_proj.weight"),
            r"Hugging Face: no tensor backbone\.layers\.3\.mixer\.k_proj",
        ),
        (
            lambda hf: hf.update({"lm_head.weight": torch.randn(304, 128)}),
            r"Hugging Face: lm_head\.weight has shape \[304, 128\], its config asks for \[300, 128\]",
        ),
        (
            lambda hf: hf.update({E + "experts.0.up_proj.weight": torch.randn(32, 31)}),
            r"experts\.0\.up_proj\.weight has shape \[32, 31\], its config asks for \[32, 32\]",
        ),
        (
            lambda hf: hf.update({X + "o_proj.weight": hf[X + "o_proj.weight"].to(torch.float8_e4m3fn)}),
            r"o_proj\.weight is float8_e4m3fn; weights are read as bfloat16",
        ),
    ],
    ids=["missing", "vocabulary not stripped", "shape", "type"],
)
def test_what_cannot_be_read(right: Pair, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(right, change)


def test_a_megatron_tensor_is_missing(right: Pair) -> None:
    rest = {n: t for n, t in right.megatron.content.items() if "linear_proj" not in n}
    with pytest.raises(
        ValueError, match=r"Megatron: no tensor decoder\.layers\.3\.self_attention\.linear_proj"
    ):
        check_logits(
            InMemory(rest, right.hf.folder),
            right.hf,
            right.config,
            QUIET,
        )


def test_a_config_that_says_something_else(right: Pair) -> None:
    with pytest.raises(ValueError, match="not the model mistakes: moe_router_topk=3"):
        run(right, moe_router_topk=2)


def test_config_json_is_part_of_the_proof(right: Pair, tmp_path: Path) -> None:
    """transformers builds its side only from config.json, so errors in it are found."""
    data = json.loads((right.hf.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(data | {"routed_scaling_factor": 1.0}))
    with pytest.raises(ValueError, match="moe_router_topk_scaling_factor=1.0"):
        check_logits(
            right.megatron, InMemory(right.hf.content, tmp_path), right.config, LogitsCheckOptions(TOKENS)
        )
    (tmp_path / "config.json").write_text(json.dumps(data | {"chunk_size": 128, "time_step_min": "small"}))
    with pytest.raises(ValueError, match=r"config\.json: transformers cannot read it: .*time_step_min"):
        check_logits(
            right.megatron, InMemory(right.hf.content, tmp_path), right.config, LogitsCheckOptions(TOKENS)
        )
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        check_logits(
            right.megatron, InMemory(right.hf.content, tmp_path), right.config, LogitsCheckOptions(TOKENS)
        )


def test_too_few_tokens(right: Pair) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="2 tokens are too few: use at least 3"):
        check_logits(right.megatron, right.hf, right.config, LogitsCheckOptions(2, echo=lines.append))
    assert check_logits(
        right.megatron, right.hf, right.config, LogitsCheckOptions(3, echo=lines.append)
    ).passed
    assert "3 tokens stay within the first chunk of 128" in lines[1]
