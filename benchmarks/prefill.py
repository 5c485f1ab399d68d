"""Chunked prefill of a long text: memory and time against its length, and the difference from one pass.

    OMP_NUM_THREADS=2 python benchmarks/prefill.py [--tokens 1048576] [--plot prefill.png]

The model is a tiny hybrid with every layer kind and one narrow attention head, with random weights, on the
CPU. Mamba's state does not grow. The KV cache grows with the text and is allocated at once; the time of
attention grows with the square of the text. "Other memory" is the peak of resident memory since the previous
row, minus that of the process before the prefill and minus the KV cache: activations, and what libraries
allocate once.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from common import MIB, machine, parser, proc_bytes, reset_peak

from megatron_nemotron3.common import plots
from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.decode import DecodeState
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.models import get
from tests.support.engines import engine_of

CHUNK, REPORT = 1024, 16
WHOLE = 16384


def narrow() -> Engine:
    """An engine with every layer kind and few parameters."""
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


def peak() -> int:
    """Peak resident memory since `reset_peak` in bytes."""
    return proc_bytes("self/status")["VmHWM"]


def kv_cache_bytes(state: DecodeState) -> int:
    """Bytes of the KV caches."""
    return sum(layer.cache.nbytes for layer in state.layers.values() if isinstance(layer, KVCache))


def check(engine: Engine, ids: torch.Tensor) -> float:
    """Largest difference of logits between one pass and chunks."""
    one, parts = engine.new_state(), engine.new_state()
    whole = engine.logits(engine.forward(ids[:, :WHOLE], one).hidden[:, -1])
    chunked = engine.prefill(ids[:, :WHOLE], parts, chunk=CHUNK).logits
    return float((whole - chunked).abs().max())


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--tokens", type=int, default=2**20)
    arguments.add_argument("--plot", type=Path)
    options = arguments.parse_args()
    print(machine())
    engine = narrow()
    ids = torch.randint(256, (1, options.tokens), generator=torch.Generator().manual_seed(1))
    reset_peak()
    before, began, curve = peak(), time.perf_counter(), []
    state = engine.new_state(capacity=options.tokens)
    room = kv_cache_bytes(state)
    print("| tokens | seconds | states, KiB | KV cache filled, MiB | other memory, MiB |")
    print("|-|-|-|-|-|")
    every = max(CHUNK, options.tokens // REPORT // CHUNK * CHUNK)
    for start in range(0, options.tokens, CHUNK):
        engine.prefill(ids[:, start : start + CHUNK], state, chunk=CHUNK)
        seen = start + CHUNK
        if seen % every == 0:
            filled = room * seen / options.tokens
            states = state.nbytes - room
            other = peak() - before - room
            reset_peak()
            curve.append((seen, time.perf_counter() - began, filled / MIB, other / MIB))
            print(
                f"| {seen:,} | {curve[-1][1]:.1f} | {states / 1024:.0f} | {filled / MIB:.1f} | "
                f"{other / MIB:.1f} |",
                flush=True,
            )
    print(f"{WHOLE:,} tokens in one pass and in chunks of {CHUNK}: logits differ by {check(engine, ids):.1e}")
    if options.plot:
        plot(curve, options.plot)


def plot(curve: list[tuple[int, float, float, float]], path: Path) -> None:
    """Plot memory against tokens."""
    with plots.picture(path, size=(7, 4), title="Memory while a long text is read") as (_, grid):
        axes = grid[0][0]
        tokens = [point[0] for point in curve]
        axes.plot(tokens, [point[2] for point in curve], label="KV cache")
        axes.plot(tokens, [point[3] for point in curve], label="other memory")
        axes.set(xlabel="tokens read", ylabel="MiB")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend()


if __name__ == "__main__":
    main()
