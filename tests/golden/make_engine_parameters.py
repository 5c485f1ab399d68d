"""Record what an engine's own loaders make of a refit's stream: writes engine_parameters.json beside itself.

    pip install vllm==0.33.0        # beside torch for CPUs, in an environment of its own
    VLLM_TARGET_DEVICE=cpu python tests/golden/make_engine_parameters.py vllm [CASE ...]

    pip install --no-deps sglang==0.5.23        # and what its import asks for; no kernels are needed
    python tests/golden/make_engine_parameters.py sglang [CASE ...]

Runs on a CPU: the engines build their models and load weights there, one process for each rank, over gloo.
Loading calls no kernel. vLLM has no kernel for experts without a gate on a CPU and refuses them, so two of
its checks are switched off. SGLang has no radix cache for Mamba on a CPU: an option switches it off.

Per case (model, vocabulary, servers): the ranks' parameters by name ("draft." before those of the MTP model),
with type, shape, and for each rank the CRC-32 of the bytes, or null where it has no such parameter. The
parameters `A` hold an exponent, whose last bit is not the same on all processors: they are rounded to BF16.
SGLang's MTP model begins with an embedding and an output layer of its own, which a server replaces by the
target's (`set_embed_and_head`): they are left out.
vLLM is without Puzzle, whose configuration needs code of its repository there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
import zlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.inventory import hf_tensors
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.models import Nemotron3Config, get

#: Model, its vocabulary if it is another than its own, and the servers' layout.
CASES: dict[str, tuple[tuple[str, int | None, str], ...]] = {
    "vllm": (
        ("super-tiny", None, "tp=1"),
        ("super-tiny", None, "tp=2"),
        ("super-tiny", None, "tp=2,ep=2"),
        ("super-tiny", 2000, "tp=4"),
        ("super-tiny", None, "pp=2,mtp=0"),
        ("super-tiny", None, "dp=2"),
        ("super-tiny", None, "dp=2,ep=2"),
        ("super-tiny", None, "tp=2,dp=2,ep=4"),
        ("nano-tiny", None, "tp=2,pp=2"),
        ("nano-4b-tiny", None, "tp=2"),
        ("nemotron-h-8b-tiny", 2010, "tp=2,pp=4"),
    ),
    "sglang": (
        ("super-tiny", None, "tp=1"),
        ("super-tiny", None, "tp=2"),
        ("super-tiny", None, "tp=2,ep=2"),
        ("super-tiny", 2000, "tp=4"),
        ("super-tiny", None, "pp=2,mtp=0"),
        ("super-tiny", None, "tp=2,dp=2"),
        ("super-tiny", None, "tp=4,dp=2,ep=2"),
        ("super-tiny", None, "tp=4,ep=4"),
        ("nano-tiny", None, "tp=2,pp=2"),
        ("nano-4b-tiny", None, "tp=2"),
        ("puzzle-tiny", None, "tp=2"),
        ("nemotron-h-8b-tiny", 2010, "tp=2,pp=4"),
    ),
}
#: SGLang's MTP model has them until a server replaces them.
REPLACED = ("draft.model.embed_tokens.weight", "draft.lm_head.weight")


def model(name: str, vocabulary: int | None) -> Nemotron3Config:
    """The model of a case."""
    config = get(name)
    return config if vocabulary is None else config.but(vocab_size=vocabulary)


def numbers(config: Nemotron3Config) -> dict[str, Tensor]:
    """Tensors under Hugging Face's names, the same on every machine and with every version of torch."""
    found = {}
    for tensor in hf_tensors(config, dtype="bfloat16"):
        places = torch.arange(torch.Size(tensor.shape).numel()) * 2654435761 + zlib.crc32(
            tensor.name.encode()
        )
        values = (places >> 7).remainder(4093).float() / 2048 - 1
        found[tensor.name] = values.view(tensor.shape).to(getattr(torch, tensor.dtype))
    return found


def crc(name: str, tensor: Tensor) -> int:
    """CRC-32 of a parameter's bytes; an exponent is rounded first."""
    held = tensor.detach().bfloat16() if name.endswith(".A") else tensor.detach()
    return zlib.crc32(held.contiguous().view(torch.uint8).numpy().tobytes())


def _ungated_experts_on_a_cpu() -> None:
    from vllm.model_executor.layers.fused_moe import config, unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.platforms import current_platform

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(current_platform, name)

        def is_cuda_alike(self) -> bool:
            return True

    config.current_platform = Platform()
    unquantized_fused_moe_method.select_unquantized_moe_backend = lambda **_: (
        UnquantizedMoeBackend.TRITON,
        None,
    )


def _vllm(rank: int, port: int, folder: str, serving: EngineLayout) -> Iterator[tuple[str, Any]]:
    """Yield vLLM's models of one rank, with what goes before their parameters' names."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    ranks = serving.size
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    options = EngineArgs(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=256,
        tensor_parallel_size=serving.tp,
        pipeline_parallel_size=serving.pp,
        data_parallel_size=serving.dp,
        enable_expert_parallel=serving.ep > 1,
        distributed_executor_backend="external_launcher",
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if serving.drafts else None,
    ).create_engine_config()
    torch.set_default_dtype(torch.bfloat16)
    with set_current_vllm_config(options):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(serving.tp, serving.pp, backend="gloo")
        yield "", initialize_model(options)
        if serving.drafts:
            which = options.speculative_config.draft_model_config
            yield "draft.", initialize_model(options, model_config=which)


def _sglang(rank: int, port: int, folder: str, serving: EngineLayout) -> Iterator[tuple[str, Any]]:
    """Yield SGLang's models of one rank, with what goes before their parameters' names."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.layers.dp_attention import initialize_dp_attention
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.models.nemotron_h import NemotronHForCausalLM, logger
    from sglang.srt.models.nemotron_h_mtp import NemotronHForCausalLMMTP
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import ServerArgs

    def unknown(record: Any) -> bool:
        if "not found in params_dict" in record.getMessage():
            raise ValueError(record.getMessage())
        return True

    logger.addFilter(unknown)
    os.environ["SGLANG_NCCL_SO_PATH"] = "none"  # it would use NCCL on a CPU where torch has brought it
    options = ServerArgs(
        model_path=folder,
        device="cpu",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        moe_runner_backend="triton",  # the one that takes every number of expert ranks
        tp_size=serving.tp,
        pp_size=serving.pp,
        dp_size=serving.dp,
        enable_dp_attention=serving.dp > 1,
        ep_size=serving.ep,
    )
    place = spawn_world_rank(options, tp_rank=rank % serving.tp, pp_rank=rank // serving.tp)
    publish(options, role="weight_cache_daemon", ranks=SpawnRanks(world_rank=place, gpu_id=0))
    initialize_moe_config()
    init_distributed_environment(serving.size, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
    initialize_model_parallel(backend="gloo")
    initialize_dp_attention(options)
    torch.set_default_dtype(torch.bfloat16)
    config = ModelConfig(model_path=folder, dtype="bfloat16").hf_config
    yield "", NemotronHForCausalLM(config=config)
    if serving.drafts:
        yield "draft.", NemotronHForCausalLMMTP(config=config)


def _loaded(
    rank: int, port: int, folder: str, engine: str, name: str, vocabulary: int | None, layout: str
) -> Any:
    """Parameters of one rank: name -> (type, shape, CRC-32)."""
    from megatron_nemotron3.inference.refit.execute import Refit
    from megatron_nemotron3.inference.refit.planner import make_plan
    from tests.support.refit_reference import trained

    config = model(name, vocabulary)
    serving = EngineLayout.of(config, layout, engine=engine)
    ranks, found, source, refit = serving.size, {}, {}, None
    training = Training.of(config, f"dp={ranks},ep={ranks}" if config.is_moe else f"dp={ranks}")
    for prefix, built in {"vllm": _vllm, "sglang": _sglang}[engine](rank, port, folder, serving):
        if refit is None:
            whole = EngineLayout.of(config, f"replicas={ranks}", engine="hf")
            refit = Refit(make_plan(training, whole, colocated=True))
            source = trained(config, training.layout, rank, numbers(config))
        parameters = dict(built.named_parameters())
        for parameter in parameters.values():
            parameter.data.zero_()
        said = built.load_weights(refit.stream(source))
        if said is not None and (missing := parameters.keys() - said):
            raise ValueError(f"{name} {layout}: {engine} did not load {sorted(missing)}")
        for own, parameter in parameters.items():
            kind = str(parameter.dtype).removeprefix("torch.")
            if engine == "vllm" or prefix + own not in REPLACED:
                found[prefix + own] = kind, list(parameter.shape), crc(own, parameter)
    return found


def _process(queue: Any, rank: int, *case: Any) -> None:
    try:
        queue.put((rank, _loaded(rank, *case)))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def record(engine: str, name: str, vocabulary: int | None, layout: str) -> dict[str, Any]:
    """Load a case's model on all its ranks."""
    config = model(name, vocabulary)
    serving = EngineLayout.of(config, layout, engine=engine)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        (Path(folder) / "config.json").write_text(json.dumps(config_json.write(config)))
        queue: Any = context.Queue()
        case = (port, folder, engine, name, vocabulary, layout)
        processes = [context.Process(target=_process, args=(queue, r, *case)) for r in range(serving.size)]
        for process in processes:
            process.start()
        results = {}
        for _ in processes:
            rank, result = queue.get(timeout=600)
            results[rank] = result
            if isinstance(result, str):  # the others may wait for it
                for process in processes:
                    process.kill()
                raise RuntimeError(f"{engine} {name} {layout}, rank {rank}: {result}")
        for process in processes:
            process.join()
    merged: dict[str, Any] = {}
    for rank, result in sorted(results.items()):
        for own, (kind, shape, sum_) in result.items():
            kept = merged.setdefault(own, [kind, shape, [None] * serving.size])
            assert kept[:2] == [kind, shape], (own, kept, kind, shape)
            kept[2][rank] = sum_
    return merged


def main(engine: str, only: list[str]) -> None:
    """Record every case of an engine, or only some; keep the others of the file."""
    if engine == "vllm":
        import vllm.model_executor.models.nemotron_h
        import vllm.model_executor.models.nemotron_h_mtp  # noqa: F401

        _ungated_experts_on_a_cpu()
    if engine == "sglang":
        import sglang.srt.models.nemotron_h_mtp  # noqa: F401
    file = Path(__file__).with_name("engine_parameters.json")
    found = json.loads(file.read_text()) if file.exists() else {}
    known = found.get(engine, {}).get("cases", {})
    cases = {}
    for name, vocabulary, layout in CASES[engine]:
        key = f"{name} {vocabulary or get(name).vocab_size} {layout}"
        if only and key not in only:
            cases[key] = known[key]
            continue
        cases[key] = record(engine, name, vocabulary, layout)
        print(f"{key}: {len(cases[key])} parameters", flush=True)
    found[engine] = {"version": metadata.version(engine), "cases": cases}
    parts = []
    for one, facts in found.items():
        blocks = [
            f"{json.dumps(case)}: {{\n"
            + ",\n".join(f"{json.dumps(name)}: {json.dumps(how)}" for name, how in parameters.items())
            + "\n}"
            for case, parameters in facts["cases"].items()
        ]
        version = json.dumps(facts["version"])
        parts.append(
            f'{json.dumps(one)}: {{"version": {version}, "cases": {{\n' + ",\n".join(blocks) + "\n}}"
        )
    text = "{" + ",\n".join(parts) + "}\n"
    json.loads(text)
    file.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
