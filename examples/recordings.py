#!/usr/bin/env python3
"""Record what a trainer and an inference engine compute for the same text, for `nemotron3 bisect`.

    python examples/recordings.py RUN

The trainer is Megatron's model in FP32; the engine is the one of `nemotron3 generate`, in BF16. Writes
trainer.pt, engine.pt, and wrong.pt: of the same engine without the scaling of the routed experts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

import megatron_nemotron3 as n3
from megatron_nemotron3.checkpoints import load_checkpoint
from megatron_nemotron3.inference.generate import Engine, find_checkpoint, load
from megatron_nemotron3.proof.bisect import Recording, sequence, write

TOKENS = 128


def trained(folder: Path, config: n3.Nemotron3Config, ids: torch.Tensor) -> None:
    """Record Megatron's model."""
    with n3.cpu_mode(), torch.no_grad():  # without cpu_mode on a GPU
        from megatron_nemotron3.proof.bisect import Recorder  # it imports Megatron

        model = n3.build_model(config, precision="fp32", backend="torch").eval()
        load_checkpoint(model, folder)
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        with Recorder(model, vocab_size=config.vocab_size, routing=True) as recorder:
            model(ids, positions, None)
        recorder.write("trainer.pt", prompts=[8] * len(ids))


def served(engine: Engine, ids: torch.Tensor) -> Recording:
    """Record the engine from plain lists, as other engines return them."""
    logits = engine.logits(engine.forward(ids, engine.new_state(len(ids))).hidden)
    values = logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    rows = zip(ids.tolist(), values.tolist())
    sequences = [sequence(row, [None, *found], prompt=8) for row, found in rows]
    return Recording("nemotron3 generate", "bfloat16", sequences)


def main(run: Path) -> None:
    """Write three files into the current folder."""
    found = find_checkpoint(run)
    config = found.open(None).config
    readme = Path(__file__).resolve().parents[1] / "README.md"  # elsewhere there is this script
    text = (readme if readme.exists() else Path(__file__)).read_text()
    encoded = found.tokenizer().encode(text)[: 2 * TOKENS]
    ids = torch.tensor(encoded).view(2, TOKENS)
    trained(found.checkpoint, config, ids)
    model = load(found.checkpoint, dtype=torch.bfloat16)
    write("engine.pt", served(Engine(model), ids))
    scale = config.moe_router_topk_scaling_factor or 1.0
    wrong = model.but(probabilities=lambda original, *arguments: original(*arguments) / scale)
    write("wrong.pt", served(Engine(wrong), ids))
    print(f"trainer.pt, engine.pt, wrong.pt: 2 sequences of {TOKENS} tokens, the first 8 not scored")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/recordings.py RUN (make demo trains one in runs/demo)")
    try:
        main(Path(sys.argv[1]))
    except ValueError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
