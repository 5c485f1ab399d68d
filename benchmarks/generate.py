"""Tokens per second of transformers' `generate`, our plain decoding, and decoding with MTP drafts.

    OMP_NUM_THREADS=2 python benchmarks/generate.py [--context 512] [--new 128] [--rounds 3]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --run runs/demo [--drafts 1 2] [--dtype bfloat16]
    OMP_NUM_THREADS=1 python benchmarks/generate.py --passes 1024 [--dtype bfloat16] [--rounds 30]

Greedy, batch 1. Without --run, in FP32, the family's proportions at hidden size 256 with random weights:
transformers and plain decoding (random MTP heads draft nothing useful). With --run, the model of
`nemotron3 train --output DIR`: continuations of Python sources, plain and with 1 to 7 drafts. The figures are
for decoding only, without the prefill, and are medians of the rounds. "of the first" is the ratio of tokens/s
to the side in the first row, "by CPU time" the same in CPU time of the thread, "equal" the tokens that are
equal to its tokens.

--passes: what drafts cost at that hidden size in the family's proportions: a pass over 1 to 8 tokens, and a
step that drafts 1 to 7 tokens, in turn. MTP agrees with the model, so nearly all drafts are accepted
("tokens"); what they cost does not depend on that. Least CPU time of the thread, which other processes
disturb less than the clock. A step costs as many plain ones as "of one token" says, so drafts are faster than
plain decoding from that acceptance length on.

With --device cuda, stages of gpu.py, in BF16: plain decoding of Nano after short and long contexts; --passes:
11 layers of Super's width and its MTP, timed on the device, and the operations that take most of it.
"""

from __future__ import annotations

import re
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common import (
    GIB,
    do_not_clamp_time_steps,
    emit,
    machine,
    model,
    operations,
    parser,
    rounds,
    seconds,
    set_threads,
    show,
)
from models import capacity, cut, halved, stack
from weights import spread

from megatron_nemotron3.checkpoints.convert.inventory import hf_tensors
from megatron_nemotron3.inference.generate.decode import Decode, read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import Decoder, GenerationOptions, generate
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.parameters import count
from tests.support.engines import engine_of, tensors

DRAFTS = (1, 2, 3, 5, 7)
PASSES = (1, 2, 3, 4, 8)
#: On a GPU: of which operations are listed, and how many.
PROFILED, OPERATIONS = ("pass over 1", "step with 1 drafts"), 12
#: Prompts for --run: Python's own sources, which `nemotron3 train` trains on.
SOURCES = ("argparse.py", "tarfile.py", "typing.py", "asyncio/base_events.py")
#: Tokens of a chunk of a prompt on a GPU, and bytes that state, caches and a pass need besides the weights.
CHUNK, RESERVE = 4096, 8 * GIB
#: Matrices whose products a layer adds to the residual stream.
_LAYER_ENDS = re.compile(r"(out_proj|o_proj|fc2_latent_proj|shared_experts\.down_proj)\.weight$")


class Decoded(NamedTuple):
    """A continuation: its tokens, seconds from the first to the last, the same in CPU time of the thread.

    given, steps: tokens that verifications of drafts gave, and their number.
    """

    tokens: list[int]
    seconds: float
    cpu: float
    given: int = 1
    steps: int = 1


Side = Callable[[], list[Decoded]]


def theirs(config: Nemotron3Config, prompt: Sequence[int], new: int) -> Side:
    """transformers' model with the weights of `engine_of`; it chooses its attention and experts."""
    import transformers
    from transformers.generation.streamers import BaseStreamer

    from tests.support.model_mapping import stack_experts, transformers_config

    class Clock(BaseStreamer):
        """Records when each token arrives; the prompt comes first."""

        def __init__(self) -> None:
            self.times: list[tuple[float, float]] = []

        def put(self, value: Any) -> None:
            self.times.append((time.perf_counter(), time.thread_time()))

        def end(self) -> None:
            pass

    reference = transformers.NemotronHForCausalLM(transformers_config(config)).eval()
    reference.load_state_dict(stack_experts(tensors(config)))
    do_not_clamp_time_steps(reference)
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": new, "do_sample": False, "use_cache": True, "pad_token_id": 0}

    def run() -> list[Decoded]:
        clock = Clock()
        with torch.inference_mode():
            out = reference.generate(ids, **options, eos_token_id=None, streamer=clock)
        # times: the prompt, the first token (from the prefill), all other tokens.
        (_, (began, cpu), *_, (ended, used)) = clock.times
        return [Decoded(out[0, len(prompt) :].tolist(), ended - began, used - cpu)]

    return run


def ours(engine: Engine, prompts: Sequence[Sequence[int]], new: int, draft: int = 0) -> Side:
    """Our decoding of some prompts, one after the other."""

    def one(prompt: Sequence[int]) -> Decoded:
        times: list[float] = []
        options = GenerationOptions(new, draft=draft)
        result = generate(engine, [prompt], options, lambda row, token: times.append(time.thread_time()))
        counts = (result.speculation.tokens, result.speculation.steps) if draft else (1, 1)
        return Decoded(result.rows[0].tokens, result.decode_seconds, times[-1] - times[0], *counts)

    return lambda: [one(prompt) for prompt in prompts]


def compare(sides: Mapping[str, Side], repetitions: int) -> None:
    """Let the sides take turns and print them beside the first one."""
    found = dict(zip(sides, rounds(list(sides.values()), repetitions), strict=True))

    def speed(name: str) -> float:
        return statistics.median(
            sum(len(one.tokens) - 1 for one in run) / sum(one.seconds for one in run) for run in found[name]
        )

    def cost(name: str) -> float:
        return statistics.median(sum(one.cpu for one in run) for run in found[name])

    first, *_ = found
    expected = [token for one in found[first][0] for token in one.tokens]
    rows = []
    for name, runs in found.items():
        tokens = [token for one in runs[-1] for token in one.tokens]
        same = sum(a == b for a, b in zip(tokens, expected, strict=True))
        accepted = sum(one.given for one in runs[-1]) / sum(one.steps for one in runs[-1])
        rows.append(
            {
                "side": name,
                "acceptance length": f"{accepted:.2f}",
                "tokens/s": f"{speed(name):.1f}",
                "of the first": f"{speed(name) / speed(first):.2f}",
                "by CPU time": f"{cost(first) / cost(name):.2f}",
                "equal": f"{same} of {len(expected)}",
            }
        )
    show(rows)


def random_weights(context: int, new: int, repetitions: int) -> None:
    """Compare with transformers."""
    config = replace(model(), mtp_pattern=None, mtp_num_layers=0)
    prompt = torch.randint(config.vocab_size, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    print(f"{config.title}, context {context}")
    sides = {"transformers": theirs(config, prompt, new), "plain": ours(engine_of(config), [prompt], new)}
    compare(sides, repetitions)


def trained(run: Path, args: Any, dtype: torch.dtype) -> None:
    """Compare plain decoding with drafting, on text like that of the training."""
    import argparse as stdlib

    from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
    from megatron_nemotron3.inference.generate.command import open_for_tokenizer

    folder = find_checkpoint(run)
    tokenizer = folder.tokenizer()
    opened = open_for_tokenizer(folder, tokenizer, None)
    weights = read_weights(opened.hf_view(), opened.config, dtype=dtype)
    engine = Engine(weights, max_context=args.context + args.new)
    library = Path(stdlib.__file__).parent
    texts = [(library / name).read_text(encoding="utf-8")[5000:] for name in SOURCES]
    prompts = [tokenizer.encode(text)[: args.context] for text in texts]
    print(f"{run}: {opened.config.title}, {dtype}, context {args.context}, prompts of {', '.join(SOURCES)}")
    sides = {f"{draft} drafts": ours(engine, prompts, args.new, draft) for draft in (0, *args.drafts)}
    compare(sides, args.rounds)


def scaled(hidden_size: int) -> Nemotron3Config:
    """`common.model` at another hidden size, with an MTP block and weights with which it agrees."""
    factor = hidden_size / model().hidden_size
    widths = ("num_attention_heads", "mamba_num_heads", "moe_ffn_hidden_size", "moe_latent_size")
    names = (*widths, "moe_shared_expert_intermediate_size")
    changes: dict[str, Any] = {name: int(getattr(model(), name) * factor) for name in names}
    mtp = {"mtp_pattern": "*E", "mtp_num_layers": 1, "mtp_use_repeated_layer": True}
    return replace(model(), hidden_size=hidden_size, **changes, **mtp)


def took(function: Callable[[], Any], device: str) -> float:
    """Seconds of one call: CPU time of this thread, or time on the device."""
    if device == "cuda":
        return seconds(function, device)
    began = time.thread_time()
    function()
    return time.thread_time() - began


def passes(engine: Engine, context: int, device: str, repetitions: int) -> None:
    """Print what passes over few tokens and steps with drafts cost."""
    config = engine.config
    prompt = torch.randint(config.vocab_size, (1, context), generator=torch.Generator().manual_seed(1))
    prompt = prompt.to(device)
    state = engine.new_state(1, 2 * context)
    engine.prefill(prompt, state)

    def over(n: int) -> Callable[[], float]:
        def run() -> None:
            out = engine.forward(prompt[:, :n], state, rollback=n > 1)
            out.logits.argmax(-1).tolist()
            if out.rollback is not None:
                state.truncate(n - 1, out.rollback)

        return lambda: took(run, device)

    def step(decoder: Decoder, tokens: list[int]) -> Callable[[], float]:
        def run() -> None:
            tokens.append(len(decoder.step([decoder.draft])[0]))

        return lambda: took(run, device)

    sides = {f"pass over {n}": over(n) for n in PASSES}
    tokens: dict[str, list[int]] = {name: [n] for name, n in zip(sides, PASSES, strict=True)}
    for draft in (0, *DRAFTS):
        options = GenerationOptions((draft + 1) * (repetitions + 3), draft=draft)
        given = tokens[f"step with {draft} drafts"] = []
        sides[f"step with {draft} drafts"] = step(Decoder(engine, prompt.tolist(), options), given)
    with torch.inference_mode():
        found = [min(times) for times in rounds(list(sides.values()), repetitions)]
        profiles = {}
        if device == "cuda":
            profiles = {name: operations(sides[name], device, OPERATIONS) for name in PROFILED}
    plain = {"pass": found[0], "step": found[len(PASSES)]}
    rows = []
    for name, least in zip(sides, found, strict=True):
        ratio = least / plain[name.split()[0]]
        row = {"what": name, "tokens": f"{statistics.mean(tokens[name]):.2f}", "ms": f"{1e3 * least:.2f}"}
        rows.append(row | {"of one token": f"{ratio:.2f}"})
    show(rows, "passes")
    for name, profile in profiles.items():
        show(({"of": name} | row for row in profile), "operation")


def drawn(config: Nemotron3Config, device: str, dtype: torch.dtype, *, agreeing: bool = False) -> Engine:
    """An engine with weights that depend on their names alone, drawn on the device.

    Args:
        agreeing: the model predicts from its last token alone, and so does its MTP: its layers add nothing
            to the residual stream, though they are computed. What drafts cost does not depend on the weights.
    """
    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(config)}

    def read(name: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shapes[name], generator=generator, device=device, dtype=dtype)
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
        else:
            mean, std = spread(name, shapes[name][-1])
            tensor = tensor.mul_(std).add_(mean)
        return agree(name, tensor) if agreeing else tensor

    engine = Engine(Decode(config, read, dtype, device), max_context=2**20)
    about = {
        "title": config.title,
        "pattern": config.pattern,
        "experts": config.num_moe_experts,
        "parameters": count(config).stored,
        "GiB": torch.cuda.memory_allocated() / GIB if device == "cuda" else None,
    }
    emit("model", about)
    return engine


def agree(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a model whose MTP agrees with it."""
    d = len(tensor)
    if _LAYER_ENDS.search(name):
        return tensor.zero_()
    if name.endswith("eh_proj.weight"):
        tensor.zero_()[:, :d].fill_diagonal_(1.0)
    elif re.search(r"(norm|norm_f)\.weight$", name) and "mixer" not in name:
        tensor.fill_(1.0)
    return tensor


def decode(device: str, small: bool) -> None:
    """Print plain decoding of Nano after a short and a long context."""
    config = get("nano-tiny" if small else "nano").but(mtp_pattern=None, mtp_num_layers=0)
    if device == "cuda" and 2 * count(config).stored + RESERVE > capacity(device):
        config = config.but(pattern=cut(config.pattern))
    engine = drawn(config, device, torch.bfloat16)
    options = GenerationOptions(8 if small else 128, chunk=CHUNK)
    repetitions = 1 if small else 3
    rows = []
    for context in (48,) if small else (512, 32768):
        generator = torch.Generator().manual_seed(context)
        prompt = torch.randint(config.vocab_size, (context,), generator=generator).tolist()
        found = [generate(engine, [prompt], options) for _ in range(repetitions + 1)][1:]
        rows.append(
            {
                "context": context,
                "tokens/s": statistics.median(one.tokens_per_second for one in found),
                "prefill s": statistics.median(one.prefill_seconds for one in found),
            }
        )
    show(rows, "decode")


def drafts(device: str, small: bool) -> None:
    """Print what drafts cost at Super's width."""
    # Super's own pattern of MTP, which `stack` leaves out
    config = get("super-tiny") if small else get("super").but(pattern=stack("super").pattern)
    if device == "cuda":
        config = halved(config, lambda c: 2 * count(c).stored + RESERVE, capacity(device))
    engine = drawn(config, device, torch.bfloat16, agreeing=True)
    passes(engine, 48 if small else 2048, device, 1 if small else 20)


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__, gpu=True)
    arguments.add_argument("--run", type=Path)
    arguments.add_argument("--context", type=int, default=512)
    arguments.add_argument("--new", type=int, default=128)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--drafts", type=int, nargs="+", default=DRAFTS)
    arguments.add_argument("--passes", type=int, metavar="HIDDEN_SIZE", help="on a GPU its own, give any")
    arguments.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    args = arguments.parse_args()
    set_threads()
    print(machine(), flush=True)
    dtype = getattr(torch, args.dtype)
    if args.device == "cuda" or args.small:
        (decode if args.passes is None else drafts)(args.device, args.small)
    elif args.passes is not None:
        config = scaled(args.passes)
        print(f"{config.title.replace('256', str(args.passes))}, {dtype}, context {args.context}")
        passes(drawn(config, "cpu", dtype, agreeing=True), args.context, "cpu", args.rounds)
    elif args.run is None:
        random_weights(args.context, args.new, args.rounds)
    else:
        trained(args.run, args, dtype)


if __name__ == "__main__":
    main()
