"""Replacements on a CPU for names that Megatron binds at import and for arguments of its training loop.

Adam, the norm and the scaling of gradients are one call of torch for all parameters: Megatron's own fallbacks
loop over them, of which a model has one for each expert.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_nemotron3.cpu import async_save, torch_names

if TYPE_CHECKING:
    import torch

#: Megatron arguments that are invalid on a CPU -> their values there, set after parsing.
ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,  # not invalid, but weights then do not depend on the layout
    "gradient_accumulation_fusion": False,  # a CUDA extension of apex
    "masked_softmax_fusion": False,  # CUDA kernels
    "persist_layer_norm": False,  # apex
    "bias_dropout_fusion": False,  # torch.compile for a GPU
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "rope_fusion": False,
    "moe_permute_fusion": False,  # TE
    "moe_router_fusion": False,  # TE
    "cross_entropy_loss_fusion": False,
    "num_workers": 0,  # DataLoader workers need an accelerator
}
#: The same for arguments that matter only with another one, which is the key.
ARGUMENTS_WITH: dict[str, dict[str, Any]] = {
    "use_megatron_fsdp": {"gradient_reduce_div_fusion": False},  # NCCL's PREMUL_SUM
    "async_save": {"async_strategy": "mcore"},  # nvidia-resiliency-ext copies from a GPU
}
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
#: Class of arguments -> what Megatron finds in its source, which it parses for each parser: 0.2 s.
_FIELD_HELP: dict[type, dict[str, str]] = {}


@contextmanager
def initialized_by_rank() -> Iterator[None]:
    """Inside, each rank of CPU mode draws its own weights from Megatron's random streams, as on GPUs."""
    name = "use_cpu_initialization"
    whole = ARGUMENTS.pop(name)
    try:
        yield
    finally:
        ARGUMENTS[name] = whole


def adam(params: Any, adam_w_mode: bool = True, **options: Any) -> torch.optim.Optimizer:
    """Return torch's Adam, or with `adam_w_mode` AdamW, built with the arguments of apex's FusedAdam.

    It is torch's fused form where it has one: not for the sharded parameters of Megatron-FSDP.
    """
    import torch
    from torch.distributed.tensor import DTensor

    def choose(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["fused"] = not any(isinstance(parameter, DTensor) for parameter in group["params"])

    optimizer = (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, **options)
    choose(optimizer)
    # A checkpoint replaces the groups, by those of another device or an earlier version.
    optimizer.register_load_state_dict_post_hook(choose)
    return optimizer


def norm(
    chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool
) -> tuple[torch.Tensor, None]:
    """Norm of all tensors together, [1] in FP32, with the arguments of apex's `multi_tensor_l2norm`."""
    import torch

    norms = [n.float() for tensors in lists for n in torch._foreach_norm(tensors)]
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def scale(chunk_size: int, noop_flag: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Write the first list's tensors times `factor` into the second's, as apex's `multi_tensor_scale`."""
    import torch

    source, target = lists
    if all(a is b for a, b in zip(source, target, strict=True)):
        torch._foreach_mul_(target, factor)
    else:
        torch._foreach_copy_(target, source if factor == 1 else torch._foreach_mul(source, factor))


def _fallback_table() -> list[tuple[Any, str, Any]]:
    """Functions of torch, where Megatron binds kernels of TE or apex, or its own loops, at import."""
    import torch
    from megatron.core.utils import local_multi_tensor_applier as apply

    bound: dict[str, dict[str, Any]] = {
        "core.transformer.moe.moe_utils": {"te_general_gemm": None},
        "core.optimizer": {
            "Adam": adam,
            "SGD": torch.optim.SGD,
            # If False, Megatron calls the Adam above with `adam_w_mode`, not torch's own.
            "USING_PYTORCH_OPTIMIZER": False,
        },
        "core.optimizer.distrib_optimizer": {
            "Adam": torch.optim.Adam,
            "HAVE_APEX_OR_TE": False,
            "USING_TE_OPTIMIZER": False,
            "USING_APEX_OPTIMIZER": False,
        },
        "core.optimizer.optimizer": {"multi_tensor_applier": apply, "multi_tensor_scale_impl": scale},
        "core.optimizer.clip_grads": {
            "multi_tensor_applier": apply,
            "l2_norm_impl": norm,
            "multi_tensor_scale_impl": scale,
            "multi_tensor_scale_tensor_impl": None,
        },
        "training.utils.common_utils": {"multi_tensor_applier": apply, "multi_tensor_l2norm": norm},
    }
    return [
        (importlib.import_module(f"megatron.{module}"), name, value)
        for module, names in bound.items()
        for name, value in names.items()
    ]


def _optimizer_table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for resuming the distributed optimizer with torch's Adam."""
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    state_dict, load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    synchronize_steps = ChainedOptimizer._synchronize_steps
    no_parameter = "no parameter"  # key of the state that keeps the step count of an empty optimizer

    def synchronize_steps_of_empty(self: Any) -> Any:
        inner = [optimizer.optimizer for optimizer in self.chained_optimizers if optimizer.optimizer]
        steps = [
            float(s["step"])
            for one in inner
            for key, s in one.state.items()
            if key != no_parameter and "step" in s
        ]
        for one in inner:
            if not any(group["params"] for group in one.param_groups):
                one.state[no_parameter] = {"step": torch.tensor(max(steps, default=0.0))}
        return synchronize_steps(self)

    def state_dict_of_started(self: Any) -> Any:
        inner = self.optimizer
        if not self.is_stub_optimizer and not inner.state:
            parameters = [p for group in inner.param_groups for p in group["params"]]
            if not parameters:
                inner.state[no_parameter] = {"step": torch.tensor(0.0)}
            for parameter in parameters:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return state_dict(self)

    def load_state_dict_with_steps(self: Any, state: Any) -> None:
        with torch.no_grad():  # FP32 master weights are views of the parameters
            load_state_dict(self, state)
        steps = {group["step"] for group in state["optimizer"]["param_groups"]}
        for values in self.optimizer.state.values():
            values["step"] = torch.tensor(float(max(steps)))

    set_state = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_state_without_step(self: Any, parameter: Any, tensors: dict[str, Any]) -> None:
        set_state(self, parameter, {"step": None, **tensors})  # leaves entries that are no tensors unchanged

    return [
        (DistributedOptimizer, "_set_main_param_and_optimizer_states", set_state_without_step),
        (DistributedOptimizer, "state_dict", state_dict_of_started),
        (ChainedOptimizer, "_synchronize_steps", synchronize_steps_of_empty),
        (DistributedOptimizer, "load_state_dict", load_state_dict_with_steps),
    ]


def table(announce: Callable[[str], None], set_connections: bool = False) -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for names that Megatron bound before torch's were replaced.

    With `set_connections` each parse sets the variable `CONNECTIONS`, which means nothing to a CPU: Megatron
    requires 1 for tensor parallelism and refuses it with FSDP.
    """
    import torch

    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    found: list[tuple[Any, str, Any]] = [
        (rng, "_lazy_call", lambda callback, **_: callback()),
        (rng, "_lazy_init", lambda: None),
        (rng, "device_ctx_manager", lambda *_: nullcontext()),
        (rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (rng, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        # The class keeps it for all models, so a placeholder must not outlive the block.
        (dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None),
    ]
    try:
        arguments = importlib.import_module("megatron.training.arguments")
        datasets = importlib.import_module("megatron.core.datasets.utils")
    except ImportError:  # megatron.core without the training loop
        return found
    found += [*_fallback_table(), *_optimizer_table()]

    parse_args = arguments.parse_args
    announced: list[bool] = []  # Megatron parses its arguments more than once

    def parse_for_cpu(*args: Any, **kwargs: Any) -> Any:
        parsed = parse_args(*args, **kwargs)
        invalid = dict(ARGUMENTS)
        for option, values in ARGUMENTS_WITH.items():
            invalid |= values if getattr(parsed, option, False) else {}
        changed = {k: v for k, v in invalid.items() if getattr(parsed, k, v) != v}
        if set_connections:
            fsdp = any(getattr(parsed, name, False) for name in ("use_megatron_fsdp", "use_torch_fsdp2"))
            os.environ[CONNECTIONS] = "8" if fsdp else "1"
        for name, value in changed.items():
            setattr(parsed, name, value)
        if changed and not announced:
            announced.append(True)
            announce("CPU run, arguments set: " + ", ".join(f"{k}={v}" for k, v in changed.items()))
        return parsed

    groups = importlib.import_module("megatron.training.argument_utils").ArgumentGroupFactory
    find_help = groups._get_field_docstrings

    def field_help(self: Any, cls: type) -> dict[str, str]:
        if cls not in _FIELD_HELP:
            _FIELD_HELP[cls] = find_help(self, cls)
        return dict(_FIELD_HELP[cls])

    have_helper, compile_helpers = _have_dataset_helper(), datasets.compile_helpers

    def compile_if_missing() -> None:
        # The wheel has the compiled helper and no Makefile; a checkout has the Makefile only, which needs
        # pybind11. A failed make exits the process.
        if not have_helper:
            compile_helpers()

    # Megatron-Bridge binds the function when it is imported, which must happen before CPU mode.
    binding = [datasets, sys.modules.get("megatron.bridge.training.initialize")]

    # main checks here whether MTP's projection is an inference linear, which raises without
    # TransformerEngine.
    mtp = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    check = "is_inference_column_parallel_linear"
    if hasattr(mtp, check) and importlib.util.find_spec("transformer_engine") is None:
        found.append((mtp, check, lambda module: False))
    return [
        *found,
        (importlib.import_module("megatron.core.jit"), "jit_fuser", torch_names.uncompiled),
        (arguments, "parse_args", parse_for_cpu),
        (groups, "_get_field_docstrings", field_help),
        *async_save.table(),
        *((module, "compile_helpers", compile_if_missing) for module in binding if module is not None),
    ]


def _have_dataset_helper() -> bool:
    """Whether `megatron.core.datasets.helpers_cpp` can be imported, if need be from the wheel."""
    name = "megatron.core.datasets.helpers_cpp"
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return True
    try:
        files = importlib.metadata.files("megatron-core") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    for file in files:
        if file.name.startswith("helpers_cpp") and (path := Path(str(file.locate()))).is_file():
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                sys.modules[name] = module
                return True
    return False
