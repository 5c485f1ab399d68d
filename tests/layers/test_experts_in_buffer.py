"""Experts in the buffer of Megatron's distributed optimizer: one tensor of all matrices is a view of it.

DistributedDataParallel lays parameters out in the reverse order of registration, so experts and rows are
taken from the last to the first. A CPU does not do so by itself: here it is told to.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_nemotron3.layers import grouped
from megatron_nemotron3.layers.experts import GroupedExperts
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed

TOKENS = 32
STEPS = 2
#: Form -> whether it launches one product for all experts, and takes them from the last to the first.
FORMS = {"loop": (False, False), "copy": (True, False), "view": (True, True)}
EVEN: dict[str, int] = {"moe_latent_size": 32, "moe_ffn_hidden_size": 64}
#: 192 elements: the end of a bucket is padded to a multiple of 128.
UNEVEN: dict[str, int] = {"moe_latent_size": 8, "moe_ffn_hidden_size": 24}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
Steps = dict[str, dict[str, Any]]


def train_forms(layout: dict[str, int], sizes: dict[str, int], ddp: dict[str, Any]) -> Steps:
    """Steps of the same model with each form of the experts: losses, gradients, weights, what was a view."""
    initialize(**layout)
    return {form: train(*how, sizes, ddp) for form, how in FORMS.items()}


def train(together: bool, reverse: bool, sizes: dict[str, int], settings: dict[str, Any]) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module

    from megatron_nemotron3.specs import nemotron3_torch_stack_spec
    from tests.support.models import VOCABULARY, build_hybrid

    views: list[bool] = []
    stacked, decide = grouped.stacked, GroupedExperts.reverse

    def watched(weights: Any) -> Tensor:
        result = stacked(weights)
        views.append(result.data_ptr() == weights[0].data_ptr())
        return result

    with ExitStack() as stack:
        for owner, name, value in (
            (grouped, "stacked", watched),
            (GroupedExperts, "takes_device_counts", lambda self: together),
            (GroupedExperts, "reverse", lambda self, possible: decide(self, reverse)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        half = {"bf16": True, "params_dtype": torch.bfloat16}
        model = build_hybrid("ME", nemotron3_torch_stack_spec, **sizes, **half)
        distributed = {"use_distributed_optimizer": True, **settings}
        made = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **distributed)
        model = DistributedDataParallel(model.config, made, Float16Module(model.config, model))
        gather = {"overlap_param_gather": settings.get("overlap_param_gather", False)}
        options = OptimizerConfig(lr=1e-4, use_distributed_optimizer=True, **gather, **half)
        optimizer = get_megatron_optimizer(options, [model])
        rank = parallel_state.get_data_parallel_rank()
        losses = []
        gradients: dict[str, Tensor] = {}
        for step in range(STEPS):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            made_from = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randint(0, VOCABULARY, (2, TOKENS), generator=made_from)
            positions = torch.arange(TOKENS).expand(2, -1)
            loss = model(tokens, positions, None, labels=tokens.roll(-1, 1)).float().mean()
            loss.backward()
            finalize_model_grads([model])
            if step == 0:
                gradients = {n: p.main_grad.clone() for n, p in model.named_parameters()}
            optimizer.step()
            losses.append(loss.item())
        starts = {
            name: buffer.param_index_map[p][0]
            for name, p in model.named_parameters()
            for buffer in (*model.buffers, *model.expert_parallel_buffers)
            if p in buffer.param_index_map
        }
        if settings.get("overlap_param_gather"):
            model.disable_forward_pre_hook()  # waits for the last gather
        weights = {n: p.detach().float() for n, p in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights, "views": views, "starts": starts}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Rounding to BF16 on the way: experts that were exchanged would be off by their own size."""
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= 0.02 * value.norm(), name


@pytest.mark.parametrize("settings", [{}, OVERLAP], ids=["plain", "overlapped"])
@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"ep": 2}], ids=["one", "DP2", "EP2"])
def test_view_in_the_buffer(layout: dict[str, int], settings: dict[str, Any]) -> None:
    """Values, gradients and the order of parameters do not depend on the form; only one needs no copy."""
    ranks = 2 if layout else 1
    groups = {name: size for name, size in layout.items() if name != "dp"}
    for forms in run_distributed(train_forms, ranks, groups, EVEN, settings, apart=True):
        assert forms["loop"]["views"] == []
        # FC1 and FC2 of a layer, forward and backward.
        assert forms["copy"]["views"] == [False] * 4 * STEPS
        assert forms["view"]["views"] == [True] * 4 * STEPS
        for form in ("copy", "view"):
            found, wanted = forms[form], forms["loop"]
            assert found["starts"] == wanted["starts"]
            assert found["losses"] == pytest.approx(wanted["losses"], rel=2e-3)
            close(found["gradients"], wanted["gradients"])
            close(found["weights"], wanted["weights"])
        experts = [name for name in forms["loop"]["starts"] if ".mlp.experts.linear_fc1.weight" in name]
        numbers = [int(name.rpartition("weight")[2]) for name in experts]
        assert numbers == list(range(8 // groups.get("ep", 1)))  # as in TransformerEngine's
        starts = [forms["loop"]["starts"][name] for name in experts]
        assert starts == sorted(starts, reverse=True)


def test_copy_where_a_bucket_ends_between_experts() -> None:
    """The gap between two of them is larger, so there is no view; the result is the same."""
    settings = {"overlap_grad_reduce": True, "bucket_size": 400}
    (forms,) = run_distributed(train_forms, 1, {}, UNEVEN, settings, apart=True)
    assert set(forms["view"]["views"]) == {False}
    assert forms["view"]["losses"] == pytest.approx(forms["loop"]["losses"], rel=2e-3)
    close(forms["view"]["gradients"], forms["loop"]["gradients"])
    close(forms["view"]["weights"], forms["loop"]["weights"])


@pytest.mark.parametrize("layout", [{}, {"tp": 2, "ep": 1}], ids=["one", "TP2"])
def test_not_reversed_where_it_is_not_useful(layout: dict[str, int]) -> None:
    """Not before DDP, not by chance on one rank, not if the dispatcher cannot, not with an adapter."""
    found = run_distributed(decisions, 2 if layout else 1, layout)[0]
    assert found == [False, False, False, True, False, False]


def decisions(layout: dict[str, int]) -> list[bool]:
    from megatron_nemotron3.specs import nemotron3_torch_stack_spec
    from tests.support.models import build_hybrid

    initialize(**layout)
    model = build_hybrid("E", nemotron3_torch_stack_spec, params_dtype=torch.bfloat16)
    experts = model.decoder.layers[0].mlp.experts
    with mock.patch.object(GroupedExperts, "takes_device_counts", lambda self: True):
        weights = [linear.weights() for linear in (experts.linear_fc1, experts.linear_fc2)]
        for each in weights:
            grouped.one_allocation(each)
        found = [experts.reverse(True)]
        for each in weights:  # as another rank's allocator may not place them
            parts = sorted((w.data.clone() for w in each), key=Tensor.data_ptr, reverse=True)
            for weight, part in zip(each, parts, strict=True):
                weight.data = part
        found.append(experts.reverse(True))
        for each in weights:
            grouped.one_allocation(each[::-1])
        found += [experts.reverse(False), experts.reverse(True)]
        experts.separate = True
        found.append(experts.reverse(True))
    experts.separate = False
    return [*found, experts.reverse(True)]  # on a CPU
