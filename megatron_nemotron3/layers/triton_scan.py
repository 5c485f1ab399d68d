"""The SSD scan (arXiv 2405.21060, section 6) in Triton: forward and backward, no atomics.

Sequences are cut into cells of `CHUNK` tokens. What has one value per token and head (time steps,
cumulative log decays, documents, the gradients of decays) is left to a few torch operations; the kernels
do what has a head or state dimension.

Below, `enter` is the weight of the entering state at a token, `leave` that of a token in the leaving
state, u = dt * x:

    forward    cell_states      what each cell adds to the state: sum leave * u (x) B
               pass_states      the recurrence over cells; leaves the state entering each cell
               outputs          y from the entering state and from the tokens of the cell
    backward   cell_states      sum enter * dy (x) C, then pass_states in reverse: the gradient of the
                                state leaving each cell; entering states are computed again
               head_gradients   per cell and head: dx, the factor part of ddt, gradients of log decays, dD
               group_gradients  per cell and group: dB, dC, summed over the heads of the group in order

Products take BF16 inputs where x, B and C are BF16, FP32 otherwise; sums, decays and states are FP32.
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

#: Tokens of a cell. At 64 the accumulators of `group_gradients` (dB, dC, scores) fit the registers.
CHUNK = 64
#: Widest head, widest state, most elements [p, n] of a head's state: one program holds it whole. Up to here
#: the kernels, compiled for SM 9.0, stay within its 227 KiB of shared memory.
MAX_HEAD, MAX_STATE, MAX_ELEMENTS = 128, 256, 128 * 128
#: Warps of a program, by kernel: of 4 and 8 the fewer at which ptxas (SM 9.0, BF16, p 64, n 128) spills
#: next to nothing. Not timed.
WARPS = {"states": 4, "pass": 4, "outputs": 4, "head_gradients": 4, "group_gradients": 8}
#: `group_gradients` loads the next head's tiles while it multiplies if a state has at most this many
#: elements; for wider ones shared memory would not hold both.
PIPELINED_STATE = 64 * 128
#: State elements one program of `pass_states` carries.
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
    """The scan by Triton kernels; differentiable once. Arguments and result as `ssd.ssd_chunked`.

    Saved for backward: the inputs. One FP32 state [h, p, n] per `CHUNK` tokens exists during forward, two
    during backward.

    Raises:
        ValueError: shapes that do not fit, FP64, a head or state that is too wide.
    """
    inputs = Inputs(x, dt, A, B, C, D, initial_state, seq_idx)
    inputs.check()
    problem = unsupported(x, B)
    if problem is not None:
        raise ValueError(f"{problem}: use ssd_chunked")
    y, state = _Scan.apply(*inputs)
    return (y, state) if return_final_state else y


def unsupported(x: Tensor, B: Tensor) -> str | None:
    """Why these kernels cannot take x [b, s, h, p] and B [b, s, g, n], or None."""
    if torch.float64 in (x.dtype, B.dtype):
        return "the Triton scan computes in FP32 and the input is FP64"
    p, n = x.shape[-1], B.shape[-1]
    if p > MAX_HEAD or n > MAX_STATE or _block(p) * _block(n) > MAX_ELEMENTS:
        limits = f"{MAX_HEAD} and {MAX_STATE}, {MAX_ELEMENTS} elements in all"
        return f"head dimension {p} and state size {n} are over the Triton scan's limits ({limits})"
    return None


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*tensors)
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        with torch.autocast(inputs.x.device.type, enabled=False), _on(inputs.x):
            return _forward(inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        inputs = Inputs(*ctx.saved_tensors)
        with torch.autocast(dy.device.type, enabled=False), _on(dy):
            return _backward(inputs, dy, dstate)


def _on(t: Tensor) -> Any:
    """Launch on the device of t; Triton takes the current one."""
    return torch.cuda.device(t.device if t.is_cuda else -1)


@dataclass(frozen=True)
class _Cells:
    """One value per token and head, cut into cells = b * nc: FP32 [cells, h, l] unless said otherwise.

    Padding behind the last token has dt = 0: it neither decays nor adds.
    """

    dt: Tensor
    a: Tensor  # dt * A, clamped
    #: Cumulative a from the start of the cell, as the sum of two FP32: differences keep FP32 precision
    #: after a strong decay.
    hi: Tensor
    lo: Tensor
    enter: Tensor  # weight of the entering state at each token
    leave: Tensor  # weight of each token in the leaving state
    carry: Tensor  # [cells, h] weight of the entering state in the leaving one
    document: Tensor | None  # int32 [cells, l], 0: the document that enters the cell


def _cells(inputs: Inputs) -> _Cells:
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
    return _Cells(dt, a, hi, lo, enter, leave, enter[..., -1].contiguous(), document)


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    cells = _cells(inputs)
    x, B, C = (_rows(t) for t in (inputs.x, inputs.B, inputs.C))
    D = None if inputs.D is None else inputs.D.contiguous()
    b, s, h, p = x.shape
    g = B.shape[2]
    state = inputs.state(inputs.initial_state).contiguous()
    entering = _states(x, cells.leave * cells.dt, B, inputs)
    _pass(entering, cells.carry, state, reverse=False)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    kernels.outputs[(len(cells.dt), h)](
        x, B, C, D, cells.dt, cells.hi, cells.lo, cells.enter, cells.document, entering, y,
        *x.stride()[:3], *B.stride()[:3], *C.stride()[:3], s, h, h // g, p,
        **_meta(inputs), num_warps=WARPS["outputs"],
    )  # fmt: skip
    return y, state


def _backward(inputs: Inputs, dy: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
    cells = _cells(inputs)
    x, B, C, dy = (_rows(t) for t in (inputs.x, inputs.B, inputs.C, dy))
    D = None if inputs.D is None else inputs.D.contiguous()
    b, s, h, p = x.shape
    g = B.shape[2]
    count, l = len(cells.dt), CHUNK

    # 1. The state entering each cell again, and the gradient of the state leaving it.
    entering = _states(x, cells.leave * cells.dt, B, inputs)
    _pass(entering, cells.carry, inputs.state(inputs.initial_state).contiguous(), reverse=False)
    dstate = inputs.state(dstate).contiguous()
    leaving = _states(dy, cells.enter, C, inputs)
    _pass(leaving, cells.carry, dstate, reverse=True)

    # 2. Per head, then per group.
    dx = torch.empty(x.shape, dtype=inputs.x.dtype, device=x.device)
    dfactor, denter, dleave, dbetween = (torch.empty_like(cells.dt) for _ in range(4))
    dcarry, dD = (torch.empty_like(cells.carry) for _ in range(2))
    token = (cells.dt, cells.hi, cells.lo, cells.enter, cells.leave, cells.document, entering, leaving)
    strides = (*x.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dy.stride()[:3], s, h, h // g, p)
    meta = _meta(inputs)
    kernels.head_gradients[(count, h)](
        x, B, C, dy, D, *token, dx, dfactor, denter, dleave, dbetween, dcarry, dD, *strides,
        **meta, num_warps=WARPS["head_gradients"],
    )  # fmt: skip
    dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (inputs.B, inputs.C))
    kernels.group_gradients[(count, g)](
        x, B, C, dy, *token, dB, dC, *strides, **meta, num_warps=WARPS["group_gradients"],
        num_stages=2 if meta["P"] * meta["N"] <= PIPELINED_STATE else 1,
    )  # fmt: skip

    # 3. The gradient of a step a_t: it is in `enter` from its token on, in `leave` of the tokens before,
    # in the decay between every pair it separates (summed by the kernel), and in `carry`. Sums of just
    # these terms, not differences of longer sums: nothing is left behind where nothing passes.
    onward = torch.ones(l, l, device=x.device).tril_()  # [i, t]: t <= i
    dstep = denter @ onward + dleave @ onward.t().triu(1) + dbetween + dcarry.unsqueeze(-1)
    dA = (dstep * cells.dt).sum((0, 2)).to(inputs.A.dtype)
    ddt = (dstep * inputs.A.float()[:, None]).add_(dfactor)
    ddt = ddt.transpose(1, 2).reshape(b, -1, h)[:, :s].to(inputs.dt.dtype)
    dD_ = None if D is None else dD.sum(0).to(D.dtype)
    dinitial = None if inputs.initial_state is None else dstate.to(inputs.initial_state.dtype)
    return dx, ddt, dA, dB, dC, dD_, dinitial, None


def _rows(t: Tensor) -> Tensor:
    """t with unit stride in its last dimension; other strides are the kernels' to follow."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _block(size: int) -> int:
    """The power of two that holds `size`; at least 16, the least extent of a Triton product."""
    return max(16, triton.next_power_of_2(size))


def _meta(inputs: Inputs) -> dict[str, Any]:
    narrow = all(t.dtype == torch.bfloat16 for t in (inputs.x, inputs.B, inputs.C))
    return {
        "n": inputs.B.shape[-1],
        "L": CHUNK,
        "P": _block(inputs.x.shape[-1]),
        "N": _block(inputs.B.shape[-1]),
        "DOT": tl.bfloat16 if narrow else tl.float32,
    }


def _states(v: Tensor, weight: Tensor, M: Tensor, inputs: Inputs) -> Tensor:
    """sum over the tokens of each cell of weight * v (x) M: FP32 [b, nc, h, p, n].

    Args:
        v: [b, s, h, p].   weight: FP32 [cells, h, l].   M: [b, s, g, n].
    """
    b, s, h, p = v.shape
    cells, g, n = len(weight), M.shape[2], M.shape[3]
    out = torch.empty(b, cells // b, h, p, n, device=v.device)
    kernels.cell_states[(cells, h)](
        v, weight, M, out, *v.stride()[:3], *M.stride()[:3], s, h, h // g, p,
        **_meta(inputs), num_warps=WARPS["states"],
    )  # fmt: skip
    return out


def _pass(added: Tensor, carry: Tensor, state: Tensor, *, reverse: bool) -> None:
    """state <- carry * state + added over the cells of each row; `added` becomes the state before each.

    Args:
        added: [b, nc, h, p, n], overwritten.   carry: [cells, h].   state: [b, h, p, n], overwritten.
        All contiguous FP32.
    """
    b, nc, h, p, n = added.shape
    grid = (b * h, triton.cdiv(p * n, PASS_BLOCK))
    kernels.pass_states[grid](
        added, carry, state, nc, h, p * n, BLOCK=PASS_BLOCK, REVERSE=reverse, num_warps=WARPS["pass"]
    )
