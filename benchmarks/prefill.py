"""A long text read in chunks: memory and time as it grows, and whether the result is the unchunked one.

    OMP_NUM_THREADS=2 python benchmarks/prefill.py [--tokens 1048576] [--plot prefill.png]

A tiny hybrid with every layer kind and one narrow attention head, random weights, on the CPU. Mamba's state
does not grow; keys and values grow with the text, their room is allocated at once, and attention's time grows
with its square. "Beyond" is the most resident memory since the line above, less what the process had before
it read anything and less that room: activations, and what libraries allocate once.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from common import machine

from megatron_nemotron3.checkpoint.files import save_figure
from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.state import KVCache, State
from megatron_nemotron3.models import get
from tests.support.engines import engine_of

CHUNK, REPORT = 1024, 16
MIB = 2**20
WHOLE = 16384


def narrow() -> Engine:
    """Every layer kind in few numbers."""
    config = get("super-tiny").but(
        name="long",
        pattern="MEM*ME",
        hidden_size=64,
        vocab_size=256,
        num_attention_heads=1,
        num_query_groups=1,
        kv_channels=8,
        mamba_num_heads=4,
        mamba_num_groups=1,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_shared_expert_intermediate_size=32,
        moe_latent_size=16,
        mtp_pattern=None,
        mtp_num_layers=0,
    )
    return engine_of(config)


def forget_peak() -> None:
    """Let the kernel count this process's peak of resident memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Bytes of resident memory at most since `forget_peak`."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def keys_and_values(state: State) -> int:
    """Bytes of attention's caches."""
    return sum(layer.cache.nbytes for layer in state.layers if isinstance(layer, KVCache))


def check(engine: Engine, ids: torch.Tensor) -> float:
    """Largest difference of logits between one pass and chunks."""
    one, parts = engine.new_state(), engine.new_state()
    whole = engine.forward(ids[:, :WHOLE], one, logits="last").logits
    chunked = engine.prefill(ids[:, :WHOLE], parts, chunk=CHUNK).logits
    assert whole is not None and chunked is not None
    return float((whole - chunked).abs().max())


def main() -> None:
    """Print the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    print(machine())
    engine = narrow()
    ids = torch.randint(256, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    forget_peak()
    before, began, curve = peak(), time.perf_counter(), []
    state = engine.new_state(capacity=options.tokens)
    room = keys_and_values(state)
    print("| tokens | seconds | states, KiB | keys and values filled, MiB | beyond, MiB |")
    print("|-|-|-|-|-|")
    every = max(CHUNK, options.tokens // REPORT // CHUNK * CHUNK)
    for start in range(0, options.tokens, CHUNK):
        engine.prefill(ids[:, start : start + CHUNK], state, chunk=CHUNK)
        seen = start + CHUNK
        if seen % every == 0:
            filled = room * seen / options.tokens
            states = state.nbytes - room
            beyond = peak() - before - room
            forget_peak()
            curve.append((seen, time.perf_counter() - began, filled / MIB, beyond / MIB))
            print(
                f"| {seen:,} | {curve[-1][1]:.1f} | {states / 1024:.0f} | {filled / MIB:.1f} | "
                f"{beyond / MIB:.1f} |",
                flush=True,
            )
    print(f"{WHOLE:,} tokens in one pass and in chunks of {CHUNK}: logits differ by {check(engine, ids):.1e}")
    if options.plot:
        plot(curve, options.plot)


def plot(curve: list[tuple[int, float, float, float]], path: Path) -> None:
    """Memory over tokens."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    tokens = [point[0] for point in curve]
    axes.plot(tokens, [point[2] for point in curve], label="keys and values")
    axes.plot(tokens, [point[3] for point in curve], label="all else that grew")
    axes.set_xlabel("tokens read")
    axes.set_ylabel("MiB")
    axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    main()
