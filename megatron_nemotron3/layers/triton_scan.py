"""The SSD scan (arXiv 2405.21060, section 6) in Triton: forward and backward, no atomics.

Sequences are cut into cells of `CHUNK` tokens. A few torch operations compute all values that are scalars per
token and head (time steps, cumulative log decays, documents, gradients of decays). The kernels compute the
rest, which has a head or state dimension.

Below, `enter` is the weight of the entering state at a token, `leave` the weight of a token in the leaving
state, and u = dt * x:

    forward    cell_states      what each cell adds to the state: sum leave * u (x) B
               pass_states      the recurrence over cells, which gives the state entering each cell
               outputs          y from the entering state and from the tokens of the cell
    backward   cell_states      sum enter * dy (x) C, then pass_states in reverse: the gradient of the
                                state leaving each cell; entering states are recomputed
               head_gradients   per cell and head: dx, ddt as a factor of u, gradients of log decays, dD
               group_gradients  per cell and group: dB and dC, summed over the group's heads in order

Products take BF16 factors if x, B and C are BF16, else FP32; sums, decays and states are FP32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers import triton_scan_kernels as kernels
from megatron_nemotron3.layers.chunked_scan import LOG_DECAY_FLOOR, Inputs, document_starts
from megatron_nemotron3.layers.functional import on_device_of, unit_stride

#: Tokens per cell. With 64 the accumulators of `group_gradients` (dB, dC, scores) fit the registers.
CHUNK = 64
#: Largest head dimension, state size and product of both: one program holds a head's state [p, n]. Within
#: these limits the kernels, compiled for SM 9.0, stay within its 227 KiB of shared memory.
MAX_HEAD, MAX_STATE, MAX_ELEMENTS = 128, 256, 128 * 128
#: Largest state size of FP32 products on SM 10: beyond it `group_gradients` needs more than 512 columns of
#: tensor memory, and Triton compiles a trap. 128 is the published size, in BF16.
MAX_STATE_FP32_SM10 = 64
#: Warps per program, by kernel: 4, or 8 where ptxas (SM 9.0, BF16, p 64, n 128) spills registers with 4; with
#: 8 `group_gradients` still spills 112 bytes, with 16 more. Not timed.
WARPS = {"states": 4, "pass": 4, "outputs": 4, "head_gradients": 8, "group_gradients": 8}
#: `group_gradients` prefetches the next head's tiles if a state has at most this many elements; larger ones
#: would not fit shared memory twice.
PIPELINED_STATE = 64 * 128
#: State elements per program of `pass_states`.
PASS_BLOCK = 512


def ssd_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    chunk_size: int = 128,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
) -> Any:
    """The scan in Triton kernels; differentiable once. Arguments and result as for `ssd.ssd_chunked`.

    Saves only the inputs for backward. Forward allocates one FP32 state [h, p, n] per `CHUNK` tokens,
    backward two.

    Raises:
        ValueError: shapes that do not match, FP64, or a head or state that is too large.
    """
    inputs = Inputs(x, dt, A, B, C, D, initial_state, seq_idx)
    inputs.check()
    problem = unsupported(x, B)
    if problem is not None:
        raise ValueError(f"{problem}: use ssd_chunked")
    y, state = _TritonScan.apply(*inputs)
    return (y, state) if return_final_state else y


def unsupported(x: Tensor, B: Tensor) -> str | None:
    """Why these kernels cannot compute x [b, s, h, p] and B [b, s, g, n]; None if they can."""
    if torch.float64 in (x.dtype, B.dtype):
        return "the Triton scan computes in FP32, but the input is FP64"
    p, n = x.shape[-1], B.shape[-1]
    if p > MAX_HEAD or n > MAX_STATE or _tile_extent(p) * _tile_extent(n) > MAX_ELEMENTS:
        limits = f"{MAX_HEAD} and {MAX_STATE}, {MAX_ELEMENTS} elements in all"
        return f"head dimension {p} and state size {n} exceed the Triton scan's limits ({limits})"
    narrow = x.dtype == B.dtype == torch.bfloat16
    if (
        n > MAX_STATE_FP32_SM10
        and not narrow
        and x.is_cuda
        and torch.cuda.get_device_capability(x.device)[0] == 10
    ):
        return f"the Triton scan in {x.dtype} on SM 10 takes state sizes up to {MAX_STATE_FP32_SM10}, not {n}"
    return None


class _TritonScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        with torch.autocast(inputs.x.device.type, enabled=False), on_device_of(inputs.x):
            return _triton_scan_forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*ctx.saved_tensors)
        with torch.autocast(dy.device.type, enabled=False), on_device_of(dy):
            return _triton_scan_backward(inputs, dy, dstate)


@dataclass(frozen=True)
class _TokenCells:
    """Values per token and head, cut into b * nc cells: FP32 [cells, h, l] unless noted.

    Padding after the last token has dt = 0: it neither decays nor adds to the state.
    """

    dt: Tensor
    a: Tensor  # dt * A, clamped
    #: Cumulative a from the start of the cell, as a sum of two FP32 numbers, so that differences keep FP32
    #: precision after a strong decay.
    hi: Tensor
    lo: Tensor
    enter: Tensor  # weight of the entering state at each token
    leave: Tensor  # weight of each token in the leaving state
    carry: Tensor  # [cells, h] weight of the entering state in the leaving state
    document: Tensor | None  # int32 [cells, l], 0: continues from the previous cell


def _cut_into_cells(inputs: Inputs) -> _TokenCells:
    x, dt, A, seq_idx = inputs.x, inputs.dt, inputs.A, inputs.seq_idx
    b, s, h = dt.shape
    l, floor = CHUNK, LOG_DECAY_FLOOR[torch.float32]
    pad = -s % l

    def cut(t: Tensor) -> Tensor:
        """[b, s, ...] -> [cells, l, ...]."""
        return F.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)).reshape(-1, l, *t.shape[2:])

    dt = cut(dt.float()).transpose(1, 2).contiguous()
    a = (dt * A.float()[:, None]).clamp_min(2 * floor)
    cum = a.double().cumsum(-1)
    hi = cum.float()
    lo = (cum - hi).float()
    enter, leave = hi, (cum[..., -1:] - cum).float()
    enter, leave = (torch.where(t > floor, t.exp(), 0.0) for t in (enter, leave))
    document = None
    if seq_idx is not None:
        document = cut(document_starts(seq_idx)).cumsum(1, dtype=torch.int32)
        enter = enter * (document == 0).unsqueeze(1)
        leave = leave * (document == document[:, -1:]).unsqueeze(1)
    assert dt.shape == (b * triton.cdiv(s, l), h, l) and x.shape[:3] == (b, s, h)
    return _TokenCells(dt, a, hi, lo, enter, leave, enter[..., -1].contiguous(), document)


def _triton_scan_forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    cells = _cut_into_cells(inputs)
    x, B, C = (unit_stride(t) for t in (inputs.x, inputs.B, inputs.C))
    D = None if inputs.D is None else inputs.D.contiguous()
    b, s, h, p = x.shape
    g = B.shape[2]
    state = inputs.state(inputs.initial_state).contiguous()
    entering = _cell_states(x, cells.leave * cells.dt, B, inputs)
    _pass_states(entering, cells.carry, state, reverse=False)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.outputs[(len(cells.dt), h)](
        x, B, C, D, cells.dt, cells.hi, cells.lo, cells.enter, cells.document, entering, y,
        *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], s, h, h // g, p,
        **_kernel_constants(inputs), num_warps=WARPS["outputs"],
    )  # fmt: skip
    return y, state


def _triton_scan_backward(inputs: Inputs, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    cells = _cut_into_cells(inputs)
    x, B, C, dy = (unit_stride(t) for t in (inputs.x, inputs.B, inputs.C, dy))
    D = None if inputs.D is None else inputs.D.contiguous()
    b, s, h, p = x.shape
    g = B.shape[2]
    count, l = len(cells.dt), CHUNK

    # 1. Recompute the state entering each cell, and the gradient of the state leaving it.
    entering = _cell_states(x, cells.leave * cells.dt, B, inputs)
    _pass_states(entering, cells.carry, inputs.state(inputs.initial_state).contiguous(), reverse=False)
    dstate = inputs.state(dstate).contiguous()
    leaving = _cell_states(dy, cells.enter, C, inputs)
    _pass_states(leaving, cells.carry, dstate, reverse=True)

    # 2. Gradients per head, then per group.
    dx = torch.empty(x.shape, dtype=inputs.x.dtype, device=x.device)
    dfactor, denter, dleave, dbetween = (torch.empty_like(cells.dt) for _ in range(4))
    dcarry, dD = (torch.empty_like(cells.carry) for _ in range(2))
    token = (cells.dt, cells.hi, cells.lo, cells.enter, cells.leave, cells.document, entering, leaving)
    strides = (*x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dy.stride()[:3], s, h, h // g, p)
    meta = _kernel_constants(inputs)
    kernels.head_gradients[(count, h)](
        x, B, C, dy, D, *token, dx, dfactor, denter, dleave, dbetween, dcarry, dD, *strides,
        **meta, num_warps=WARPS["head_gradients"],
    )  # fmt: skip
    dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.B, inputs.C))
    kernels.group_gradients[(count, g)](
        x, B, C, dy, *token, dB, dC, *strides, **meta, num_warps=WARPS["group_gradients"],
        num_stages=2 if meta["P"] * meta["N"] <= PIPELINED_STATE else 1,
    )  # fmt: skip

    # 3. The gradient of a step a_t. The step contributes to `enter` from its token on, to `leave` of the
    # tokens before, to the decay between every pair it separates (summed by the kernel), and to `carry`.
    # Summing only these terms gives exact zeros where nothing passes; differences of longer sums would not.
    onward = torch.ones(l, l, device=x.device).tril_()  # [i, t]: t <= i
    dstep = denter @ onward + dleave @ onward.t().triu(1) + dbetween + dcarry.unsqueeze(-1)
    dA = (dstep * cells.dt).sum((0, 2)).to(inputs.A.dtype)
    ddt = (dstep * inputs.A.float()[:, None]).add_(dfactor)
    ddt = ddt.transpose(1, 2).reshape(b, -1, h)[:, :s].to(inputs.dt.dtype)
    dD_ = None if D is None else dD.sum(0).to(D.dtype)
    dinitial = None if inputs.initial_state is None else dstate.to(inputs.initial_state.dtype)
    return dx, ddt, dA, dB, dC, dD_, dinitial, None


def _tile_extent(size: int) -> int:
    """The next power of two of `size`, at least 16, the smallest extent of a Triton product."""
    return max(16, triton.next_power_of_2(size))


def _kernel_constants(inputs: Inputs) -> dict[str, Any]:
    narrow = all(t.dtype == torch.bfloat16 for t in (inputs.x, inputs.B, inputs.C))
    return {
        "n": inputs.B.shape[-1],
        "L": CHUNK,
        "P": _tile_extent(inputs.x.shape[-1]),
        "N": _tile_extent(inputs.B.shape[-1]),
        "DOT": tl.bfloat16 if narrow else tl.float32,
    }


def _cell_states(v: Tensor, weight: Tensor, M: Tensor, inputs: Inputs) -> Tensor:
    """sum over the tokens of each cell of weight * v (x) M: FP32 [b, nc, h, p, n].

    Args:
        v: [b, s, h, p].   weight: FP32 [cells, h, l].   M: [b, s, g, n].
    """
    b, s, h, p = v.shape
    cells, g, n = len(weight), M.shape[2], M.shape[3]
    out = torch.empty(b, cells // b, h, p, n, device=v.device)
    kernels.cell_states[(cells, h)](
        v, weight, M, out, *v.stride()[:3], *M.stride()[:3], s, h, h // g, p,
        **_kernel_constants(inputs), num_warps=WARPS["states"],
    )  # fmt: skip
    return out


def _pass_states(added: Tensor, carry: Tensor, state: Tensor, *, reverse: bool) -> None:
    """state <- carry * state + added over the cells of each row; `added` becomes the state before each cell.

    Args:
        added: [b, nc, h, p, n], overwritten.   carry: [cells, h].   state: [b, h, p, n], overwritten.
        All contiguous FP32.
    """
    b, nc, h, p, n = added.shape
    grid = (b * h, triton.cdiv(p * n, PASS_BLOCK))
    kernels.pass_states[grid](
        added, carry, state, nc, h, p * n, BLOCK=PASS_BLOCK, REVERSE=reverse, num_warps=WARPS["pass"]
    )
