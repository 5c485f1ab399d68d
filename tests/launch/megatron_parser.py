"""What Megatron's parser makes of command lines.

It runs in a process of its own, because it mutates globals and the environment.

What needs a GPU or Transformer Engine only to be asked about is answered here if "patched", and nothing else:
the compute capability, Transformer Engine's version, its optimizer's arguments, and whether its permutation
kernels exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any
from unittest import mock

from tests.support.distributed import run_fresh


def plain(value: Any) -> Any:
    """A value as JSON can hold it; callables and dtypes by name."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return getattr(value, "__name__", str(value))


class FusedAdam:
    """What Megatron looks for in Transformer Engine's optimizer: the names of its arguments."""

    def __init__(
        self,
        master_weight_dtype: Any = None,
        exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        raise NotImplementedError


def transformer_engine() -> dict[str, ModuleType]:
    """The modules, by name, that Megatron imports `FusedAdam` from."""
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = {name: ModuleType(name) for name in names}
    vars(modules[names[-1]])["FusedAdam"] = FusedAdam
    return modules


def _answers(jobs: list[dict[str, Any]]) -> list[str]:
    """JSON for each job: the arguments and the configs that Megatron makes of them, or the error."""
    warnings.simplefilter("ignore")
    os.environ.pop("LOCAL_RANK", None)
    os.environ.update(RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")

    import argparse

    from megatron.core.optimizer import optimizer_config
    from megatron.core.transformer import transformer_config
    from megatron.core.transformer.moe import moe_utils
    from megatron.training import arguments
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    # Building the parser takes most of the time; parse_args would build it anew for each set.
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    arguments.add_megatron_arguments(parser)

    def values(config: Any) -> dict[str, Any]:
        return {f.name: plain(getattr(config, f.name)) for f in dataclasses.fields(config)}

    def run(argv: list[str], world_size: int, training: bool) -> dict[str, Any]:
        os.environ["WORLD_SIZE"] = str(world_size)
        sys.argv = ["pretrain_hybrid.py", *argv]
        with mock.patch.object(arguments, "add_megatron_arguments", lambda _: parser):
            args = arguments.parse_args()
        arguments.validate_args(args)
        config = core_transformer_config_from_args(args)
        padded = args.vocab_size and calculate_padded_vocab_size(
            args.vocab_size,
            args.make_vocab_size_divisible_by,
            args.tensor_model_parallel_size,
            logging_enabled=False,
        )
        found = {
            "args": {name: plain(value) for name, value in vars(args).items()},
            "config": values(config),
            "padded_vocab_size": padded,
        }
        if training:
            found["ddp"] = values(get_megatron_ddp_config(args))
            found["optimizer"] = values(get_megatron_optimizer_config(args)[0])
        return found

    kernels = (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    )

    def patches(capability: Sequence[int]) -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *_: tuple(capability)))
        stack.enter_context(mock.patch.object(arguments, "get_device_arch_version", lambda: capability[0]))
        stack.enter_context(mock.patch.dict(sys.modules, transformer_engine()))
        for module in (arguments, transformer_config, optimizer_config):
            stack.enter_context(mock.patch.object(module, "is_te_min_version", lambda *_, **__: True))
        for kernel in kernels:
            stack.enter_context(mock.patch.object(moe_utils, kernel, object()))
        return stack

    answers = []
    with mock.patch.object(arguments, "_print_args", lambda *_: None):  # 800 lines a set
        for job in jobs:
            log = io.StringIO()
            try:
                with (
                    mock.patch.dict(os.environ, job.get("environment", {})),
                    patches(job.get("capability", (10, 0))) if job["patched"] else contextlib.nullcontext(),
                    contextlib.redirect_stdout(log),
                    contextlib.redirect_stderr(log),
                ):
                    answer = run(job["argv"], job["world_size"], job.get("training", False))
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {error} {log.getvalue()[-500:]}"}
            answers.append(json.dumps(answer))
    return answers


def ask(jobs: list[dict[str, Any]], forked: bool = True) -> list[dict[str, Any]]:
    """Let Megatron parse each job's command line: {"argv": [...], "world_size": n, "patched": bool}.

    A job may have an "environment" and the "capability" of a GPU. With "training" the answer has the configs
    of the optimizer and of DistributedDataParallel, too.

    A forked process is seconds faster, but what torch says about a missing GPU is another error there.
    """
    if forked:
        return [json.loads(answer) for answer in run_fresh(_answers, jobs, timeout=600)]
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return [json.loads(answer) for answer in pool.apply(_answers, (jobs,))]
