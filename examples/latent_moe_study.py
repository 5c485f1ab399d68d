"""LatentMoE at CPU scale: baseline against "eff" and "acc" (arXiv 2601.18089), paired seeds, real text.

    python examples/latent_moe_study.py [--steps 250] [--seeds 5] [--output runs/latent_moe_study]

The three models differ only in their experts. With alpha = hidden size / latent size = 4:

    baseline   N experts, top-K, width d
    eff        alpha N experts, top-K, latent width d / alpha: routed FLOPs and all-to-all bytes / alpha
    acc        alpha N experts, top-alpha K, latent width d / alpha: both as the baseline's

All see the same text in the same order with the same schedule; a seed is one triple of runs, so differences
are paired. A finished run is a line of results.jsonl and is not computed again. Minutes on one core show that
the code works and how large the noise is, not what holds at scale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this checkout, if the package is not installed
if not (HERE / "tiny_runs.py").exists():
    sys.exit(f"{__file__}: tiny_runs.py is not beside it: copy the whole folder examples/")

from tiny_runs import VALIDATION, Text, build, evaluate, kept, on_text, train

import megatron_nemotron3 as n3
from megatron_nemotron3.common import Interval, interval, paired
from megatron_nemotron3.models import Nemotron3Config, count, get, tiny

ALPHA = 4
BASE = tiny(get("nano")).but(
    name="baseline-tiny",
    pattern="MEME*EME",
    num_moe_experts=16,
    moe_router_topk=2,
    moe_ffn_hidden_size=96,
    seq_length=128,
)
RATE = 4e-3
LATENT = {"num_moe_experts": ALPHA * 16, "moe_latent_size": BASE.hidden_size // ALPHA}
VARIANTS = {
    "baseline": BASE,
    "eff": BASE.but(name="eff-tiny", **LATENT),
    "acc": BASE.but(name="acc-tiny", moe_router_topk=ALPHA * 2, **LATENT),
}


def routed_flops(config: Nemotron3Config) -> int:
    """Forward FLOPs of a token in the routed experts of one layer, including the latent projections."""
    assert config.moe_router_topk is not None and config.moe_ffn_hidden_size is not None
    experts = config.moe_router_topk * 2 * config.expert_input_size * config.moe_ffn_hidden_size
    projections = 2 * config.hidden_size * config.moe_latent_size if config.moe_latent_size else 0
    return 2 * (experts + projections)


def all_to_all_bytes(config: Nemotron3Config) -> int:
    """BF16 bytes of a token in one layer's dispatch and combine, forward and backward, no expert local."""
    assert config.moe_router_topk is not None
    return 2 * 2 * config.moe_router_topk * config.expert_input_size * 2


def loss_of(name: str, seed: int, steps: int, text: Text) -> float:
    """Validation loss (nats per token) after `steps`."""
    model = build(VARIANTS[name], seed)
    train(model, text.batches("train", steps, seed), RATE, on_text)
    return evaluate(model, text.batches("validation", VALIDATION, seed=0))


def with_p(difference: Interval) -> str:
    """Mean difference, 95 % half-width by Student's t, and p of no difference."""
    return f"{difference:+.4f} (p {difference.p:.3f})"


def main() -> None:
    """Train all variants and print the table."""
    parser = argparse.ArgumentParser(description="LatentMoE at CPU scale, paired seeds.")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("runs/latent_moe_study"))
    options = parser.parse_args()

    text = Text(options.output / "data", BASE)
    with n3.cpu_mode():
        losses = kept(options, VARIANTS, lambda name, seed: loss_of(name, seed, options.steps, text))
    print(f"\n{options.steps} steps, seeds 1..{options.seeds}, validation loss in nats per token\n")
    columns = [
        "experts, top-k, width",
        "loss",
        "minus baseline",
        "routed FLOPs",
        "all-to-all",
        "active",
        "stored",
    ]
    print("| variant | " + " | ".join(columns) + " |\n|-|" + "-|" * len(columns))
    for name, config in VARIANTS.items():
        cells = [
            f"{config.num_moe_experts}, {config.moe_router_topk}, {config.expert_input_size}",
            f"{interval(losses[name]):.4f}",
            "" if name == "baseline" else with_p(paired(losses[name], losses["baseline"])),
            f"{routed_flops(config) / routed_flops(BASE):.2f}x",
            f"{all_to_all_bytes(config) / all_to_all_bytes(BASE):.2f}x",
            f"{count(config).active['without_embeddings']:,}",
            f"{count(config).trainable:,}",
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nacc minus eff: {with_p(paired(losses['acc'], losses['eff']))}")


if __name__ == "__main__":
    main()
