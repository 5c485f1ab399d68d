"""Recordings of inference engines, from what they return. Imports neither vLLM nor SGLang.

vLLM: `SamplingParams(prompt_logprobs=0, logprobs=0)`. SGLang: `return_logprob=True, logprob_start_len=0`. For
router choices, the engine's option that returns routed experts. Log-probabilities must be those of the model
(`logprobs_mode="raw_logprobs"`, the default of vLLM), not of the sampler at another temperature.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from megatron_nemotron3.proof.bisect.recording import Sequence


def sequence(
    ids: Items[int],
    logprobs: Items[float | None],
    *,
    experts: Any = None,
    pattern: str | None = None,
    prompt: int = 0,
) -> Sequence:
    """A sequence of plain numbers.

    Args:
        ids: of s tokens.
        logprobs: of each of them given those before it; what is not known, as for the first one, is None.
        experts: which each token selects, [n, layers, topk] for the first n tokens (an engine does not run
            the last one), where layers are those of the pattern or its E layers; None: not recorded.
        pattern: of the model's layers; needed with experts.
        prompt: the first tokens, which are not scored.

    Raises:
        ValueError: another number of log-probabilities than tokens, one unknown behind one that is known, or
            experts that do not fit.
    """
    if len(logprobs) != len(ids):
        raise ValueError(
            f"{len(logprobs)} log-probabilities for {len(ids)} tokens: give None where there is none"
        )
    unknown = [t for t, value in enumerate(logprobs) if value is None]
    start = max(prompt, unknown[-1] + 1 if unknown else 0)
    values = [math.nan if value is None else float(value) for value in logprobs[max(start, 1) :]]
    routing = {} if experts is None else routed(experts, len(ids), pattern)
    return Sequence(torch.tensor(list(ids)), start, torch.tensor(values, dtype=torch.float32), routing)


def routed(experts: Any, tokens: int, pattern: str | None) -> dict[int, Tensor]:
    """Experts [n, layers, topk] as `Sequence.routing`; rows of the tokens after the first n are unknown."""
    table = torch.as_tensor(experts).int()
    if pattern is None:
        raise ValueError("experts need the pattern of the model's layers, such as 'MEMEM*E'")
    layers = [number for number, kind in enumerate(pattern) if kind == "E"]
    if table.dim() != 3 or len(table) > tokens or table.shape[1] not in (len(layers), len(pattern)):
        raise ValueError(
            f"experts {list(table.shape)}: [up to {tokens} tokens, {len(layers)} E layers or all "
            f"{len(pattern)}, topk] is expected for {pattern}"
        )
    places = layers if table.shape[1] == len(pattern) else range(len(layers))
    rest = table.new_full((tokens - len(table), table.shape[2]), -1)
    return {layer: torch.cat([table[:, place], rest]) for layer, place in zip(layers, places)}


def of_vllm(output: Any, pattern: str | None = None) -> Sequence:
    """Prompt and first completion of a `RequestOutput` of vLLM.

    Raises:
        ValueError: it has no `prompt_logprobs`, or none of the completion.
    """
    prompt, ids = list(output.prompt_token_ids), []
    if output.prompt_logprobs is None:
        raise ValueError("the output has no prompt_logprobs: ask for SamplingParams(prompt_logprobs=0)")
    entries: list[Mapping[int, Any] | None] = list(output.prompt_logprobs)
    experts = None
    if output.outputs:
        done = output.outputs[0]
        ids, experts = list(done.token_ids), getattr(done, "routed_experts", None)
        if ids and done.logprobs is None:
            raise ValueError("the completion has no logprobs: ask for SamplingParams(logprobs=0)")
        entries += done.logprobs or []
    ids = prompt + ids
    values: list[float | None] = []
    for at, (entry, token) in enumerate(zip(entries, ids)):
        if entry is not None and token not in entry and len(entries) == len(ids):
            raise ValueError(f"token {at} has no log-probability of its own among those that vLLM returned")
        values.append(None if entry is None else entry[token].logprob)
    values += [None] * (len(entries) - len(ids))
    return sequence(ids, values, experts=experts, pattern=pattern)


def of_sglang(output: Mapping[str, Any], pattern: str | None = None, topk: int | None = None) -> Sequence:
    """Prompt and completion of an answer of SGLang's `/generate` or `Engine.generate`."""
    meta = output["meta_info"]
    if not meta.get("input_token_logprobs"):
        raise ValueError("meta_info has no input_token_logprobs: ask for return_logprob, logprob_start_len=0")
    entries = [*meta["input_token_logprobs"], *(meta.get("output_token_logprobs") or [])]
    given, experts = meta.get("routed_experts"), None
    if given is not None:
        experts = given
        if isinstance(given, (str, bytes)):
            if topk is None or pattern is None:
                raise ValueError("routed_experts need the pattern of the model's layers and topk")
            flat = torch.frombuffer(bytearray(base64.b64decode(given)), dtype=torch.int32)
            experts = _table(flat, len(entries), pattern, topk)
    return sequence([e[1] for e in entries], [e[0] for e in entries], experts=experts, pattern=pattern)


def _table(flat: Tensor, tokens: int, pattern: str, topk: int) -> Tensor:
    """[n, layers, topk] of the numbers of up to s tokens; an engine does not run the last one."""
    for layers in (len(pattern), pattern.count("E")):
        if flat.numel() in (tokens * layers * topk, (tokens - 1) * layers * topk):
            return flat.view(-1, layers, topk)
    raise ValueError(
        f"routed_experts are {flat.numel()} numbers; {tokens} or {tokens - 1} tokens with top-{topk} in "
        f"{pattern.count('E')} E layers, or all {len(pattern)}, are expected"
    )
