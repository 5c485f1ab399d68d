"""Tokens per second of transformers' `generate`, our plain decoding, and decoding with MTP drafts.

    OMP_NUM_THREADS=2 python benchmarks/generate.py [--context 512] [--new 128] [--rounds 3]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --run runs/demo [--drafts 1 2] [--dtype bfloat16]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --passes 1024 [--dtype bfloat16] [--rounds 30]

Greedy, batch 1. Without --run, in FP32, the family's proportions at hidden size 256 with random weights:
transformers and plain decoding, and how many of their tokens are equal (random MTP heads draft nothing
useful). With --run, the model of `nemotron3 train --output DIR`: continuations of Python sources, plain and
with 1 to 7 drafts. The figures are for decoding only, without the prefill, and are medians of the rounds;
"by CPU time" is what "of plain" is in CPU time of the thread.

With --passes, what drafts cost at that hidden size in the family's proportions: a pass over 1 to 8 tokens,
and a step that drafts 1 to 3 tokens of which all are accepted, in turn. Least CPU time of the thread, which
other processes disturb less than the clock; "pays from" is the acceptance length from which drafts are faster
than plain decoding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import do_not_clamp_time_steps, machine, model, parser, print_table, rounds, set_threads

from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import Decoder, GenerationOptions, generate
from megatron_nemotron3.models import Nemotron3Config
from tests.support.checkpoint_pair import InMemory
from tests.support.engines import agreeing_tensors, engine_of, tensors

DRAFTS = (1, 2, 3, 5, 7)
PASSES = (1, 2, 3, 4, 8)
#: Prompts for --run: Python's own sources, which `nemotron3 train` trains on.
SOURCES = ("argparse.py", "tarfile.py", "typing.py", "asyncio/base_events.py")


def theirs(config: Nemotron3Config, prompt: Sequence[int], new: int) -> Callable[[], tuple[float, list[int]]]:
    """transformers' model with the weights of `engine_of`, as a function that times its decoding."""
    import transformers
    from transformers.generation.streamers import BaseStreamer

    from tests.support.model_mapping import stack_experts, transformers_config

    class Clock(BaseStreamer):
        """Records when each token arrives; the prompt comes first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    # transformers chooses its implementation of attention and experts.
    reference = transformers.NemotronHForCausalLM(transformers_config(config)).eval()
    reference.load_state_dict(stack_experts(tensors(config)))
    do_not_clamp_time_steps(reference)
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
        # times: the prompt, the first token (from the prefill), all other tokens.
        return (new - 1) / (clock.times[-1] - clock.times[1]), out[0, len(prompt) :].tolist()

    return run


def plain(engine: Engine, prompt: Sequence[int], new: int) -> Callable[[], tuple[float, list[int]]]:
    """Our plain decoding."""

    def run() -> tuple[float, list[int]]:
        result = generate(engine, [prompt], GenerationOptions(new))
        return result.tokens_per_second, result.rows[0].tokens

    return run


def random_weights(context: int, new: int, repetitions: int) -> None:
    """Compare with transformers."""
    config = replace(model(), mtp_pattern=None, mtp_num_layers=0)
    engine = engine_of(config)
    prompt = torch.randint(config.vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    sides = {"transformers": theirs(config, prompt, new), "plain": plain(engine, prompt, new)}
    found = dict(zip(sides, rounds(list(sides.values()), repetitions), strict=True))
    same = sum(a == b for a, b in zip(found["plain"][0][1], found["transformers"][0][1], strict=True))
    print(f"{config.title}, context {context}: {same} of {new} tokens equal")
    base = statistics.median(speed for speed, _ in found["transformers"])
    rows = []
    for name, results in found.items():
        speed = statistics.median(speed for speed, _ in results)
        rows.append([name, f"{speed:.1f}", f"{speed / base:.2f}"])
    print_table(["side", "tokens/s", "of transformers"], rows)


def trained(
    run: Path, context: int, new: int, repetitions: int, drafts: Sequence[int], dtype: torch.dtype
) -> None:
    """Compare plain decoding with drafting, on text like that of the training."""
    import argparse as stdlib

    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.inference.generate.command import open_for_tokenizer

    folder = find_checkpoint(run)
    tokenizer = folder.tokenizer()
    opened = open_for_tokenizer(folder, tokenizer, None)
    weights = read_weights(opened.hf_view(), opened.config, dtype=dtype)
    engine = Engine(weights, max_context=context + new)
    library = Path(stdlib.__file__).parent
    texts = [(library / name).read_text(encoding="utf-8")[5000:] for name in SOURCES]
    prompts = [tokenizer.encode(text)[:context] for text in texts]

    def decoded(prompt: Sequence[int], draft: int) -> tuple[Any, float]:
        """A continuation, and the thread's CPU seconds from its first token to its last."""
        times: list[float] = []
        options = GenerationOptions(new, draft=draft)
        result = generate(engine, [prompt], options, lambda row, token: times.append(time.thread_time()))
        return result, times[-1] - times[0]

    def side(draft: int) -> Callable[[], list[tuple[Any, float]]]:
        return lambda: [decoded(prompt, draft) for prompt in prompts]

    results = rounds([side(draft) for draft in (0, *drafts)], repetitions)
    found = {str(draft): result for draft, result in zip((0, *drafts), results, strict=True)}
    print(
        f"{run}: {opened.config.title}, {dtype}, context {context}, {len(prompts)} prompts of "
        f"{', '.join(SOURCES)}"
    )
    expected = [result.rows[0].tokens for result, _ in found["0"][0]]

    def speed(results: Sequence[tuple[Any, float]]) -> float:
        tokens = sum(result.new_tokens - 1 for result, _ in results)
        return tokens / sum(result.decode_seconds for result, _ in results)

    def cost(rounds_of: Sequence[Sequence[tuple[Any, float]]]) -> float:
        return statistics.median(sum(seconds for _, seconds in results) for results in rounds_of)

    base = statistics.median(speed(results) for results in found["0"])
    rows = []
    for name, rounds_of in found.items():
        last = [result for result, _ in rounds_of[-1]]
        equal = sum(r.rows[0].tokens == want for r, want in zip(last, expected, strict=True))
        tokens = sum(r.speculation.tokens for r in last)
        steps = sum(r.speculation.steps for r in last)
        rate = statistics.median(speed(results) for results in rounds_of)
        by_cpu = cost(found["0"]) / cost(rounds_of)
        cells = (f"{tokens / steps:.2f}", f"{rate:.1f}", f"{rate / base:.2f}", f"{by_cpu:.2f}")
        rows.append([name, *cells, f"{equal} of {len(last)}"])
    heads = ["drafts", "acceptance length", "tokens/s", "of plain", "by CPU time", "equal to plain"]
    print_table(heads, rows)


def scaled(hidden_size: int) -> Nemotron3Config:
    """`common.model` at another hidden size, with an MTP block and weights with which it agrees."""
    factor = hidden_size / model().hidden_size
    widths = ("num_attention_heads", "mamba_num_heads", "moe_ffn_hidden_size", "moe_latent_size")
    names = (*widths, "moe_shared_expert_intermediate_size")
    changes: dict[str, Any] = {name: int(getattr(model(), name) * factor) for name in names}
    mtp = {"mtp_pattern": "*E", "mtp_num_layers": 1, "mtp_use_repeated_layer": True}
    return replace(model(), hidden_size=hidden_size, **changes, **mtp)


def cpu_seconds(function: Callable[[], Any]) -> float:
    """CPU seconds of this thread in one call."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def passes(hidden_size: int, context: int, dtype: torch.dtype, repetitions: int) -> None:
    """Print what passes over few tokens and steps with drafts cost."""
    config = scaled(hidden_size)
    made = agreeing_tensors(config, 0.0)
    engine = Engine(read_weights(InMemory(made, Path()), config, dtype=dtype), max_context=10**6)
    prompt = torch.randint(config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
    state = engine.new_state(1, 2 * context)
    engine.prefill(prompt, state)

    def over(n: int) -> Callable[[], float]:
        def run() -> None:
            out = engine.forward(prompt[:, :n], state, rollback=n > 1)
            out.logits.argmax(-1).tolist()
            if out.rollback is not None:
                state.truncate(n - 1, out.rollback)

        return lambda: cpu_seconds(run)

    def step(decoder: Decoder) -> Callable[[], float]:
        def run() -> None:
            assert len(decoder.step([decoder.draft])[0]) == decoder.draft + 1

        return lambda: cpu_seconds(run)

    sides = {f"pass over {n}": over(n) for n in PASSES}
    for draft in (0, 1, 2, 3):
        options = GenerationOptions(4 * (repetitions + 2), draft=draft)
        sides[f"step with {draft} drafts"] = step(Decoder(engine, prompt.tolist(), options))
    with torch.inference_mode():
        found = [min(times) for times in rounds(list(sides.values()), repetitions)]
    print(f"{config.title.replace('256', str(hidden_size))}, {dtype}, context {context}")
    plain = {"pass": found[0], "step": found[len(PASSES)]}
    rows = []
    for name, seconds in zip(sides, found, strict=True):
        cost = seconds / plain[name.split()[0]]
        rows.append([name, f"{1e3 * seconds:.2f}", f"{cost:.2f}", f"{cost:.2f}" if "step" in name else ""])
    print_table(["what", "ms", "of one token", "pays from"], rows)


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--run", type=Path)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--new", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    arguments.add_argument("--passes", type=int, metavar="HIDDEN_SIZE")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = arguments.parse_args()
    set_threads()
    print(machine())
    dtype = getattr(torch, options.dtype)
    if options.passes is not None:
        passes(options.passes, options.context, dtype, options.rounds)
    elif options.run is None:
        random_weights(options.context, options.new, options.rounds)
    else:
        trained(options.run, options.context, options.new, options.rounds, options.drafts, dtype)


if __name__ == "__main__":
    main()
