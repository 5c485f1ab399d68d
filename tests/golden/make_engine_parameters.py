"""Record what vLLM's own loaders make of a refit's stream: writes engine_parameters.json beside itself.

    pip install vllm==0.33.0        # beside torch for CPUs, in an environment of its own
    VLLM_TARGET_DEVICE=cpu python tests/golden/make_engine_parameters.py [FILE]

Runs on a CPU: vLLM builds its models and loads weights there, one process for each rank, over gloo. It has no
kernel for experts without a gate on a CPU and refuses them, so two of its checks are switched off. Loading
calls no kernel.

Per case (model, vocabulary, servers): the ranks' parameters by name ("draft." before those of the MTP model),
with type, shape, and for each rank the CRC-32 of the bytes, or null where it has no such parameter. The
parameters `A` hold an exponent, whose last bit is not the same on all processors: they are rounded to BF16.

Puzzle is left out: its configuration needs code of its repository.
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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))

from megatron_nemotron3.convert import config_json
from megatron_nemotron3.convert.inventory import hf_tensors
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.refit.layouts import Serving, Training

#: Model, its vocabulary if it is another than its own, and the servers' layout.
CASES = (
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
)


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


def _loaded(rank: int, port: int, folder: str, name: str, vocabulary: int | None, layout: str) -> Any:
    """Parameters of one rank: name -> (type, shape, CRC-32)."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from megatron_nemotron3.refit.execute import Refit
    from megatron_nemotron3.refit.planner import make_plan
    from tests.support.refit_reference import trained

    config = model(name, vocabulary)
    serving = Serving.of(config, layout)
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
    found = {}
    with set_current_vllm_config(options):
        init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        initialize_model_parallel(serving.tp, serving.pp, backend="gloo")
        training = Training.of(config, f"dp={ranks},ep={ranks}" if config.is_moe else f"dp={ranks}")
        refit = Refit(
            make_plan(training, Serving.of(config, f"replicas={ranks}", engine="hf"), colocated=True)
        )
        source = trained(config, training.layout, rank, numbers(config))
        models = {"": None}
        if serving.drafts:
            models["draft."] = options.speculative_config.draft_model_config
        for prefix, which in models.items():
            built = initialize_model(options, model_config=which)
            parameters = dict(built.named_parameters())
            for parameter in parameters.values():
                parameter.data.zero_()
            said = built.load_weights(refit.stream(source))
            if missing := parameters.keys() - said:
                raise ValueError(f"{name} {layout}: vLLM did not load {sorted(missing)}")
            for own, parameter in parameters.items():
                kind = str(parameter.dtype).removeprefix("torch.")
                found[prefix + own] = kind, list(parameter.shape), crc(own, parameter)
    return found


def _process(queue: Any, rank: int, *case: Any) -> None:
    try:
        queue.put((rank, _loaded(rank, *case)))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def record(name: str, vocabulary: int | None, layout: str) -> dict[str, Any]:
    """Load a case's model on all its ranks."""
    config = model(name, vocabulary)
    serving = Serving.of(config, layout)
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        (Path(folder) / "config.json").write_text(json.dumps(config_json.write(config)))
        queue: Any = context.Queue()
        case = (port, folder, name, vocabulary, layout)
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
                raise RuntimeError(f"{name} {layout}, rank {rank}: {result}")
        for process in processes:
            process.join()
    merged: dict[str, Any] = {}
    for rank, result in sorted(results.items()):
        for own, (kind, shape, sum_) in result.items():
            kept = merged.setdefault(own, [kind, shape, [None] * serving.size])
            assert kept[:2] == [kind, shape], (own, kept, kind, shape)
            kept[2][rank] = sum_
    return merged


def main(file: Path) -> None:
    """Record every case."""
    import vllm
    import vllm.model_executor.models.nemotron_h
    import vllm.model_executor.models.nemotron_h_mtp

    _ungated_experts_on_a_cpu()
    only = sys.argv[2:]
    cases = {}
    for name, vocabulary, layout in CASES:
        key = f"{name} {vocabulary or get(name).vocab_size} {layout}"
        if not only or key in only:
            cases[key] = record(name, vocabulary, layout)
            print(f"{key}: {len(cases[key])} parameters", flush=True)
    lines = [
        f"{json.dumps(case)}: {{\n"
        + ",\n".join(f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in parameters.items())
        + "\n}"
        for case, parameters in cases.items()
    ]
    text = f'{{"vllm": "{vllm.__version__}", "cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    json.loads(text)
    file.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).with_name("engine_parameters.json"))
