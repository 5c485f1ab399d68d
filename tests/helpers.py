"""Distributed tests as plain functions, and small stock models to run them on. Needs torch and megatron-core.

A test is a module-level function, because worker processes import it by name:

    def check(width):
        initialize(tp=2)
        model = build_hybrid("M*", nemotron3_torch_stack_spec, hidden_size=width)
        ...
        return something_picklable

    first, second = run_distributed(check, 2, 64)
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

#: TransformerConfig fields of every model in golden/stock_te_models.json.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "ffn_hidden_size": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
}
VOCABULARY = 256

#: Imported once by the server that workers are forked from; together they cost seconds. Our own package
#: is not among them: the server's module path need not be this process's.
PRELOAD = [
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.optimizer.distrib_optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.training",
]

#: Pattern and extra fields of the golden models; the layouts are (world size, arguments of `initialize`).
GOLDEN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "super_like": ("MEM*E/*E/*E", {"mtp_use_repeated_layer": True, "moe_latent_size": 32}),
    "dense_hybrid": ("M-M*-", {}),
}
GOLDEN_LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "": (1, {}),
    "_tp2_ep2": (2, {"tp": 2, "ep": 2, "etp": 1}),
}


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    apart: bool = False,
    children: bool = False,
) -> list[Any]:
    """Call `function(*args)` on every rank of a gloo world on the CPU; return the ranks' results in order.

    Each rank runs inside `cpu_mode` with torch.distributed initialized; `initialize` makes Megatron's
    groups. Ranks are processes of their own, forked from a server that has imported Megatron and holds
    nothing of this process; a world of one runs right here and is taken down again. `function` must be
    importable by name, arguments and results picklable.

    Args:
        timeout: seconds, imports included; not for a world of one right here.
        apart: a process of its own for a world of one, too. Megatron's DistributedDataParallel is never
            freed, and with it stay some sixty gloo threads, which poll.
        children: the ranks start processes of their own (Megatron's checkpoint writer).

    Raises:
        RuntimeError: a rank failed; the message has the traceback of the one that failed first.
        TimeoutError: some rank did not finish. Either way no process is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        if world_size == 1 and not apart:
            with mock.patch.dict(os.environ), _rank(0, 1, store, timeout):
                return [function(*args)]
        call = pickle.dumps((function, args, dict(os.environ)))
        return _start(call, world_size, store, timeout, daemon=not children)


def run_fresh(function: Callable[..., Any], *args: Any, timeout: float = 120) -> Any:
    """Call `function(*args)` in a process of its own that has imported Megatron and nothing else.

    As `run_distributed`, without CPU mode and without a world.
    """
    return _start(pickle.dumps((function, args, dict(os.environ))), 1, None, timeout, daemon=False)[0]


def run_launcher(argv: list[str], world_size: int, timeout: float = 120) -> str:
    """What `torchrun --nproc-per-node WORLD_SIZE -m megatron_nemotron3.run ARGV…` prints, ranks in order.

    The processes are forked with Megatron imported, which saves the ten seconds a start costs.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with mock.patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}):
        call = pickle.dumps((_launch, (argv,), dict(os.environ)))
    # Its checkpoint writer is a child of its own.
    return "".join(_start(call, world_size, None, timeout, daemon=False))


def _launch(argv: list[str]) -> str:
    from megatron_nemotron3.run import main

    output = io.StringIO()
    with redirect_stdout(output):
        try:
            main(argv)
        except SystemExit as end:  # --exit-interval leaves this way
            if end.code:
                raise
    return output.getvalue()


def _start(call: bytes, world_size: int, store: str | None, timeout: float, daemon: bool) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    deadline = time.monotonic() + timeout
    ranks: dict[Connection, int] = {}
    processes: list[BaseProcess] = []
    results: dict[int, Any] = {}
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_worker,
                args=(sender, call, rank, world_size, store, timeout),
                daemon=daemon,
            )
            process.start()
            sender.close()  # so that a dead worker reads as end of file
            processes.append(process)
            ranks[receiver] = rank
        while len(results) < world_size:
            pending = [c for c, rank in ranks.items() if rank not in results]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(set(range(world_size)) - set(results))
                raise TimeoutError(f"ranks {late} of {world_size} did not finish in {timeout} s")
            failures = []
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = ranks[connection]
                when, result, error = _receive(connection, processes[rank])
                if error is None:
                    results[rank] = result
                else:
                    failures.append((when, rank, error))
            if failures:
                _, rank, error = min(failures)
                raise RuntimeError(f"rank {rank} of {world_size} failed:\n{error}")
        return [results[rank] for rank in range(world_size)]
    finally:
        _reap(processes, patience=5.0 if len(results) == world_size else 0.0)


def _receive(connection: Connection, process: BaseProcess) -> tuple[float, Any, str | None]:
    """(time, result, traceback or None) of a rank that reported or died."""
    try:
        message: tuple[float, Any, str | None] = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(5)
        return time.monotonic(), None, f"process ended with exit code {process.exitcode}, no traceback"
    return message


def _reap(processes: list[BaseProcess], patience: float) -> None:
    """Let the processes end on their own for `patience` seconds, then end them."""
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    for end in (BaseProcess.terminate, BaseProcess.kill):
        for process in processes:
            if process.is_alive():
                end(process)
        for process in processes:
            process.join(3)


def _worker(
    sender: Connection, call: bytes, rank: int, world_size: int, store: str | None, timeout: float
) -> None:
    try:
        import torch

        torch.set_num_threads(1)
        function, args, environment = pickle.loads(call)
        os.environ.clear()  # the server's is as old as the server
        os.environ.update(environment)
        if store is None:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        with nullcontext() if store is None else _rank(rank, world_size, store, timeout):
            try:
                message = pickle.dumps((0.0, function(*args), None))
                if store is not None:
                    torch.distributed.barrier()  # nobody leaves while another still talks to it
            except BaseException:
                _report_failure(sender)  # before leaving makes other ranks fail, too
                raise
        sender.send_bytes(message)
    except BaseException:
        _report_failure(sender)


def _report_failure(sender: Connection) -> None:
    """Send the traceback, once."""
    if not sender.closed:
        sender.send_bytes(pickle.dumps((time.monotonic(), None, traceback.format_exc())))
        sender.close()


@contextmanager
def _rank(rank: int, world_size: int, store: str, timeout: float) -> Iterator[None]:
    """Be one rank: CPU mode, environment, process group; afterwards none of it is left."""
    import torch
    from megatron.core import parallel_state

    from megatron_nemotron3.cpu import cpu_mode
    from megatron_nemotron3.layers.upstream import forget_moe_metrics

    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
        os.environ[name] = str(value)
    with cpu_mode(), torch.random.fork_rng(devices=[]):
        torch.distributed.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
        )
        try:
            yield
        finally:
            forget_moe_metrics()
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def initialize(
    tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1, vpp: int | None = None, seed: int = 1234
) -> None:
    """Make Megatron's process groups (data parallel: what is left) and seed its RNG streams.

    Sequence parallelism is no group: `build_hybrid` turns it on where TP > 1.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def hybrid_config(pattern: str, **overrides: Any) -> Any:
    """A TransformerConfig for `pattern`: `SIZES`, the layout of `initialize`, then `overrides`."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.activations import squared_relu
    from megatron.core.transformer import TransformerConfig

    from megatron_nemotron3.layers.upstream import find

    parse_hybrid_pattern = find("megatron.core.models.hybrid.hybrid_layer_allocation:parse_hybrid_pattern")

    parsed = parse_hybrid_pattern(pattern)
    assert parsed.main_pattern is not None
    tp = parallel_state.get_tensor_model_parallel_world_size()
    fields: dict[str, Any] = {
        **SIZES,
        "num_layers": len(parsed.main_pattern.replace("|", "")),
        "mtp_num_layers": parsed.mtp_num_depths or None,
        "activation_func": squared_relu,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "is_hybrid_model": True,
    }
    if "E" not in pattern:
        fields = {k: v for k, v in fields.items() if not k.startswith("moe_") and k != "num_moe_experts"}
    return TransformerConfig(**{**fields, **overrides})


def build_hybrid(pattern: str, spec: Any, *, seq_length: int = 64, **overrides: Any) -> Any:
    """Stock `HybridModel` for this rank, untied and without positional embedding.

    Args:
        pattern: `--hybrid-layer-pattern`, with `|` between pipeline stages and `/` before MTP depths.
        spec: ModuleSpec of the layer stack.
        overrides: TransformerConfig fields over `SIZES` and the layout of `initialize`.
    """
    from megatron.core import parallel_state

    from megatron_nemotron3.layers.upstream import HybridModel

    return HybridModel(
        hybrid_config(pattern, **overrides),
        spec,
        VOCABULARY,
        seq_length,
        hybrid_layer_pattern=pattern,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def describe(model: Any) -> dict[str, Any]:
    """What golden/stock_te_models.json records of a model: `parameters` and this rank's `checkpoint`."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
    from megatron.core.dist_checkpointing.validation import (
        determine_global_metadata,
        validate_sharding_integrity,
    )

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    # Upstream's own check before a save: the main replicas of all ranks cover every tensor exactly once.
    validate_sharding_integrity(determine_global_metadata(state)[1])
    checkpoint: dict[str, Any] = {}
    for value in nested_values(state):
        if isinstance(value, ShardedTensor):
            entry = checkpoint.setdefault(value.key, {"global_shape": [*value.global_shape], "chunks": []})
            chunk = {"offset": [*value.global_offset], "shape": [*value.local_shape]}
            # A layer that MTP repeats, or replicas, name the same chunk again.
            if chunk not in entry["chunks"]:
                entry["chunks"].append(chunk)
        else:
            checkpoint[value.key] = "object"
    parameters = {name: [*p.shape] for name, p in model.named_parameters()}
    return {"parameters": parameters, "checkpoint": checkpoint}


def describe_golden_model(model: str, layout: dict[str, int], spec_module: str, spec_name: str) -> Any:
    """Build a golden model with the named spec on this rank and describe it; for `run_distributed`."""
    from megatron.core.transformer.spec_utils import import_module

    initialize(**layout)
    pattern, fields = GOLDEN_MODELS[model]
    built = build_hybrid(pattern, import_module((spec_module, spec_name)), **fields)
    classes = {"decoder": _class_name(built.decoder), "final_norm": _class_name(built.decoder.final_norm)}
    return {**describe(built), **classes}


def _class_name(module: Any) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def golden_file() -> Path:
    """The recorded models."""
    return Path(__file__).with_name("golden") / "stock_te_models.json"
