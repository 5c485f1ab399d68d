"""A Megatron model on the ranks of a layout, refitted into servers in the same processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_nemotron3.checkpoints.convert.inventory import mappings
from megatron_nemotron3.checkpoints.convert.plan import apply
from megatron_nemotron3.inference.refit.execute import Refit
from megatron_nemotron3.inference.refit.layouts import EngineLayout, Training
from megatron_nemotron3.inference.refit.parts import training_tensors
from megatron_nemotron3.inference.refit.planner import make_plan
from megatron_nemotron3.launch import Launch, ParallelLayout
from megatron_nemotron3.launch.plan.state import padded_vocab_size
from megatron_nemotron3.models import get
from megatron_nemotron3.proof.certify.ranks import initialize
from megatron_nemotron3.proof.certify.tensors import gather, pieces
from megatron_nemotron3.train.build import build
from tests.support.refit_ranks import empty_parameters
from tests.support.refit_reference import loaded


def built_and_refitted(
    model: str, sizes: dict[str, int], engine: str, target: dict[str, int], **changes: Any
) -> int:
    """Returns the number of parameters of this rank's server, after comparing them bit for bit."""
    from megatron.core import parallel_state

    config = get(model).but(**changes)
    layout = ParallelLayout(**sizes)
    initialize(**{k: v for k, v in sizes.items() if k not in ("dp", "vpp")}, vpp=sizes.get("vpp"))
    launch = Launch(config=config, layout=layout, precision="fp32", backend="torch")
    chunks = []
    for stage in range(layout.vpp):
        how = {}
        if layout.vpp > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(stage)
            how = {
                "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                "vp_stage": stage,
            }
        chunks.append(build(launch, **how))
    _fill(chunks)
    hf = _exported(config, layout, chunks)
    serving = EngineLayout(config=config, engine=engine, dtype="float32", **target)
    training = Training(config=config, layout=layout)
    refit = Refit(make_plan(training, serving, colocated=True, buffer=1 << 20))
    parameters = None
    if refit.receiver is not None:
        parameters = empty_parameters(refit.plan, refit.receiver)
    refit.run(training_tensors(training, dist.get_rank(), chunks), parameters)
    if parameters is None or refit.receiver is None:
        return 0
    expected = loaded(config, engine, target, refit.receiver, hf)
    expected = {n: t for n, t in expected.items() if serving.drafts or not n.startswith("draft.")}
    assert expected.keys() == parameters.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(tensor, parameters[name])]
    assert not different, different[:3]
    return len(parameters)


def _fill(chunks: list[Any]) -> None:
    """Give every element of the whole model a value of its own, so that no place is like another."""
    from megatron_nemotron3.proof.certify.tensors import sharded

    with torch.no_grad():
        for one in sharded(chunks):
            seed = sum(map(ord, one.key)) * 7919 + sum(ord(c) * i for i, c in enumerate(one.key))
            generator = torch.Generator().manual_seed(seed)
            whole = torch.randn(one.global_shape, generator=generator)
            local = (1,) * one.prepend_axis_num + tuple(one.data.shape)
            part = whole[tuple(slice(o, o + n) for o, n in zip(one.global_offset, local, strict=True))]
            one.data.copy_(part.reshape(one.data.shape))


def _exported(config: Any, layout: Any, chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The model under Hugging Face's names, by the converter from the checkpoint's keys and global shapes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, pieces(chunks))
    whole = gather(everyone)
    found: dict[str, torch.Tensor] = {}
    for mapping in mappings(config, padded_vocab_size=padded_vocab_size(config, layout)):
        found |= apply(mapping.to_hf(), {t.name: whole[t.name] for t in mapping.megatron})
    return found
