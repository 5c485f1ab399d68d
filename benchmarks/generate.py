"""Tokens a second: transformers' `generate`, our plain decoding, and decoding with MTP drafts, in turn.

    OMP_NUM_THREADS=2 python benchmarks/generate.py [--run runs/demo] [--context 512] [--new 128] [--rounds 3]

Greedy, batch 1, FP32. Without --run the family's proportions at hidden size 256 with random weights:
transformers and plain, and how many of their tokens are equal; random MTP heads draft nothing useful. With
--run what `nemotron3 train --output DIR` trained: continuations of Python sources, plain and with 1 to 7
drafts. Decoding only, without the prompt's pass; the median of the rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import machine, model, print_table, set_threads

from megatron_nemotron3.generate.engine import Engine
from megatron_nemotron3.generate.generate import GenerationOptions, generate
from megatron_nemotron3.models import Nemotron3Config
from tests.support.engines import engine_of, tensors

DRAFTS = (1, 2, 3, 5, 7)
#: A run's prompts: Python's own sources, which `nemotron3 train` trains on.
SOURCES = ("argparse.py", "tarfile.py", "typing.py", "asyncio/base_events.py")


def theirs(config: Nemotron3Config, prompt: Sequence[int], new: int) -> Callable[[], tuple[float, list[int]]]:
    """transformers' model with the weights of `engine_of`, and its clock of decoding."""
    import transformers
    from transformers.generation.streamers import BaseStreamer

    from tests.generate.test_against_transformers import stacked
    from tests.support.parity import transformers_config

    class Clock(BaseStreamer):
        """When each token came; the prompt comes first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    # Attention and experts as transformers chooses them.
    reference = transformers.NemotronHForCausalLM(transformers_config(config)).eval()
    reference.load_state_dict(stacked(tensors(config)))
    for module in reference.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)  # it clamps at time_step_min; the family does not
    ids = torch.tensor([list(prompt)])

    def run() -> tuple[float, list[int]]:
        clock = Clock()
        with torch.inference_mode():
            out = reference.generate(
                ids,
                max_new_tokens=new,
                do_sample=False,
                use_cache=True,
                eos_token_id=None,
                pad_token_id=0,
                streamer=clock,
            )
        # times: prompt, first token (the prompt's pass), the others.
        return (new - 1) / (clock.times[-1] - clock.times[1]), out[0, len(prompt) :].tolist()

    return run


def plain(engine: Engine, prompt: Sequence[int], new: int) -> Callable[[], tuple[float, list[int]]]:
    """Ours, a token a pass."""

    def run() -> tuple[float, list[int]]:
        result = generate(engine, [prompt], GenerationOptions(new))
        return result.tokens_per_second, result.rows[0].tokens

    return run


def in_turn(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Every side once a round, after one round that does not count."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, run in sides.items():
            result = run()
            if number:
                found[name].append(result)
    return found


def random_weights(context: int, new: int, rounds: int) -> None:
    """Against transformers."""
    config = replace(model(), mtp_pattern=None, mtp_num_layers=0)
    engine = engine_of(config)
    prompt = torch.randint(config.vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    sides = {"transformers": theirs(config, prompt, new), "plain": plain(engine, prompt, new)}
    found = in_turn(sides, rounds)
    same = sum(a == b for a, b in zip(found["plain"][0][1], found["transformers"][0][1], strict=True))
    print(f"{config.title}, context {context}: {same} of {new} tokens equal")
    base = statistics.median(speed for speed, _ in found["transformers"])
    rows = []
    for name, results in found.items():
        speed = statistics.median(speed for speed, _ in results)
        rows.append([name, f"{speed:.1f}", f"{speed / base:.2f}"])
    print_table(["side", "tokens/s", "of transformers"], rows)


def trained(run: Path, context: int, new: int, rounds: int) -> None:
    """Plain against drafts, on what the model was trained for."""
    import argparse as stdlib

    from megatron_nemotron3.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.generate.command import open_for_tokenizer
    from megatron_nemotron3.generate.weights import read_weights

    folder = find_checkpoint(run)
    tokenizer = folder.tokenizer()
    opened = open_for_tokenizer(folder, tokenizer, None)
    engine = Engine(read_weights(opened.hf_view(), opened.config), max_context=context + new)
    library = Path(stdlib.__file__).parent
    texts = [(library / name).read_text(encoding="utf-8")[5000:] for name in SOURCES]
    prompts = [tokenizer.encode(text)[:context] for text in texts]

    def side(draft: int) -> Callable[[], Any]:
        return lambda: [generate(engine, [prompt], GenerationOptions(new, draft=draft)) for prompt in prompts]

    found = in_turn({str(draft): side(draft) for draft in (0, *DRAFTS)}, rounds)
    print(f"{run}: {opened.config.title}, context {context}, {len(prompts)} prompts of {', '.join(SOURCES)}")
    expected = [result.rows[0].tokens for result in found["0"][0]]

    def speed(results: Sequence[Any]) -> float:
        tokens = sum(result.new_tokens - 1 for result in results)
        return tokens / sum(result.decode_seconds for result in results)

    base = statistics.median(speed(results) for results in found["0"])
    rows = []
    for name, rounds_of in found.items():
        last = rounds_of[-1]
        equal = sum(r.rows[0].tokens == want for r, want in zip(last, expected, strict=True))
        tokens = sum(r.speculation.tokens for r in last)
        steps = sum(r.speculation.steps for r in last)
        rate = statistics.median(speed(results) for results in rounds_of)
        rows.append(
            [name, f"{tokens / steps:.2f}", f"{rate:.1f}", f"{rate / base:.2f}", f"{equal} of {len(last)}"]
        )
    print_table(["drafts", "acceptance length", "tokens/s", "of plain", "equal to plain"], rows)


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    set_threads()
    print(machine())
    if options.run is None:
        random_weights(options.context, options.new, options.rounds)
    else:
        trained(options.run, options.context, options.new, options.rounds)


if __name__ == "__main__":
    main()
