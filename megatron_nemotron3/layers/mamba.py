"""The Mamba-2 mixer (arXiv 2405.21060) on plain torch, in Megatron's tensor-parallel form.

    x [s, b, d] --in_proj (RMSNorm fused)--> z | x | B | C | dt
                                             |   |   |   |   |
                                             | conv + SiLU   softplus(dt + dt_bias)
                                             |     |         |
         h_t = exp(dt A) h_{t-1} + dt B_t x_t;  y_t = C_t h_t + D x_t       (SSD scan)
                                             |     |
                             group RMSNorm(y * SiLU(z)) --out_proj--> [s, b, d]

Upstream's `MambaMixer` cannot be built without mamba-ssm and CUDA. This subclass keeps its checkpoint layout
(`sharded_state_dict` splits z, x, B, C, dt) and its context-parallel exchange, and replaces construction and
computation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_nemotron3.layers.context_parallel import PackedContextParallel, cu_seqlens
from megatron_nemotron3.layers.conv import causal_conv1d
from megatron_nemotron3.layers.functional import JoinedGradient, Place
from megatron_nemotron3.layers.norm import GatedGroupRMSNorm, parameter_device
from megatron_nemotron3.layers.ssd import select_scan, seq_idx_from_cu_seqlens, ssd_chunked
from megatron_nemotron3.models.config import GATED_NORM_EPSILON
from megatron_nemotron3.precision.settings import library_kernels_enabled

#: Initial A ~ U(1, 16) and dt ~ exp U(log 1e-3, log 1e-1), as in the Mamba-2 code and Megatron.
A_INIT_RANGE = (1.0, 16.0)
DT_INIT_RANGE = (1e-3, 1e-1)
DT_INIT_FLOOR = 1e-4


@dataclass(frozen=True)
class MixerSizes:
    """Widths of the mixer, or of one rank's part of it, in elements."""

    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        """Width of z and of x."""
        return self.heads * self.head_dim

    @property
    def conv(self) -> list[int]:
        """Widths of x, B, C, the input of the convolution."""
        return [self.inner, self.groups * self.state, self.groups * self.state]

    @property
    def in_proj(self) -> list[int]:
        """Widths of z, x, B, C, dt in `in_proj`'s output."""
        return [self.inner, *self.conv, self.heads]


class Mamba2Mixer(MambaMixer):
    """Mamba-2 mixer on plain torch.

    Its parameters are upstream's: `in_proj conv1d_weight conv1d_bias dt_bias A_log D norm out_proj`.

    Args:
        submodules: specs of `in_proj` (with the input norm fused) and `out_proj`.
        d_model, d_conv: hidden size, width of the convolution's kernel.
        chunk_size: tokens per SSD chunk; the result does not depend on it.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MambaMixerSubmodules,
        d_model: int,
        d_conv: int = 4,
        chunk_size: int = 128,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int = 0,
        name: str | None = None,
    ) -> None:
        # MambaMixer.__init__ raises without mamba-ssm.
        MegatronModule.__init__(self, config)
        assert pg_collection is not None, "pg_collection must be provided for Mamba2Mixer"
        self.pg_collection, self.tp_group = pg_collection, pg_collection.tp
        self.layer_number, self.pp_layer_offset = layer_number, pp_layer_offset
        self.d_model, self.d_conv, self.chunk_size = d_model, d_conv, chunk_size
        self.headdim, self.d_state = config.mamba_head_dim, config.mamba_state_dim
        self.ngroups = config.mamba_num_groups
        self.nheads = config.mamba_num_heads or 2 * d_model // config.mamba_head_dim
        if not config.mamba_num_heads and 2 * d_model % config.mamba_head_dim:
            raise ValueError(
                f"d_inner must be evenly divisible by headdim: 2 * hidden_size={2 * d_model} is not by "
                f"mamba_head_dim={config.mamba_head_dim}; pass --mamba-num-heads"
            )
        whole = MixerSizes(self.nheads, self.headdim, self.ngroups, self.d_state)
        self.d_inner = whole.inner
        self.D_has_hdim, self.rmsnorm, self.norm_before_gate = False, True, False
        self.cached_batch_size = None

        tp = self.tp_group.size()
        for what, count in (("mamba_num_heads", self.nheads), ("mamba_num_groups", self.ngroups)):
            if count % tp:
                raise ValueError(f"{what}={count} is not divisible by TP={tp}: use a TP that divides it")
        if self.nheads % self.ngroups:
            raise ValueError(
                f"mamba_num_heads={self.nheads} is not divisible by mamba_num_groups={self.ngroups}"
            )
        self.sizes = MixerSizes(self.nheads // tp, self.headdim, self.ngroups // tp, self.d_state)
        # Names that upstream's sharded_state_dict reads.
        self.nheads_local_tp, self.ngroups_local_tp = self.sizes.heads, self.sizes.groups
        self.d_inner_local_tp = self.sizes.inner

        self._new_own_parameters()
        self.in_proj = build_module(
            submodules.in_proj,
            d_model,
            sum(whole.in_proj),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            tp_group=self.tp_group,
            name=f"{name}.in_proj" if name is not None else None,
        )
        # Each component is split over TP separately; resharding must interleave by these blocks.
        self.in_proj.weight.partition_sizes = self.sizes.in_proj
        self.norm = GatedGroupRMSNorm(
            config,
            self.sizes.inner,
            group_size=self.sizes.inner // self.sizes.groups,
            tp_group=self.tp_group,
            eps=GATED_NORM_EPSILON,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            self.d_inner,
            d_model,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            tp_group=self.tp_group,
            name=f"{name}.out_proj" if name is not None else None,
        )
        self.cp = PackedContextParallel(
            cp_group=pg_collection.cp,
            d_inner_local_tp=self.sizes.inner,
            nheads_local_tp=self.sizes.heads,
            ngroups_local_tp=self.sizes.groups,
            d_state=self.d_state,
            conv1d_weight_cp1=self.conv1d_weight,
            conv1d_bias_cp1=self.conv1d_bias,
            conv1d_padding=d_conv - 1,
            dt_bias_cp1=self.dt_bias,
            A_log_cp1=self.A_log,
            D_cp1=self.D,
            D_has_hdim=False,
        )

    def _new_own_parameters(self) -> None:
        """Create conv1d_weight, conv1d_bias, dt_bias, A_log (FP32) and D (FP32), split over TP on axis 0."""
        config, sizes = self.config, self.sizes
        device = parameter_device(config)
        conv_dim = sum(sizes.conv)

        def parallel(data: Tensor, **marks: Any) -> torch.nn.Parameter:
            parameter = torch.nn.Parameter(data)
            for key, value in {"tensor_model_parallel": True, "partition_dim": 0, **marks}.items():
                setattr(parameter, key, value)
            return parameter

        # The tracker's model-parallel RNG stream differs between tensor-parallel ranks, as it must here.
        with get_cuda_rng_tracker().fork():
            bound = 1 / math.sqrt(self.d_conv)  # fan-in of a depthwise kernel
            weight = torch.empty(conv_dim, 1, self.d_conv, dtype=config.params_dtype, device=device)
            bias = torch.empty(conv_dim, dtype=config.params_dtype, device=device)
            dt = torch.empty(sizes.heads, dtype=torch.float32, device=device)
            a = torch.empty(sizes.heads, dtype=torch.float32, device=device)
            if config.perform_initialization:
                weight.uniform_(-bound, bound)  # kaiming_uniform(a=sqrt(5)) of nn.Conv1d
                bias.uniform_(-bound, bound)
                dt.uniform_(*map(math.log, DT_INIT_RANGE)).exp_().clamp_(min=DT_INIT_FLOOR)
                a.uniform_(*A_INIT_RANGE)
        self.conv1d_weight = parallel(weight, partition_sizes=sizes.conv)
        self.conv1d_bias = parallel(bias, partition_sizes=sizes.conv)
        # The inverse of softplus: softplus(dt_bias) is the dt drawn above.
        self.dt_bias = parallel((dt + torch.log(-torch.expm1(-dt))).to(config.params_dtype))
        self.A_log = parallel(a.log())
        self.D = parallel(torch.ones(sizes.heads, dtype=torch.float32, device=device))

    def forward(
        self,
        hidden_states: Tensor,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """[s, b, d] (or [s / tp, b, d] under sequence parallelism) -> the same shape, and no bias.

        With `packed_seq_params` (thd, b = 1) neither the convolution nor the state crosses a document
        border.
        """
        if inference_context is not None or inference_params is not None:
            raise NotImplementedError("Mamba2Mixer (torch backend) supports training and evaluation only")
        zxbcdt, _ = self.in_proj(hidden_states)  # [s, b, in_proj / tp]
        zxbcdt = self.cp.pre_conv_ssm(zxbcdt, packed_seq_params)  # all tokens, heads / cp
        sizes = self._sizes_of_rank()
        zxbcdt = zxbcdt.transpose(0, 1)
        joined = JoinedGradient(zxbcdt, [sizes.inner, sum(sizes.conv), sizes.heads])
        z, xbc, dt = joined.split(zxbcdt)  # [b, s, ...]

        seq_idx = None
        if packed_seq_params is not None:
            seq_idx = seq_idx_from_cu_seqlens(cu_seqlens(packed_seq_params), zxbcdt.shape[1])

        y = self.scan(xbc, dt, seq_idx, joined.place(1))  # [b, s, inner / tp / cp]
        y, z = y.transpose(0, 1), z.transpose(0, 1)
        if self.cp.cp_size > 1:
            # After the exchange each rank has whole groups of the gated norm again.
            y = self.cp.post_conv_ssm(y.contiguous(), packed_seq_params)
            z = self.cp.post_conv_ssm(z.contiguous(), packed_seq_params)
            return self.out_proj(self.norm(y, z))
        return self.out_proj(self.norm(y, z, lambda: joined.place(0)().transpose(0, 1)))

    def train(self, mode: bool = True) -> Mamba2Mixer:
        """Set the mode only: on main, upstream's mixer also fills a cache for decoding, which ours lacks."""
        return super(MambaMixer, self).train(mode)

    def _sizes_of_rank(self) -> MixerSizes:
        """Widths of this rank's part, divided over tensor and context parallelism."""
        return MixerSizes(self.cp.nheads_local_tpcp, self.headdim, self.cp.ngroups_local_tpcp, self.d_state)

    def scan(self, xbc: Tensor, dt: Tensor, seq_idx: Tensor | None, xbc_gradient: Place = None) -> Tensor:
        """Convolution and state-space scan -> [b, s, inner], before gate and norm. Decays and state are FP32.

        Args:
            xbc: [b, s, inner + 2 * groups * state], output of in_proj.
            dt: [b, s, heads] before bias and softplus.
            seq_idx: [1, s] document of each token, or None.
        """
        b, s, _ = xbc.shape
        sizes = self._sizes_of_rank()
        weight, bias = self.cp.get_conv1d_weight(), self.cp.get_conv1d_bias()
        xbc = causal_conv1d(xbc, weight, bias, seq_idx=seq_idx, x_gradient=xbc_gradient)
        joined = JoinedGradient(xbc, sizes.conv)
        x, B, C = joined.split(xbc)
        ssd: Any = select_scan(x) if library_kernels_enabled() else ssd_chunked
        # Our own scan writes its gradients side by side; kernels allocate theirs, which are copied.
        places = {"gradients": tuple(map(joined.place, range(3)))} if ssd is ssd_chunked else {}
        y = ssd(
            x.reshape(b, s, sizes.heads, sizes.head_dim),
            F.softplus(dt.float() + self.cp.get_dt_bias().float()),
            -torch.exp(self.cp.get_A_log().float()),
            B.reshape(b, s, sizes.groups, sizes.state),
            C.reshape(b, s, sizes.groups, sizes.state),
            D=self.cp.get_D().float(),
            chunk_size=self.chunk_size,
            seq_idx=seq_idx,
            **places,
        )
        return y.reshape(b, s, sizes.inner)
