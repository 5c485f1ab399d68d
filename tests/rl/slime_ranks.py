"""What ranks of a gloo world do with slime; for `run_distributed`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from tests.rl.frameworks import not_here, placeholder, use

use("SLIME_DIR")
for _module, _names in {
    "slime.backends.sglang_utils.arguments": ("sglang_parse_args", "validate_args"),
    "slime.backends.sglang_utils.external": ("apply_external_engine_info_to_args",),
}.items():
    placeholder(_module, **dict.fromkeys(_names, not_here))

# Before CPU mode: slime compiles functions when it is imported.
import slime.backends.megatron_utils.model  # noqa: E402, F401
from slime.utils import accelerator  # noqa: E402
from slime.utils.accelerator.cuda import CUDAAccelerator  # noqa: E402


class CPU(CUDAAccelerator):
    """A device for slime's registry of accelerators. What it asks CUDA for, CPU mode answers."""

    name = device_type = "cpu"

    def is_available(self) -> bool:
        return True

    def device(self, index: Any = None) -> Any:
        import torch

        return torch.device("cpu")

    def current_device(self) -> Any:
        return "cpu"


#: (all tokens, tokens of the response) of each sample; even, as TP 2 needs for one document alone.
SAMPLES = ((14, 6), (22, 9), (8, 3))
VOCABULARY = 256


def arguments(argv: list[str]) -> Any:
    """The arguments that slime's own parser makes of a command line, without SGLang's."""
    from unittest import mock

    import torch
    from slime.backends.megatron_utils.arguments import megatron_parse_args, validate_args
    from slime.utils.arguments import get_slime_extra_args_provider

    with mock.patch.object(sys, "argv", ["train.py", *argv]):
        args = megatron_parse_args(get_slime_extra_args_provider(), skip_hf_validate=True)
    args.rank, args.world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    validate_args(args)
    return args


@contextlib.contextmanager
def megatron(argv: list[str], **sizes: int) -> Iterator[Any]:
    """slime's arguments as Megatron's global ones, and the process groups of a layout."""
    from megatron.core.num_microbatches_calculator import (
        destroy_num_microbatches_calculator,
        init_num_microbatches_calculator,
    )
    from megatron.training import global_vars

    from megatron_nemotron3.proof.certify.ranks import initialize

    initialize(**sizes)
    accelerator.set_accelerator(CPU())
    args = arguments(argv)
    global_vars.set_args(args)
    global_vars._set_timers(args)
    init_num_microbatches_calculator(args.rank, None, 1, 1, args.data_parallel_size, False)
    try:
        yield args
    finally:
        destroy_num_microbatches_calculator()
        global_vars.destroy_global_vars()


def rollout() -> Any:
    """A rollout of three samples in two micro-batches, as slime's actor makes it."""
    import torch

    made = torch.Generator().manual_seed(5)
    tokens = [torch.randint(1, VOCABULARY, (total,), generator=made) for total, _ in SAMPLES]
    return {
        "tokens": tokens,
        "total_lengths": [total for total, _ in SAMPLES],
        "response_lengths": [response for _, response in SAMPLES],
        "loss_masks": [torch.ones(response, dtype=torch.int) for _, response in SAMPLES],
        "rollout_mask_sums": [torch.tensor(float(response)) for _, response in SAMPLES],
        "micro_batch_indices": [[0, 1], [2]],
    }


def step(argv: list[str], sizes: dict[str, int]) -> dict[str, Any]:
    """Log-probabilities by slime's forward and by a plain one of each sample; weights that a step changed."""
    import torch

    with megatron(argv, **sizes) as args:
        from slime.backends.megatron_utils.data import get_data_iterator
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
        from slime.backends.megatron_utils.model import (
            forward_only,
            setup_model_and_optimizer,
            train_one_step,
        )

        model, optimizer, scheduler = setup_model_and_optimizer(args)
        model[0].role = "actor"
        data = rollout()
        batches = get_data_iterator(data)
        found = forward_only(get_log_probs_and_entropy, args, model, batches, [2])
        inner = model[0].module
        while hasattr(inner, "module"):
            inner = inner.module
        plain = _plain_log_probs(model[0], data) if sizes.get("pp", 1) == 1 else None
        before = {name: value.detach().clone() for name, value in inner.named_parameters()}
        batches[0].reset()
        losses, norm = train_one_step(args, 0, 0, batches, model, optimizer, scheduler, 2, len(SAMPLES))
        return {
            "log_probs": found.get("log_probs"),
            "plain": plain,
            "decoder": type(inner.decoder).__name__,
            "loss": losses.get("loss"),
            "norm": float(norm),
            "parameters": sorted(before),
            "changed": sorted(n for n, p in inner.named_parameters() if not torch.equal(p, before[n])),
        }


def _plain_log_probs(model: Any, data: Any) -> list[Any]:
    """Log-probabilities of each sample's response, each sample alone, by Megatron's documented call."""
    import torch

    model.eval()
    found = []
    with torch.no_grad():
        for tokens, (total, response) in zip(data["tokens"], SAMPLES):
            positions = torch.arange(total)[None]
            logits = model(tokens[None], positions, None, runtime_gather_output=True)[0].float()
            logs = torch.log_softmax(logits[..., :VOCABULARY], -1)[:-1].gather(1, tokens[1:, None])[:, 0]
            found.append(logs[total - response - 1 :])
    model.train()
    return found
