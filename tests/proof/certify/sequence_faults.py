"""Faults along the sequence and the depth: context parallelism, packed documents, MTP, stages, the loss.

Every function is called once on each rank before anything is built, and patches what a rank then calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.ssm.mamba_context_parallel import MambaContextParallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention

from megatron_nemotron3.layers.attention import TorchCoreAttention
from megatron_nemotron3.layers.context_parallel import PackedContextParallel
from megatron_nemotron3.layers.mtp import LossHooks, PhysicalBorders
from megatron_nemotron3.layers.stack import Nemotron3Stack
from tests.proof.certify.patching import arguments, in_place_of, result, wrap

MTP = "megatron.core.transformer.multi_token_prediction"
MIXER = "megatron_nemotron3.layers.mamba"


def cp_positions_shifted() -> None:
    """Each context-parallel rank masks its queries as if it held the tokens of the next rank."""

    def make(attend: Any) -> Any:
        def shifted(self: Any, *tensors: Any) -> Any:
            own = self.cp_group
            self.cp_group = SimpleNamespace(size=own.size, rank=lambda: (own.rank() + 1) % own.size())
            found = attend(self, *tensors)
            self.cp_group = own
            return found

        return shifted

    wrap(TorchCoreAttention, "_attend", make)


def cp_tokens_in_rank_order() -> None:
    """Mamba sees the tokens in the order of ranks, not in that of the sequence."""
    for name in ("_undo_attention_load_balancing", "_redo_attention_load_balancing"):
        in_place_of("megatron.core.ssm.mamba_context_parallel", name, lambda tensor, *args: tensor)


def cp_document_order() -> None:
    """Mamba takes a pack for one document when it puts the tokens of context-parallel ranks in order."""
    plain = MambaContextParallel
    in_place_of(
        PackedContextParallel, "pre_conv_ssm", lambda self, t, packed=None: plain.pre_conv_ssm(self, t)
    )
    in_place_of(
        PackedContextParallel, "post_conv_ssm", lambda self, t, packed=None: plain.post_conv_ssm(self, t)
    )


def cp_heads_shifted() -> None:
    """A context-parallel rank decays its heads with the A of other heads."""

    def make(slice_of: Any) -> Any:
        def other(self: Any, parameter: Any, *args: Any, **kwargs: Any) -> Any:
            size = self.nheads_local_tpcp if self.cp_size > 1 else 0
            return slice_of(self, parameter.roll(size), *args, **kwargs)

        return other

    wrap(MambaContextParallel, "_slice_vector_param", make)


def cp_kv_gradient_local() -> None:
    """Gradients of gathered keys and values are cut, not summed over context-parallel ranks."""

    gather = "gather_from_sequence_parallel_region"
    arguments("megatron_nemotron3.layers.attention", gather, tensor_parallel_output_grad=False)


def mtp_tokens_of_cp_rank() -> None:
    """Each context-parallel rank divides the MTP loss by its own number of tokens."""

    def local(self: Any, config: Any, mask: Any, places: Any, group: Any, first: int) -> Any:
        self._gradient = self._logged = None
        return mask

    in_place_of(LossHooks, "_weights", local)


def mtp_borders_without_padding() -> None:
    """MTP shifts at the borders of the documents without their padding."""

    def of(cls: Any, packed: Any, total: int, shiftable: Any = None) -> Any:
        borders = object.__new__(cls)
        borders.__dict__.update(vars(packed), caller=packed, shiftable=shiftable)
        return borders

    in_place_of(PhysicalBorders, "of", classmethod(of))


def mtp_without_mask() -> None:
    """The model gets no loss mask, so the MTP loss counts what the main loss leaves out."""

    def make(loss: Any) -> Any:
        def unmasked(*args: Any, **kwargs: Any) -> Any:
            if "loss_mask" in kwargs:
                kwargs["loss_mask"] = torch.ones_like(kwargs["loss_mask"])
            return loss(*args, **kwargs)

        return unmasked

    wrap("megatron.core.models.hybrid.hybrid_model", "process_mtp_loss", make)


def mamba_state_leaks() -> None:
    """The state of the scan goes on from one document into the next."""

    def make(select: Any) -> Any:
        def leaking(x: Any) -> Any:
            return lambda *args, **kwargs: select(x)(*args, **{**kwargs, "seq_idx": None})

        return leaking

    arguments(MIXER, "ssd_chunked", seq_idx=None)
    wrap(MIXER, "select_scan", make)


def convolution_leaks() -> None:
    """The convolution sees the last tokens of the document before."""
    arguments(MIXER, "causal_conv1d", seq_idx=None)


def attention_leaks() -> None:
    """Tokens attend to documents before their own."""
    result("megatron_nemotron3.layers.attention", "document_borders", lambda borders: borders[[0, -1]])


def stage_drops_last_layer() -> None:
    """Every stage but the last leaves out its last layer."""

    def make(init: Any) -> Any:
        def short(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            if not self.post_process:
                self.layers[-1].forward = _passed_on

        return short

    wrap(Nemotron3Stack, "__init__", make)


def _passed_on(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    return hidden_states, None


def key_and_value_swapped() -> None:
    """Tensor-parallel ranks other than the first take keys for values."""

    def make(split: Any) -> Any:
        def swapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            query, key, value, *rest = split(self, *args, **kwargs)
            if parallel_state.get_tensor_model_parallel_rank() > 0:
                key, value = value, key
            return query, key, value, *rest

        return swapped

    wrap(SelfAttention, "get_query_key_value_tensors", make)


def logits_gathered() -> None:
    """The loss of a cut vocabulary gets logits that are gathered already."""

    def make(loss: Any) -> Any:
        def gathered(logits: Any, *args: Any, **kwargs: Any) -> Any:
            return loss(gather_from_tensor_model_parallel_region(logits), *args, **kwargs)

        return gathered

    wrap("megatron.core.tensor_parallel", "vocab_parallel_cross_entropy", make)
