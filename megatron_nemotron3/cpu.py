"""Run Megatron-Core and Megatron's training loop where there is no CUDA: the only patches in this package.

    with cpu_mode():
        ...  # anything of megatron.core or megatron.training, on CPU tensors and gloo

Megatron names CUDA everywhere: `torch.cuda.current_device()` for allocations, streams and events,
`device="cuda"`, `backend="nccl"`, tensor type names. Inside `cpu_mode` those names mean the CPU: every
attribute that is replaced stands in the tables below with what it becomes, and is put back on exit.
Nothing is patched by importing this module, and nothing is patched on a GPU.

What it is not: a CUDA emulator. Triton kernels, CUDA graphs and TransformerEngine stay unavailable.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from megatron_nemotron3 import no_cuda, versions

_active = False

#: Megatron arguments that cannot hold on a CPU, and what they become (applied after parsing).
ARGUMENTS: dict[str, Any] = {
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
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
    "num_workers": 0,  # DataLoader workers ask for an accelerator
    "async_save": False,
}


def is_active() -> bool:
    """Whether code runs inside `cpu_mode`."""
    return _active


def _names_cuda(device: Any) -> bool:
    import torch

    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with any CUDA device among its arguments replaced by the CPU."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _names_cuda(kwargs["device"]):
            kwargs["device"] = "cpu"
        if any(_names_cuda(a) for a in args):
            args = tuple("cpu" if _names_cuda(a) else a for a in args)
        return function(*args, **kwargs)

    return wrapper


def _torch_table() -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for torch itself."""
    import torch

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    def zero(*args: Any, **kwargs: Any) -> int:
        return 0

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Optimizers and clip_grads decide by the name "torch.cuda.FloatTensor".
        if dtype is None:
            return original_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return original_type(self, dtype, *args, **kwargs)

    original_type = torch.Tensor.type
    factories = "tensor empty zeros ones full arange rand randn randint randperm eye linspace as_tensor"
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: no_cuda.CurrentDevice("cpu"),
        "set_device": nothing,
        "device": no_cuda.Device,
        "synchronize": nothing,
        "empty_cache": nothing,
        "manual_seed": torch.default_generator.manual_seed,
        "manual_seed_all": nothing,  # torch.manual_seed calls it after seeding the CPU
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "default_generators": no_cuda.Generators(),
        "Stream": no_cuda.Stream,
        "Event": no_cuda.Event,
        "stream": lambda *_: nullcontext(),
        "set_stream": nothing,
        "current_stream": lambda *_: no_cuda.Stream(),
        "default_stream": lambda *_: no_cuda.Stream(),
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda *_: (8, 0),  # what --moe-grouped-gemm asks for
        "get_device_properties": lambda *_: no_cuda.Properties(),
        "get_device_name": lambda *_: "cpu",
        "memory_allocated": zero,
        "max_memory_allocated": zero,
        "memory_reserved": zero,
        "max_memory_reserved": zero,
        "reset_peak_memory_stats": nothing,
        "memory_stats": lambda *_: no_cuda.Zeros(),
        "device_memory_used": zero,
        "FloatTensor": torch.FloatTensor,
        "HalfTensor": torch.HalfTensor,
        "BFloat16Tensor": torch.BFloat16Tensor,
        "DoubleTensor": torch.DoubleTensor,
        "IntTensor": torch.IntTensor,
        "LongTensor": torch.LongTensor,
        "ByteTensor": torch.ByteTensor,
    }
    return [
        *((torch.cuda, name, value) for name, value in cuda.items()),
        (torch.cuda.random, "get_rng_state", cuda["get_rng_state"]),
        (torch.cuda.random, "set_rng_state", cuda["set_rng_state"]),
        (torch.cuda.nvtx, "range_push", nothing),
        (torch.cuda.nvtx, "range_pop", nothing),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in factories.split()),
        (torch.Tensor, "to", _on_cpu(torch.Tensor.to)),
        (torch.Tensor, "cuda", lambda self, *_, **__: self),
        (torch.Tensor, "pin_memory", lambda self, *_, **__: self),
        (torch.Tensor, "type", tensor_type),
        (torch.nn.Module, "to", _on_cpu(torch.nn.Module.to)),
        (torch.nn.Module, "cuda", lambda self, *_: self),
        *_distributed_table(),
    ]


def _distributed_table() -> list[tuple[Any, str, Any]]:
    """nccl becomes gloo: its options are dropped, collectives gloo lacks made, groups of one rank shared."""
    import torch.distributed as dist

    from megatron_nemotron3 import one_rank, uneven

    def on_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            args = tuple(_gloo(a) for a in args)
            if "backend" in kwargs:
                kwargs["backend"] = _gloo(kwargs["backend"])
            for name in ("pg_options", "device_id"):
                if kwargs.get(name) is not None:
                    kwargs[name] = None
            return function(*args, **kwargs)

        return wrapper

    # torch's own module calls its `new_group`, so what makes groups by it is listed, too.
    names = ("init_process_group", "new_subgroups_by_enumeration")
    return [
        *((dist, name, on_gloo(getattr(dist, name))) for name in names),
        (dist, "new_group", on_gloo(one_rank.new_group)),
        (dist, "destroy_process_group", one_rank.destroy_process_group),
        (dist, "all_gather", uneven.all_gather),
        (dist, "reduce_scatter", uneven.reduce_scatter),
    ]


def _gloo(backend: Any) -> Any:
    return "gloo" if isinstance(backend, str) and "nccl" in backend else backend


def _fallback_table() -> list[tuple[Any, str, Any]]:
    """Where TE or apex is installed, Megatron binds its kernels at import; its own fallbacks run anywhere."""
    import torch
    from megatron.core import utils

    apply, norm, scale = (
        getattr(utils, f"local_multi_tensor_{name}") for name in ("applier", "l2_norm", "scale")
    )
    bound: dict[str, dict[str, Any]] = {
        "core.transformer.moe.moe_utils": {"te_general_gemm": None},
        "core.optimizer": {
            "Adam": torch.optim.AdamW,
            "SGD": torch.optim.SGD,
            "USING_PYTORCH_OPTIMIZER": True,
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
        (*versions.locate(f"megatron.{module}:{name}", _version()), value)
        for module, names in bound.items()
        for name, value in names.items()
    ]


def _version() -> str:
    """Minor version of the megatron-core that is imported."""
    return versions.minor(importlib.import_module("megatron.core").__version__)


def _optimizer_table() -> list[tuple[Any, str, Any]]:
    """Resuming the distributed optimizer with torch's Adam (no apex, no TE).

    Upstream asks for the step count before any state exists; after loading, the step of every parameter is
    one shared tensor, which Adam advances once per parameter, or a placeholder's zero; and a fully
    reshardable checkpoint, which has no step per parameter, is searched for one.
    """
    import torch
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict, load_state_dict = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict

    def state_dict_of_started(self: Any) -> Any:
        inner = self.optimizer
        if not self.is_stub_optimizer and not inner.state:
            for parameter in (p for group in inner.param_groups for p in group["params"]):
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
        set_state(self, parameter, {"step": None, **tensors})  # what is no tensor is left as it is

    return [
        (DistributedOptimizer, "_set_main_param_and_optimizer_states", set_state_without_step),
        (DistributedOptimizer, "state_dict", state_dict_of_started),
        (DistributedOptimizer, "load_state_dict", load_state_dict_with_steps),
    ]


def _megatron_table(announce: Callable[[str], None]) -> list[tuple[Any, str, Any]]:
    """(object, attribute, replacement) for what Megatron bound before torch's names were replaced."""
    import torch

    rng = importlib.import_module("megatron.core.tensor_parallel.random")
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    table: list[tuple[Any, str, Any]] = [
        (rng, "_lazy_call", lambda callback, **_: callback()),
        (rng, "_lazy_init", lambda: None),
        (rng, "device_ctx_manager", lambda *_: nullcontext()),
        (rng, "_get_cuda_rng_state", lambda *_, **__: torch.get_rng_state()),
        (rng, "_set_cuda_rng_state", lambda state, *_, **__: torch.set_rng_state(state)),
        # Kept by the class for all models: a stand-in must not outlive the block.
        (dispatcher.MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", None),
    ]
    try:
        arguments = importlib.import_module("megatron.training.arguments")
        datasets = importlib.import_module("megatron.core.datasets.utils")
    except ImportError:  # megatron.core alone: scripts without the training loop
        return table
    table += [*_fallback_table(), *_optimizer_table()]

    parse_args = arguments.parse_args
    announced: list[bool] = []  # Megatron parses its arguments more than once

    def parse_for_cpu(*args: Any, **kwargs: Any) -> Any:
        parsed = parse_args(*args, **kwargs)
        changed = {k: v for k, v in ARGUMENTS.items() if getattr(parsed, k, v) != v}
        for name, value in changed.items():
            setattr(parsed, name, value)
        if changed and not announced:
            announced.append(True)
            announce("CPU run, arguments set: " + ", ".join(f"{k}={v}" for k, v in changed.items()))
        return parsed

    have_helper = _have_dataset_helper()
    compile_helpers = datasets.compile_helpers

    def compile_if_missing() -> None:
        # The wheel brings the helper compiled but no Makefile, a checkout the reverse (and make needs
        # pybind11); a failed make exits the process.
        if not have_helper:
            compile_helpers()

    if (
        versions.has("inference-linear", _version())
        and importlib.util.find_spec("transformer_engine") is None
    ):
        mtp = importlib.import_module("megatron.core.transformer.multi_token_prediction")
        table.append((mtp, "is_inference_column_parallel_linear", lambda module: False))
    if not versions.has("config-container", _version()):  # what pretrain() parses with, bound at import
        initialize = importlib.import_module("megatron.training.initialize")
        table.append((initialize, "parse_args", parse_for_cpu))
    return [
        *table,
        (arguments, "parse_args", parse_for_cpu),
        (datasets, "compile_helpers", compile_if_missing),
    ]


def _have_dataset_helper() -> bool:
    """Whether `megatron.core.datasets.helpers_cpp` can be imported, if need be out of the wheel."""
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


def _about_cpu_rng(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


@contextmanager
def cpu_mode(announce: Callable[[str], None] = lambda message: None) -> Iterator[None]:
    """Make CUDA names mean the CPU for the duration of the block. Re-entrant.

    Args:
        announce: called with a line about every Megatron argument that had to be changed.
    """
    global _active
    if _active:
        yield
        return
    import torch

    with ExitStack() as stack:
        # Imported first, so that what Megatron binds at import are the originals, which outlive the block.
        importlib.import_module("megatron.core")
        for target, name, value in [*_torch_table(), *_megatron_table(announce)]:
            original = getattr(target, name)
            setattr(target, name, value)
            stack.callback(setattr, target, name, original)
        # Megatron insists on it for tensor parallelism; without CUDA it means nothing.
        if "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ:
            os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
            stack.callback(os.environ.pop, "CUDA_DEVICE_MAX_CONNECTIONS", None)
        # jit_fuser is torch.compile, which wants a device to compile for.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Here the generator "on the device" is the CPU's own, and it is put back like any other.
        tracker_log = logging.getLogger("megatron.core.tensor_parallel.random")
        tracker_log.addFilter(_about_cpu_rng)
        stack.callback(tracker_log.removeFilter, _about_cpu_rng)
        _active = True
        try:
            yield
        finally:
            _active = False
