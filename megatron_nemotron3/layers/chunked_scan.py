"""The chunked form of the SSD scan (arXiv 2405.21060, section 6) with a hand-written backward.

Shapes are explained in `ssd`, which has the public function and the specification. Forward saves the inputs
and one state per block of chunks; backward recomputes the chunk matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_nemotron3.layers.functional import Place, accumulation_dtype

#: Tokens per chunk of `ssd_chunked`: the fastest of 32, 64, 128 and 256 on two AVX-512 cores.
CHUNK = 64
#: Elements of the [cells, h, l, l] decay matrices per block, by device type. On a CPU they fit the
#: second-level cache (1 MiB in FP32); a GPU needs larger batches to be busy.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**26}
#: Fewest chunks per block, if the sequence has as many. One state per block is saved for backward.
MIN_CHUNKS = 4
#: A log decay at or below this gives a decay of 0. In FP32 that drops factors below 9e-27, 1e19 times smaller
#: than the rounding error; their products were denormal and made this scan 3 times slower. In FP64 exp
#: underflows to 0 there anyway.
LOG_DECAY_FLOOR = {torch.float32: -60.0, torch.float64: -750.0}
#: For the gradients of x, B and C, with their last two dimensions as one: [b, s, h * p] and [b, s, g * n].
Places = tuple[Place, Place, Place]


def document_starts(seq_idx: Tensor) -> Tensor:
    """Bool [b, s]: True where seq_idx [b, s] differs from the token before. The first token is False."""
    starts = torch.zeros_like(seq_idx, dtype=torch.bool)
    torch.ne(seq_idx[:, 1:], seq_idx[:, :-1], out=starts[:, 1:])
    return starts


class ScanInputs(NamedTuple):
    """Tensor arguments of a scan, in the order of the autograd function."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    initial_state: Tensor | None
    seq_idx: Tensor | None

    @property
    def acc(self) -> torch.dtype:
        return accumulation_dtype(self.x)

    def state(self, value: Tensor | None) -> Tensor:
        """A new state [b, h, p, n]: a copy of `value`, or zeros if None."""
        if value is not None:
            return value.to(self.acc, copy=True)
        b, _, h, p = self.x.shape
        return torch.zeros(b, h, p, self.B.shape[-1], dtype=self.acc, device=self.x.device)

    def check(self) -> None:
        if self.x.dim() != 4 or self.B.dim() != 4 or self.x.shape[1] == 0:
            found = f"x {tuple(self.x.shape)}, B {tuple(self.B.shape)}"
            raise ValueError(f"{found}: they must be [b, s, h, p] and [b, s, g, n] with at least one token")
        (b, s, h, p), (g, n) = self.x.shape, self.B.shape[2:]
        if g == 0 or h % g:
            raise ValueError(f"h={h} heads are not divisible by g={g} groups: use a g that divides h")
        expected = ((b, s, h, p), (b, s, h), (h,), (b, s, g, n), (b, s, g, n), (h,), (b, h, p, n), (b, s))
        for name, tensor, shape in zip(self._fields, self, expected, strict=True):
            if tensor is not None and tuple(tensor.shape) != shape:
                found = f"{name} has shape {tuple(tensor.shape)}"
                raise ValueError(f"{found}, but x {tuple(self.x.shape)} and B need {shape}")


@dataclass(frozen=True)
class _CellBlock:
    """Consecutive chunks of some batch rows: nb * nc cells of l tokens each."""

    rows: slice
    tokens: slice
    nb: int
    nc: int
    l: int  # tokens of a chunk
    index: int  # of the block within its row, in order of time

    def load(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """[b, s, ...] -> [cells, l, ...]; a view where possible."""
        t = t[self.rows, self.tokens].to(dtype)
        return t.reshape(self.nb * self.nc, self.l, *t.shape[2:])

    def place(self, out: Tensor) -> Tensor:
        """[b, s, ...] -> [nb, nc, l, ...], the block's part as a view."""
        return out[self.rows, self.tokens].unflatten(1, (self.nc, self.l))

    def store(self, out: Tensor, value: Tensor) -> None:
        """Write [cells, l, ...] into out [b, s, ...]."""
        self.place(out).copy_(value.unflatten(0, (self.nb, self.nc)))

    def store_sum(self, out: Tensor, by_head: Tensor, by_group: Tensor, weight: Tensor, g: int) -> None:
        """Write by_head [cells * h, l, p] + by_group [cells * g, l, h/g * p] * weight [cells, l, h] into
        out."""
        h, p = out.shape[2:]
        cells = (self.nb, self.nc)
        torch.addcmul(
            by_head.view(*cells, g, h // g, self.l, p).permute(0, 1, 4, 2, 3, 5),
            by_group.view(*cells, g, self.l, h // g, p).permute(0, 1, 3, 2, 4, 5),
            weight.view(*cells, self.l, g, h // g, 1),
            out=self.place(out).unflatten(3, (g, -1)),
        )


def _cell_blocks(x: Tensor) -> list[_CellBlock]:
    """Cut [b, s] into blocks, in order of time within a row; the last one may be shorter."""
    b, s, h = x.shape[:3]
    length = min(s, CHUNK)
    whole = s // length
    budget = BLOCK_ELEMENTS.get(x.device.type, BLOCK_ELEMENTS["cuda"])
    cells = max(MIN_CHUNKS, budget // (h * length * length))
    nc = min(whole, cells)
    nb = min(b, max(1, cells // nc))
    # (chunks, tokens in each, first token) of every block of a row; the last chunk may be short.
    in_time = [(min(nc, whole - c), length, c * length) for c in range(0, whole, nc)]
    if s % length:
        in_time.append((1, s % length, whole * length))
    return [
        _CellBlock(slice(row, min(row + nb, b)), slice(t, t + n * m), min(nb, b - row), n, m, i)
        for row in range(0, b, nb)
        for i, (n, m, t) in enumerate(in_time)
    ]


@dataclass(frozen=True)
class _Decays:
    """Decays within and across the cells of a block, which follow from its time steps."""

    dt: Tensor  # [cells, l, h]
    reach_in: Tensor  # [cells, l, h]  weight of the entering state at each token
    reach_out: Tensor  # [cells, l, h]  weight of each token in the leaving state
    carry: Tensor  # [cells, h]     weight of the entering state in the leaving state
    between: Tensor  # [cells, h, l, l]  from token to later token; the upper triangle is finite but unused
    mask: Tensor  # [cells or 1, 1, l, l]  1 where the first token sees the second, else 0


def _decays(block: _CellBlock, dt: Tensor, A: Tensor, starts: Tensor | None, acc: torch.dtype) -> _Decays:
    dt = block.load(dt, acc)
    floor = LOG_DECAY_FLOOR[acc]
    # Sums are FP64, since decays are differences of partial sums, each of which FP32 would round.
    # The clamp bounds them: after a huge dt * A a difference would lose all digits, or be inf - inf.
    cum = (dt * A).clamp_min(2 * floor).double().cumsum(1)
    reach_in = _exp_above(cum.to(acc, copy=True), floor)
    reach_out = _exp_above((cum[:, -1:] - cum).to(acc), floor)
    carry = reach_in[:, -1]
    mask = torch.ones(block.l, block.l, dtype=acc, device=dt.device).tril_()[None, None]
    if starts is not None:
        document = block.load(starts, torch.bool).cumsum(1)  # 0: continues from the previous cell
        same = document[:, :, None] == document[:, None, :]
        mask = mask * same.unsqueeze(1)
        reach_in = reach_in * (document == 0).unsqueeze(-1)
        reach_out = reach_out * (document == document[:, -1:]).unsqueeze(-1)
        carry = reach_in[:, -1]
    a = cum.to(acc).transpose(1, 2).contiguous()
    # Clamping to 0 before exp keeps the unused upper triangle finite: no inf * 0.
    between = _exp_above((a.unsqueeze(-1) - a.unsqueeze(-2)).clamp_max_(0), floor)
    return _Decays(dt, reach_in, reach_out, carry, between, mask)


def _exp_above(exponent: Tensor, floor: float) -> Tensor:
    """exp(exponent) in place, 0 at or below the floor. exp itself would be slow where it is denormal."""
    return torch.threshold_(exponent, floor, -torch.inf).exp_()


def _by_group(t: Tensor, g: int, weight: Tensor | None = None) -> Tensor:
    """[cells, l, g, n] -> [cells * g, l, n]. With a weight: [cells, l, h, p] -> [cells * g, l, h/g * p]."""
    cells, length, k, m = t.shape
    if weight is None:
        return t.transpose(1, 2).reshape(cells * g, length, m)
    out = t.new_empty(cells, g, length, k // g, m)
    split = t.unflatten(2, (g, -1)).transpose(1, 2)
    torch.mul(split, weight.unflatten(2, (g, -1)).transpose(1, 2).unsqueeze(-1), out=out)
    return out.view(cells * g, length, -1)


def _recur_over_cells(
    block: _CellBlock, left: Tensor, right: Tensor, carry: Tensor, state: Tensor, *, backward: bool = False
) -> Tensor:
    """Recurrence over the cells of a row: state <- carry * state + left^T right."""
    nb, nc, (_, h, p, n) = block.nb, block.nc, state.shape
    # The state before a step and the one after it are neighbours, so a step is one operation in place.
    states = state.new_empty(nb, nc + 1, h, p, n)
    before, after = (states[:, 1:], states[:, :-1]) if backward else (states[:, :-1], states[:, 1:])
    first, last = (nc, 0) if backward else (0, nc)
    if nb == 1:
        torch.bmm(left.transpose(1, 2), right, out=after.view(len(left), -1, n))
    else:
        after.copy_(torch.bmm(left.transpose(1, 2), right).view(after.shape))
    states[:, first] = state
    factors = carry.view(nb, nc, h, 1, 1).unbind(1)
    pairs = list(zip(factors, before.unbind(1), after.unbind(1), strict=True))
    for factor, old, new in reversed(pairs) if backward else pairs:
        new.addcmul_(factor, old)
    state.copy_(states[:, last])
    return before.reshape(len(left), -1, n)


def _by_head(t: Tensor) -> Tensor:
    """[cells, l, h, p] -> [cells * h, l, p]."""
    return t.transpose(1, 2).flatten(0, 1)


def _tokens_first(t: Tensor, cells: int) -> Tensor:
    """[cells * g, l, n] -> [cells, l, g, n]."""
    return t.unflatten(0, (cells, -1)).transpose(1, 2)


class ChunkedScan(torch.autograd.Function):
    """The fields of `ScanInputs`, then places for the gradients of x, B and C -> y and the final state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, ctx.places = arguments[:-1], arguments[-1]
        with torch.autocast(inputs[0].device.type, enabled=False):
            y, states, state = _scan_forward(ScanInputs(*inputs))
        ctx.save_for_backward(*inputs, states)
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
        *saved, states = ctx.saved_tensors
        inputs = ScanInputs(*saved)
        dy = torch.zeros_like(inputs.x) if dy is None else dy
        with torch.autocast(dy.device.type, enabled=False):
            return *_scan_backward(inputs, states, dy, inputs.state(dstate), ctx.places), None


def _scan_forward(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Output, the state entering each block [b, blocks of a row, h, p, n], and the final state."""
    x, dt, A, B, C, D, initial_state, seq_idx = inputs
    b, _, h, p = x.shape
    g, n = B.shape[2:]
    acc = inputs.acc
    A_ = A.to(acc)
    starts = None if seq_idx is None else document_starts(seq_idx)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    blocks = _cell_blocks(x)
    states = torch.empty(b, blocks[-1].index + 1, h, p, n, dtype=acc, device=x.device)
    state = inputs.state(initial_state)
    for block in blocks:
        cells, length = block.nb * block.nc, block.l
        k = _decays(block, dt, A_, starts, acc)
        x_, B_, C_ = block.load(x, acc), _by_group(block.load(B, acc), g), _by_group(block.load(C, acc), g)

        # 1. States: the contribution of each cell's tokens, then the recurrence from cell to cell.
        states[block.rows, block.index] = state[block.rows]
        weighted = _by_group(x_, g, k.dt * k.reach_out)
        entering = _recur_over_cells(block, weighted, B_, k.carry, state[block.rows])
        # 2. Output from the entering state: one product per group.
        off = torch.bmm(C_, entering.transpose(1, 2))
        # 3. Output from tokens of the same cell: scores once per group, decays per head.
        scores = torch.bmm(C_, B_.transpose(1, 2)).view(cells, g, 1, length, length).mul_(k.mask.unsqueeze(1))
        mixing = k.between.view(cells, g, -1, length, length).mul_(scores).view(cells, h, length, length)
        diag = torch.bmm(_with_steps(mixing, k.dt, D), _by_head(x_))
        block.store_sum(y, diag, off, k.reach_in, g)
    return y, states, state


def _with_steps(mixing: Tensor, dt: Tensor, D: Tensor | None) -> Tensor:
    """Mixing [cells, h, l, l] times the step of the earlier token, plus D on the diagonal; in place."""
    mixing.mul_(dt.transpose(1, 2).unsqueeze(-2))
    if D is not None:
        mixing.diagonal(dim1=-2, dim2=-1).add_(D.to(mixing.dtype).unsqueeze(-1))
    return mixing.flatten(0, 1)


def _scan_backward(
    inputs: ScanInputs, states: Tensor, dy: Tensor, dstate: Tensor, places: Places
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs. `dstate`, the gradient of the final state, is overwritten."""
    x, dt, A, B, C, D, initial_state, seq_idx = inputs
    h, p = x.shape[2:]
    g, n = B.shape[2:]
    acc = inputs.acc
    A_ = A.to(acc)
    starts = None if seq_idx is None else document_starts(seq_idx)
    ddt = torch.empty_like(dt, memory_format=torch.contiguous_format)
    dx, dB, dC = (
        torch.empty_like(t, memory_format=torch.contiguous_format)
        if place is None
        else place().unflatten(-1, t.shape[2:])
        for t, place in zip((x, B, C), places, strict=True)
    )
    dA = torch.zeros(h, dtype=acc, device=x.device)
    dD = torch.zeros_like(dA)
    for block in reversed(_cell_blocks(x)):
        cells, length = block.nb * block.nc, block.l
        square = (cells, g, h // g, length, length)
        k = _decays(block, dt, A_, starts, acc)
        x_, B_, C_ = block.load(x, acc), _by_group(block.load(B, acc), g), _by_group(block.load(C, acc), g)
        dy_ = block.load(dy, acc)
        x_h, dy_h = _by_head(x_), _by_head(dy_)
        out = k.dt * k.reach_out  # [cells, l, h], from a token's x to the leaving state

        # 1. Recompute the state entering each cell; the gradient of the state leaving it, backward in time.
        x_out, dy_in = _by_group(x_, g, out), _by_group(dy_, g, k.reach_in)
        entering = _recur_over_cells(block, x_out, B_, k.carry, states[block.rows, block.index].clone())
        leaving = _recur_over_cells(block, dy_in, C_, k.carry, dstate[block.rows], backward=True)

        # 2. Through the states: off = C entering^T and added = x_out^T B.
        dx_out = torch.bmm(B_, leaving.transpose(1, 2))
        along = x_.unflatten(2, (g, -1)) * dx_out.view(cells, g, length, -1, p).transpose(1, 2)
        dout = along.sum(-1).flatten(2)  # [cells, l, h], gradient of out
        dlog_out = dout * out  # of log reach_out
        # The gradient of C per head gives that of log reach_in, too.
        dC_h = torch.bmm(dy_h, entering.reshape(cells * h, p, n)).view(cells, g, -1, length, n)
        dC_h.mul_(k.reach_in.transpose(1, 2).reshape(cells, g, -1, length, 1))
        dC_ = dC_h.sum(2).view(cells * g, length, n)
        dlog_in = dC_h.mul_(C_.view(cells, g, 1, length, n)).sum(-1).view(cells, h, length).transpose(1, 2)
        dlog_carry = (leaving * entering).view(cells, h, -1).sum(-1) * k.carry

        # 3. Through the cell: mixing = between * scores * dt, and D on the diagonal.
        mask = k.mask.unsqueeze(1)
        scores = torch.bmm(C_, B_.transpose(1, 2)).view(cells, g, 1, length, length).mul_(mask)
        between, step = k.between.view(square), k.dt.transpose(1, 2).reshape(cells, g, -1, 1, length)
        mixing = _with_steps((between * scores).view(cells, h, length, length), k.dt, D)
        dx_h = torch.bmm(mixing.transpose(1, 2), dy_h)
        dmixing = torch.bmm(dy_h, x_h.transpose(1, 2)).view(square)
        if D is not None:
            dD += dmixing.diagonal(dim1=-2, dim2=-1).sum((0, -1)).view(-1)
        dscores_h = dmixing.mul_(between)
        dlog = dscores_h * scores  # of log between, still without the step
        ddt_ = dlog.sum(-2).view(cells, h, length).transpose(1, 2) + dout * k.reach_out
        dlog.mul_(step)
        dscores = dscores_h.mul_(step).sum(2, keepdim=True).mul_(mask).view(cells * g, length, length)

        # 4. A step contributes to `between` of every pair it separates, to reach_in from its token on, and to
        # reach_out of the tokens before. Summing only these terms gives exact zeros where nothing passes
        # (after a strong decay, between documents). Subtracting sums over rows and columns would not.
        onward = torch.ones(length, length, dtype=acc, device=x.device).tril_()  # [l, t]: t <= l
        before = onward.tril(-1)  # [t, s]: s < t
        separated = (dlog.view(-1, length) @ before.t()).view(cells, h, length, length).mul_(onward)
        dstep = separated.sum(-2).transpose(1, 2) + onward.t() @ dlog_in + before @ dlog_out
        dstep += dlog_carry.unsqueeze(1)
        dA += (dstep * k.dt).sum((0, 1))
        block.store(ddt, ddt_.addcmul_(dstep, A_))
        dC_.baddbmm_(dscores, B_)
        dB_ = torch.bmm(dscores.transpose(1, 2), C_).baddbmm_(x_out, leaving)
        block.store(dC, _tokens_first(dC_, cells))
        block.store(dB, _tokens_first(dB_, cells))
        block.store_sum(dx, dx_h, dx_out, out, g)
    dD_ = None if D is None else dD.to(D.dtype)
    dinitial = None if initial_state is None else dstate.to(initial_state.dtype)
    return dx, ddt, dA.to(A.dtype), dB, dC, dD_, dinitial, None
