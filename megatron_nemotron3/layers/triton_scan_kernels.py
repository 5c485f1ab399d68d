"""Triton kernels of the SSD scan. `triton_scan` launches them and explains each.

A program computes one cell of L tokens. Tiles are [L, P], [L, N], [L, L] or [P, N], where P >= p and N >= n
are powers of two. Columns beyond p and n, and tokens beyond the sequence, are loaded as 0 and not stored.
Cell and batch indices are int64, since offsets into states exceed 2**31.

    <tensor>_b, _s, _h, _g   strides over batch, tokens, heads, groups; the last dimension has stride 1
    h, per_group             heads; heads of a group
    DOT                      dtype of the factors of products
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_nemotron3.layers.chunked_scan import LOG_DECAY_FLOOR

FLOOR: tl.constexpr = tl.constexpr(LOG_DECAY_FLOOR[torch.float32])


@triton.jit
def _load_tile(pointer, batch, first, stride_b, stride_s, column, s, width, L: tl.constexpr, W: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows [L, W] of a [b, s, k, width] tensor from token `first`, with `column` = head offset."""
    row = first + tl.arange(0, L)
    col = tl.arange(0, W)
    at = pointer + batch * stride_b + column + row.to(tl.int64)[:, None] * stride_s + col[None, :]
    return tl.load(at, mask=(row < s)[:, None] & (col < width)[None, :], other=0.0)


@triton.jit
def _load_state_tile(pointer, cell_head, p, n, P: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """[P, N] of a contiguous [cells, h, p, n] tensor."""
    i, j = tl.arange(0, P)[:, None], tl.arange(0, N)[None, :]
    return tl.load(pointer + cell_head * p * n + i * n + j, mask=(i < p) & (j < n), other=0.0)


@triton.jit
def _dot(a, b):  # type: ignore[no-untyped-def]
    """FP32 product. FP32 factors are split into three TF32 products, which keep 21 bits instead of 10."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _between(hi, lo, document, token, cell, L: tl.constexpr):  # type: ignore[no-untyped-def]
    """Decay [i, j] from token j to token i >= j of the same document, else 0; [L, L]."""
    hi_i, lo_i = tl.load(hi + token), tl.load(lo + token)
    i = tl.arange(0, L)
    exponent = (hi_i[:, None] - hi_i[None, :]) + (lo_i[:, None] - lo_i[None, :])
    seen = (i[:, None] >= i[None, :]) & (exponent > FLOOR)
    if document is not None:
        d = tl.load(document + cell * L + i)
        seen = seen & (d[:, None] == d[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)


@triton.jit
def cell_states(  # type: ignore[no-untyped-def]
    v, weight, M, out, v_b, v_s, v_h, M_b, M_s, M_g, s, h, per_group, p,
    n: tl.constexpr, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    cell, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nc = tl.cdiv(s, L)
    batch, first = cell // nc, (cell % nc).to(tl.int32) * L
    w = tl.load(weight + (cell * h + head) * L + tl.arange(0, L))
    v_ = _load_tile(v, batch, first, v_b, v_s, head * v_h, s, p, L, P).to(DOT)
    M_ = _load_tile(M, batch, first, M_b, M_s, head // per_group * M_g, s, n, L, N)
    added = _dot(tl.trans(v_), (M_ * w[:, None]).to(DOT))
    i, j = tl.arange(0, P)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + (cell * h + head) * p * n + i * n + j, added, mask=(i < p) & (j < n))


@triton.jit
def pass_states(added, carry, state, nc, h, size, BLOCK: tl.constexpr, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    batch, head = (tl.program_id(0) // h).to(tl.int64), tl.program_id(0) % h
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    own = state + (batch * h + head) * size + at
    now = tl.load(own, mask=inside)
    for step in range(nc):
        cell = (nc - 1 - step) if REVERSE else step
        cell_head = (batch * nc + cell) * h + head
        here = added + cell_head * size + at
        new = tl.load(here, mask=inside)
        tl.store(here, now, mask=inside)
        now = tl.load(carry + cell_head) * now + new
    tl.store(own, now, mask=inside)


@triton.jit
def outputs(  # type: ignore[no-untyped-def]
    x, B, C, D, dt, hi, lo, enter, document, entering, y,
    x_b, x_s, x_h, B_b, B_s, B_g, C_b, C_s, C_g, s, h, per_group, p,
    n: tl.constexpr, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    cell, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nc = tl.cdiv(s, L)
    batch, first = cell // nc, (cell % nc).to(tl.int32) * L
    group = head // per_group
    token = (cell * h + head) * L + tl.arange(0, L)

    C_ = _load_tile(C, batch, first, C_b, C_s, group * C_g, s, n, L, N).to(DOT)
    H = _load_state_tile(entering, cell * h + head, p, n, P, N).to(DOT)
    out = _dot(C_, tl.trans(H)) * tl.load(enter + token)[:, None]

    B_ = _load_tile(B, batch, first, B_b, B_s, group * B_g, s, n, L, N).to(DOT)
    mixing = _dot(C_, tl.trans(B_)) * _between(hi, lo, document, token, cell, L)
    mixing = mixing * tl.load(dt + token)[None, :]
    x_ = _load_tile(x, batch, first, x_b, x_s, head * x_h, s, p, L, P)
    out += _dot(mixing.to(DOT), x_.to(DOT))
    if D is not None:
        out += x_ * tl.load(D + head).to(tl.float32)
    row, col = first + tl.arange(0, L)[:, None], tl.arange(0, P)[None, :]
    at = y + ((batch * s + row) * h + head) * p + col
    tl.store(at, out, mask=(row < s) & (col < p))


@triton.jit
def head_gradients(  # type: ignore[no-untyped-def]
    x, B, C, dy, D, dt, hi, lo, enter, leave, document, entering, leaving,
    dx, dfactor, denter, dleave, dbetween, dcarry, dD,
    x_b, x_s, x_h, B_b, B_s, B_g, C_b, C_s, C_g, dy_b, dy_s, dy_h, s, h, per_group, p,
    n: tl.constexpr, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    cell, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nc = tl.cdiv(s, L)
    batch, first = cell // nc, (cell % nc).to(tl.int32) * L
    group = head // per_group
    cell_head = cell * h + head
    token = cell_head * L + tl.arange(0, L)
    dt_ = tl.load(dt + token)

    x_ = _load_tile(x, batch, first, x_b, x_s, head * x_h, s, p, L, P)
    dy_ = _load_tile(dy, batch, first, dy_b, dy_s, head * dy_h, s, p, L, P)
    B_ = _load_tile(B, batch, first, B_b, B_s, group * B_g, s, n, L, N).to(DOT)
    C_ = _load_tile(C, batch, first, C_b, C_s, group * C_g, s, n, L, N).to(DOT)

    # Through the states: out = enter * C H^T, added = (leave * u)^T B with u = dt * x.
    H = _load_state_tile(entering, cell_head, p, n, P, N)
    G = _load_state_tile(leaving, cell_head, p, n, P, N)
    tl.store(dcarry + cell_head, tl.sum(tl.sum(G * H, 1), 0) * tl.load(enter + cell_head * L + L - 1))
    off = _dot(C_, tl.trans(H.to(DOT))) * tl.load(enter + token)[:, None]
    tl.store(denter + token, tl.sum(off * dy_, 1))
    du = _dot(B_, tl.trans(G.to(DOT))) * tl.load(leave + token)[:, None]
    tl.store(dleave + token, tl.sum(du * x_, 1) * dt_)

    # Through the cell: out = (between * scores) u.
    mixing = _dot(C_, tl.trans(B_)) * _between(hi, lo, document, token, cell, L)
    du += _dot(tl.trans(mixing.to(DOT)), dy_.to(DOT))
    dlog = _dot(dy_.to(DOT), tl.trans(x_.to(DOT))) * dt_[None, :] * mixing
    # Step t separates i >= t from j < t, so row t + 1 of the result is sum_{i > t} sum_{j <= t} dlog[i, j].
    i = tl.arange(0, L)
    until = tl.where(i[:, None] > i[None, :], tl.cumsum(dlog, 1), 0.0)
    tl.store(dbetween + token + 1, tl.sum(until, 0), mask=i < L - 1)
    tl.store(dbetween + cell_head * L, 0.0)

    tl.store(dfactor + token, tl.sum(du * x_, 1))
    out = du * dt_[:, None]
    if D is not None:
        out += dy_ * tl.load(D + head).to(tl.float32)
        both = x_.to(tl.float32) * dy_.to(tl.float32)
        tl.store(dD + cell_head, tl.sum(tl.sum(both, 1), 0))
    row, col = first + i[:, None], tl.arange(0, P)[None, :]
    at = dx + ((batch * s + row) * h + head) * p + col
    tl.store(at, out, mask=(row < s) & (col < p))


@triton.jit
def group_gradients(  # type: ignore[no-untyped-def]
    x, B, C, dy, dt, hi, lo, enter, leave, document, entering, leaving, dB, dC,
    x_b, x_s, x_h, B_b, B_s, B_g, C_b, C_s, C_g, dy_b, dy_s, dy_h, s, h, per_group, p,
    n: tl.constexpr, L: tl.constexpr, P: tl.constexpr, N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    cell, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    nc = tl.cdiv(s, L)
    batch, first = cell // nc, (cell % nc).to(tl.int32) * L
    dB_ = tl.zeros((L, N), tl.float32)
    dC_ = tl.zeros((L, N), tl.float32)
    dscores = tl.zeros((L, L), tl.float32)
    for head in range(group * per_group, (group + 1) * per_group):
        token = (cell * h + head) * L + tl.arange(0, L)
        dt_ = tl.load(dt + token)
        x_ = _load_tile(x, batch, first, x_b, x_s, head * x_h, s, p, L, P).to(DOT)
        dy_ = _load_tile(dy, batch, first, dy_b, dy_s, head * dy_h, s, p, L, P).to(DOT)
        between = _between(hi, lo, document, token, cell, L)
        dscores += _dot(dy_, tl.trans(x_)) * dt_[None, :] * between
        H = _load_state_tile(entering, cell * h + head, p, n, P, N).to(DOT)
        dC_ += _dot(dy_, H) * tl.load(enter + token)[:, None]
        G = _load_state_tile(leaving, cell * h + head, p, n, P, N).to(DOT)
        dB_ += _dot(x_, G) * (tl.load(leave + token) * dt_)[:, None]
    dscores_ = dscores.to(DOT)
    B_ = _load_tile(B, batch, first, B_b, B_s, group * B_g, s, n, L, N).to(DOT)
    dC_ += _dot(dscores_, B_)
    C_ = _load_tile(C, batch, first, C_b, C_s, group * C_g, s, n, L, N).to(DOT)
    dB_ += _dot(tl.trans(dscores_), C_)
    row, col = first + tl.arange(0, L)[:, None], tl.arange(0, N)[None, :]
    at = ((batch * s + row) * (h // per_group) + group) * n + col
    inside = (row < s) & (col < n)
    tl.store(dB + at, dB_, mask=inside)
    tl.store(dC + at, dC_, mask=inside)
