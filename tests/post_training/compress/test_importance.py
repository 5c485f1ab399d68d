"""Importance is what it is defined to be, and the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.post_training import compress
from megatron_nemotron3.post_training.compress.scores import Scores, statistics
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.post_training.compress.silence import all_logits, build

SUPER, DENSE = tiny(get("super")), tiny(get("nano-4b"))
#: 8 windows of 64 tokens.
TEXT = torch.randint(0, 2048, (8, 65), generator=torch.Generator().manual_seed(3))


def write(folder: Path, config: Nemotron3Config) -> None:
    """A checkpoint with random weights."""
    compress.save(build(config), config, folder)


def measured(folder: Path, layout: ParallelLayout) -> tuple[Scores, float]:
    """Measure a checkpoint on the ranks of a layout."""
    from megatron_nemotron3.checkpoints.convert.checkpoints import open_checkpoint
    from megatron_nemotron3.post_training.compress.importance import calibrate

    opened = open_checkpoint(folder)
    launch = Launch.of(opened.config.but(seq_length=64), layout=layout, precision="fp32", backend="torch")
    return calibrate(opened, launch, TEXT, "cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Scores, float]:
    """A checkpoint of the tiny Super, its scores in one process, and the loss."""
    folder = tmp_path_factory.mktemp("importance") / "super"
    run_distributed(write, 1, folder, SUPER)
    ((scores, loss),) = run_distributed(measured, 1, folder, ParallelLayout())
    return folder, scores, loss


def test_weights_of_a_tokens_experts(checkpoint: tuple[Path, Scores, float]) -> None:
    """In the decoder and in MTP: from the first expert to the last, and together the scaling factor."""
    _, scores, _ = checkpoint
    found = [value for key, value in scores.values.items() if key.endswith(" ranks")]
    assert len(found) == SUPER.full_pattern.partition("/")[0].count("E") + 1
    for ranks in found:
        assert ranks.shape == (SUPER.moe_router_topk,) and (numpy.diff(ranks) < 0).all()
        assert ranks.sum() == pytest.approx(SUPER.moe_router_topk_scaling_factor, rel=1e-5)


LAYOUTS = [
    ParallelLayout(tp=2, ep=2),
    pytest.param(ParallelLayout(pp=2), marks=pytest.mark.full),
    pytest.param(ParallelLayout(tp=2, pp=2, ep=2), marks=pytest.mark.full),
    pytest.param(ParallelLayout(dp=2, ep=2), marks=pytest.mark.full),
    pytest.param(ParallelLayout(tp=2, etp=2), marks=pytest.mark.full),
    # More ranks than KV groups.
    pytest.param(ParallelLayout(tp=4, ep=2), marks=pytest.mark.full),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_any_layout(checkpoint: tuple[Path, Scores, float], layout: ParallelLayout) -> None:
    """Every rank has the scores of one process."""
    folder, expected, loss = checkpoint
    for scores, found in run_distributed(measured, layout.world_size, folder, layout):
        assert scores.tokens == expected.tokens == 8 * 64
        assert found == pytest.approx(loss, rel=1e-6)
        for key, *_ in statistics(SUPER):
            numpy.testing.assert_allclose(
                scores.values[key], expected.values[key], rtol=2e-5, atol=1e-6, err_msg=key
            )


def by_definition() -> dict[str, tuple[Any, Any]]:
    """Entries of the first layer of each kind, and their definitions from what the modules returned."""
    from megatron_nemotron3.post_training.compress.importance import measure

    config = SUPER
    model = build(config)
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, module: torch.nn.Module) -> None:
        def hook(_m: Any, args: Any, kwargs: Any, output: Any) -> None:
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            seen.setdefault(f"{name} in", []).append(before.flatten(0, -2))
            seen.setdefault(f"{name} out", []).append(after.flatten(0, -2))

        module.register_forward_hook(hook, with_kwargs=True)

    first, moe = model.decoder.layers[0], model.decoder.layers[1].mlp
    attention = model.decoder.layers[3].self_attention
    keep("layer", first)
    keep("in_proj", first.mixer.in_proj)
    keep("attention", attention.linear_proj)
    keep("latent", moe.fc1_latent_proj)
    keep("norm", model.decoder.layers[1].pre_mlp_layernorm)
    keep("shared", moe.shared_experts.linear_fc2)
    keep("mtp", model.mtp.layers[0].mtp_model_layer.layers[0].self_attention.linear_proj)
    scores = measure(model, config, lambda: [all_logits(model, seed) for seed in (1, 2)]).values
    of = {name: torch.cat(parts) for name, parts in seen.items()}

    def rms(x: torch.Tensor) -> torch.Tensor:
        return x.double().square().mean(0).sqrt()

    layer = "decoder.layers."
    routed = moe.router.weight  # only to name the layer's experts below
    cosine = torch.cosine_similarity(of["layer in"].double(), of["layer out"].double(), dim=-1)
    inputs = of["in_proj in"]
    normed = inputs * torch.rsqrt(inputs.square().mean(-1, keepdim=True) + 1e-5)
    assert routed.shape[0] == 32
    return {
        "distance": (scores[f"{layer}0. distance"], (1 - cosine).mean()),
        "normed": (scores[f"{layer}0. normed"], rms(normed * first.mixer.in_proj.layer_norm_weight)),
        "normed of experts": (scores[f"{layer}1. normed"], rms(of["norm out"])),
        "x": (scores[f"{layer}0. x"], rms(of["in_proj out"][:, 256:512]).reshape(16, 16)),
        "heads": (scores[f"{layer}3. heads"], rms(of["attention in"]).reshape(8, 32)),
        "latent": (scores[f"{layer}1. latent_in"], rms(of["latent out"])),
        "shared": (scores[f"{layer}1. shared"], rms(of["shared in"])),
        # Both depths run the block, and tokens are counted once.
        "mtp": (
            scores["mtp.layers.0.mtp_model_layer.layers.0. heads"],
            rms(of["mtp in"]).reshape(8, 32) * 2**0.5,
        ),
    }


def test_definition() -> None:
    (entries,) = run_distributed(by_definition, 1)
    for name, (found, defined) in entries.items():
        numpy.testing.assert_allclose(found, defined.detach().numpy(), rtol=1e-5, err_msg=name)


def experts_by_definition() -> list[tuple[Any, Any]]:
    """The experts' entries, and what a loop over tokens and experts gives."""
    from megatron_nemotron3.post_training.compress.importance import measure

    model = build(SUPER.but(pattern="E", mtp_pattern=None, mtp_num_layers=0))
    moe, config = model.decoder.layers[0].mlp, SUPER.but(pattern="E", mtp_pattern=None, mtp_num_layers=0)
    seen: list[Any] = []
    moe.router.register_forward_hook(lambda _m, _i, output: seen.append(output))
    moe.fc1_latent_proj.register_forward_hook(lambda _m, _i, output: seen.append(output[0]))
    scores = measure(model, config, lambda: all_logits(model, 1)).values
    (probs, chosen), latent = sorted(seen, key=lambda one: isinstance(one, torch.Tensor))
    x = latent.detach().flatten(0, -2).double()
    experts, channels = [], []
    for e in range(32):
        up, down = (
            getattr(linear, f"weight{e}").detach().double()
            for linear in (moe.experts.linear_fc1, moe.experts.linear_fc2)
        )
        mine = x[chosen[:, e]]
        hidden = (mine @ up.T).relu().square() * probs[chosen[:, e], e].detach().double()[:, None]
        channels.append((hidden.square().sum(0) / len(x)).sqrt())
        experts.append((hidden @ down.T).norm(dim=-1).sum() / max(1, len(mine)))
    name = "decoder.layers.0."
    return [
        (scores[f"{name} experts"], torch.stack(experts)),
        (scores[f"{name} ffn"], torch.stack(channels)),
    ]


def test_definition_of_experts() -> None:
    (entries,) = run_distributed(experts_by_definition, 1)
    for found, defined in entries:
        assert found.any()
        numpy.testing.assert_allclose(found, defined.numpy(), rtol=1e-4, atol=1e-9)


def silent_first(name: str) -> float:
    """Silence parts, measure, prune as many, and compare logits."""
    from megatron_nemotron3.post_training.compress.importance import measure

    blocks = SUPER.but(mtp_use_repeated_layer=False)
    config = {"super": SUPER, "nano-4b": DENSE, "two blocks": blocks}[name]
    model = build(config)
    with torch.no_grad():
        layers = [*model.decoder.layers]
        for block in model.mtp.layers if config.has_mtp else ():
            layers += block.mtp_model_layer.layers
        for number, layer in enumerate(layers):
            if hasattr(layer, "mixer"):  # a Mamba head of each group
                heads = torch.tensor([2 * group + (group + number) % 2 for group in range(8)])
                rows = (heads[:, None] * 16 + torch.arange(16)).flatten()
                layer.mixer.in_proj.weight[256 + rows] = 0
                layer.mixer.conv1d_bias[rows] = 0
            elif hasattr(layer.mlp, "router"):
                layer.mlp.router.expert_bias[(torch.arange(32) + number) % 4 == 0] = -10.0
                layer.mlp.shared_experts.linear_fc1.weight[(torch.arange(192) + number) % 3 == 0] = 0
                for e in range(32):  # other channels in each expert
                    fc1 = getattr(layer.mlp.experts.linear_fc1, f"weight{e}")
                    fc1[(torch.arange(96) + number + e) % 3 == 0] = 0
            elif hasattr(layer.mlp, "linear_fc1"):
                layer.mlp.linear_fc1.weight[(torch.arange(512) + number) % 4 == 0] = 0
            else:  # a KV group: its values
                width = layer.self_attention.linear_qkv.weight.shape[0] // 2
                group = number % 2
                layer.self_attention.linear_qkv.weight[(group + 1) * width - 32 : (group + 1) * width] = 0
    scores = measure(model, config, lambda: all_logits(model, 1))
    sizes: dict[str, Any] = {"mamba_num_heads": 8, "num_query_groups": 1}
    if config.is_moe:
        sizes |= {
            "num_moe_experts": 24,
            "moe_ffn_hidden_size": 64,
            "moe_shared_expert_intermediate_size": 128,
        }
    else:
        sizes["dense_ffn_hidden_size"] = 384
    pruned, weights = compress.prune(model, scores, sizes)
    for key, t in weights.items():
        if key.endswith("mixer.norm.weight"):  # silent heads count in the norm's mean
            t.mul_(2**0.5)
    student = build(pruned)
    compress.load(student, weights)
    pairs = zip(all_logits(model), all_logits(student), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize(
    "name", ["super", *(pytest.param(n, marks=pytest.mark.full) for n in ("two blocks", "nano-4b"))]
)
def test_what_is_silent_goes_first(name: str) -> None:
    """Which parts are silent differs by layer, and by expert; MTP is pruned with the decoder."""
    assert run_distributed(silent_first, 1, name)[0] < 1e-4


def test_scores_are_kept(tmp_path: Path, checkpoint: tuple[Path, Scores, float]) -> None:
    scores, file = checkpoint[1], tmp_path / "scores.safetensors"
    scores.save(file)
    again = Scores.load(file, SUPER)
    assert (again.tokens, again.digest()) == (scores.tokens, scores.digest())
    with pytest.raises(ValueError, match="not those of nano-4b-tiny: .* measure again"):
        Scores.load(file, DENSE)
    data = file.read_bytes()
    nan = data[:-4] + b"\0\0\xc0\x7f"
    for bad in (b"", b"nonsense", data[: len(data) // 2], data[:100] + bytes(100) + data[200:], nan):
        file.write_bytes(bad)
        with pytest.raises(ValueError, match="scores.safetensors"):
            Scores.load(file, SUPER)
