"""Stages `generate` and `prefill` of gpu.py: an engine with random weights, made on the device.

plain     the whole of Nano in BF16, batch 1: decoding after a short and a long context
drafts    11 layers of Super's width and its MTP: plain, and with 1 to 7 drafts. The weights are such that MTP
          agrees with the model (the layers add nothing to the residual stream, though they are computed), so
          each verification gives about as many tokens as it can. What drafts cost does not depend on the
          weights; "break_even" is the acceptance length from which they are faster than plain decoding.
prefill   9 layers of Nano's width, one of them attention: a text of 1M tokens in chunks
"""

from __future__ import annotations

import re
import statistics
import time
import zlib
from typing import Any

import torch
from gpu_model import cut, stack
from gpu_setting import Setting

from megatron_nemotron3.checkpoints.convert.inventory import hf_tensors
from megatron_nemotron3.inference.generate.attention import KVCache
from megatron_nemotron3.inference.generate.decode import Decode
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import Generation, GenerationOptions, generate
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models.parameters import count

CONTEXTS, SMALL_CONTEXTS = (512, 32768), (48,)
DRAFT_CONTEXT, SMALL_DRAFT_CONTEXT = 2048, 48
NEW, SMALL_NEW = 128, 8
ROUNDS, SMALL_ROUNDS = 3, 1
DRAFTS = range(1, 8)
#: Tokens of the long text, of a chunk, between two rows, and of the comparison with a single pass.
LONG, SMALL_LONG = 2**20, 512
CHUNK, SMALL_CHUNK = 4096, 64
ROWS, WHOLE, SMALL_WHOLE = 16, 16384, 256
#: What the state, the caches and a pass need besides the weights.
RESERVE = 8 * 2**30
#: Matrices whose products a layer adds to the residual stream.
_LAYER_ENDS = re.compile(r"(out_proj|o_proj|fc2_latent_proj|shared_experts\.down_proj)\.weight$")


def random_engine(config: Nemotron3Config, device: str, agreeing: bool = False) -> Engine:
    """An engine in BF16 with weights that depend on their names alone, drawn on the device.

    Args:
        agreeing: the model predicts from its last token alone, and so does its MTP.
    """
    from gpu_weights import spread

    shapes = {tensor.name: tensor.shape for tensor in hf_tensors(config)}

    def read(name: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shapes[name], generator=generator, device=device, dtype=torch.bfloat16)
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
        else:
            mean, std = spread(name, shapes[name][-1])
            tensor = tensor.mul_(std).add_(mean)
        return agree(name, tensor) if agreeing else tensor

    return Engine(Decode(config, read, torch.bfloat16, device), max_context=LONG)


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


def prompt(config: Nemotron3Config, length: int) -> list[int]:
    """Random ids."""
    ids: list[int] = torch.randint(
        config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    return ids


def runs(engine: Engine, tokens: list[int], options: GenerationOptions, rounds: int) -> list[Generation]:
    """Generations of one prompt, after one that does not count."""
    return [generate(engine, [tokens], options) for _ in range(rounds + 1)][1:]


def about(setting: Setting, config: Nemotron3Config, engine: Engine) -> None:
    """A row with the model."""
    memory = torch.cuda.memory_allocated() if setting.device == "cuda" else None
    setting.emit(
        "model",
        title=config.title,
        pattern=config.pattern,
        experts=config.num_moe_experts,
        parameters=count(config).stored,
        dtype=str(engine.dtype).removeprefix("torch."),
        memory=memory,
    )


def plain(setting: Setting) -> None:
    """Decoding of one sequence."""
    config = get("nano-tiny" if setting.small else "nano").but(mtp_pattern=None, mtp_num_layers=0)
    if setting.device == "cuda" and not setting.small:
        capacity = torch.cuda.get_device_properties(0).total_memory
        if 2 * count(config).stored + RESERVE > capacity:
            config = config.but(pattern=cut(config.pattern))
    engine = random_engine(config, setting.device)
    about(setting, config, engine)
    new, rounds = (SMALL_NEW, SMALL_ROUNDS) if setting.small else (NEW, ROUNDS)
    for context in SMALL_CONTEXTS if setting.small else CONTEXTS:
        tokens = prompt(config, context)
        found = runs(engine, tokens, GenerationOptions(new, chunk=CHUNK), rounds)
        setting.emit(
            "decode",
            context=context,
            tokens_per_second=statistics.median(f.tokens_per_second for f in found),
            prefill_seconds=statistics.median(f.prefill_seconds for f in found),
        )


def drafts(setting: Setting) -> None:
    """Plain decoding, and with 1 to 7 drafts."""
    # Super's own pattern of MTP, which `stack` leaves out
    config = get("super-tiny") if setting.small else get("super").but(pattern=stack("super").pattern)
    if setting.device == "cuda":
        from gpu_model import halved

        capacity = torch.cuda.get_device_properties(0).total_memory
        config = halved(config, lambda c: 2 * count(c).stored + RESERVE, capacity)
    engine = random_engine(config, setting.device, agreeing=True)
    about(setting, config, engine)
    new, rounds = (SMALL_NEW, SMALL_ROUNDS) if setting.small else (NEW, ROUNDS)
    tokens = prompt(config, SMALL_DRAFT_CONTEXT if setting.small else DRAFT_CONTEXT)
    base = 0.0
    text: list[int] = []
    for draft in (0, *DRAFTS):
        options = GenerationOptions(new, draft=draft, chunk=CHUNK)
        found = runs(engine, tokens, options, rounds)
        step = statistics.median(f.decode_seconds / f.passes for f in found)
        base = base or step
        text = text or found[0].rows[0].tokens
        setting.emit(
            "drafts",
            drafts=draft,
            acceptance_length=found[0].speculation.acceptance_length if draft else 1.0,
            tokens_per_second=statistics.median(f.tokens_per_second for f in found),
            seconds_per_pass=step,
            break_even=step / base,
            equal=sum(a == b for a, b in zip(found[0].rows[0].tokens, text, strict=True)),
            new=new,
        )


def prefill(setting: Setting) -> None:
    """A long text in chunks: time, and memory besides the KV cache."""
    config = stack("nano", tiny=setting.small)
    engine = random_engine(config, setting.device)
    about(setting, config, engine)
    length, chunk = (SMALL_LONG, SMALL_CHUNK) if setting.small else (LONG, CHUNK)
    ids = torch.tensor([prompt(config, length)], device=setting.device)
    setting.emit("one pass", **one_pass(engine, ids[:, : SMALL_WHOLE if setting.small else WHOLE], chunk))
    state = engine.new_state(capacity=length)
    room = sum(layer.cache.nbytes for layer in state.layers.values() if isinstance(layer, KVCache))
    cuda = setting.device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    for start in range(0, length, chunk):
        last = engine.prefill(ids[:, start : start + chunk], state, chunk=chunk).hidden
        seen = start + chunk
        if seen % (length // ROWS) == 0:
            last.sum().item()  # waits for the device
            setting.emit(
                "prefill",
                tokens=seen,
                seconds=time.perf_counter() - began,
                states=state.nbytes - room,
                kv_cache=room * seen // length,
                other=torch.cuda.max_memory_allocated() - before if cuda else None,
            )
            if cuda:
                torch.cuda.reset_peak_memory_stats()


def one_pass(engine: Engine, ids: torch.Tensor, chunk: int) -> dict[str, Any]:
    """Logits after a text in one pass and in chunks: their difference and their size."""
    whole = engine.logits(engine.forward(ids, engine.new_state()).hidden[:, -1]).float()
    parts = engine.prefill(ids, engine.new_state(), chunk=chunk).logits.float()
    return {
        "tokens": ids.shape[1],
        "difference": float((whole - parts).norm()),
        "norm": float(whole.norm()),
    }
