"""The mixture of experts, with or without a latent width (LatentMoE, arXiv 2601.18089).

    y = x + W_up sum_i p_i E_i(W_down u) + shared(u),   u = norm(x)

Three implementations of the same sum; the number of tokens decides which is fastest:

    in place   reads the matrices of the selected experts where they are, row by row: few tokens on a CPU
    gathered   copies them into one product, without a host synchronization: few tokens on a GPU
    sorted     sorts tokens by expert, as in training; on a GPU with torch's grouped product the numbers of
               tokens stay on the device
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from megatron_nemotron3.inference.generate.batch import ForwardBatch
from megatron_nemotron3.inference.generate.layers import ReadTensor, read_norm
from megatron_nemotron3.inference.generate.linear import DecodeLinear, packs
from megatron_nemotron3.inference.generate.state import LayerState
from megatron_nemotron3.layers.functional import weighted_values
from megatron_nemotron3.layers.grouped import squared_relu_experts
from megatron_nemotron3.layers.grouped_gpu import grouped_mm, grouped_mm_problem
from megatron_nemotron3.models import Nemotron3Config

#: Elements of gathered matrices up to which a GPU gathers: memory is read three times, with few launches.
GATHERED_ELEMENTS = 2**28
#: A CPU reads matrices in place up to either: mean uses of an expert, or elements of the selected matrices.
#: Measured on one AVX-512 core.
IN_PLACE_USES, IN_PLACE_ELEMENTS = 3, 2**22
#: Rows of matrices that one operation reads in place, at most: each has an index of 8 bytes.
INDEX_ELEMENTS = 2**21
#: Added to the sum of the selected scores.
EPS = 1e-20


class MixtureOfExperts:
    """Layer kind E."""

    def __init__(self, read: ReadTensor, config: Nemotron3Config) -> None:
        c, d = config, config.hidden_size
        experts, topk, width = c.num_moe_experts, c.moe_router_topk, c.moe_ffn_hidden_size
        shared = c.moe_shared_expert_intermediate_size
        assert experts is not None and topk is not None and width is not None and shared is not None
        assert c.moe_router_topk_scaling_factor is not None
        self.experts, self.topk = experts, topk
        inner = c.expert_input_size
        self.latent, self.inner, self.width = c.moe_latent_size, inner, width
        self.norm = read_norm(read, config)
        self.router = read("mixer.gate.weight", experts, d, float32=True).t().contiguous()
        self.bias = read("mixer.gate.e_score_correction_bias", experts, float32=True)
        # Tensors, because an operation with a Python number would first create one.
        self.scale = torch.tensor(c.moe_router_topk_scaling_factor, device=self.bias.device)
        self.eps = torch.tensor(EPS, device=self.bias.device)
        up = read("mixer.shared_experts.up_proj.weight", shared, d)
        if self.latent:
            # One product for the latent input and the shared expert: both see the same u.
            up = torch.cat([read("mixer.fc1_latent_proj.weight", inner, d), up])
            self.out = DecodeLinear(read("mixer.fc2_latent_proj.weight", d, inner))
        self.up = DecodeLinear(up)
        self.shared_down = DecodeLinear(read("mixer.shared_experts.down_proj.weight", d, shared))
        # [experts, inner, ffn] and [experts, ffn, inner]: a product is a weighted sum of rows.
        self.fc1 = self._stack_experts(read, "up_proj", width, inner)
        self.fc2 = self._stack_experts(read, "down_proj", inner, width)
        self._rows1, self._rows2 = self.fc1.view(-1, width), self.fc2.view(-1, inner)
        self._inputs = torch.arange(inner, device=self.fc1.device)
        self._outputs = torch.arange(width, device=self.fc1.device)
        self._grouped = grouped_mm_problem(self.fc1[0], [self.fc1[0]], experts) is None
        self.each = [w.t() for w in self.fc1.unbind()], [w.t() for w in self.fc2.unbind()]

    def _stack_experts(self, read: ReadTensor, name: str, rows: int, columns: int) -> Tensor:
        """[experts, columns, rows]."""
        stack = None
        for e in range(self.experts):
            weight = read(f"mixer.experts.{e}.{name}.weight", rows, columns).t()
            if stack is None:
                stack = weight.new_empty(self.experts, *weight.shape)
            stack[e] = weight
        assert stack is not None
        return stack

    def new_state(self, batch: int, capacity: int) -> None:
        """This kind has no state."""

    def __call__(self, x: Tensor, state: LayerState, batch: ForwardBatch) -> tuple[Tensor, None]:
        u = self.norm(x)
        scores = torch.mm(u.float(), self.router).sigmoid_()
        chosen = (scores + self.bias).topk(self.topk, -1, sorted=False)[1]  # [t, topk]
        weight = scores.gather(1, chosen)
        if self.topk > 1:  # Megatron leaves a single expert its score
            weight = weight.div_(weight.sum(-1, True).add_(self.eps))
        weight = weight.mul_(self.scale)
        up = self.up(u)
        if self.latent:
            z, hidden = up.split_with_sizes((self.inner, up.shape[1] - self.inner), 1)
        else:
            z, hidden = u, up
        hidden = hidden.relu()
        x = self.shared_down(hidden.mul_(hidden), add=x)
        y = self._implementation(len(x), x.device.type)(z, chosen, weight)
        return (self.out(y, add=x) if self.latent else x.add_(y)), None

    def _implementation(self, tokens: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        matrix, pairs = self.inner * self.width, tokens * self.topk
        if device == "cpu":
            # 16-bit products by expert take several times as long where the CPU has no instructions for them.
            slow = self.fc1.dtype.itemsize == 2 and not packs(self.fc1.dtype)
            few = slow or pairs <= IN_PLACE_USES * self.experts or pairs * matrix <= IN_PLACE_ELEMENTS
            return self._in_place if few else self._sorted
        return self._gathered if pairs * matrix <= GATHERED_ELEMENTS else self._sorted

    def _in_place(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        t, k, expert = len(z), self.topk, chosen.view(-1, 1)
        if t > 1 and t * k * max(self.inner, self.width) > INDEX_ELEMENTS:
            halves = zip(*(part.split(-(-t // 2)) for part in (z, chosen, weight)))
            return torch.cat([self._in_place(*half) for half in halves])
        # Both products are sums of weighted rows of the stacked matrices, so no matrix is copied.
        rows = torch.add(self._inputs, expert, alpha=self.inner)
        each = z.unsqueeze(1).expand(t, k, self.inner).reshape(-1)
        hidden = _weighted_sums(self._rows1, rows, each).view(t, k, self.width)
        hidden = hidden.relu_().mul_(hidden).mul_(weight.unsqueeze(-1))
        rows = torch.add(self._outputs, expert, alpha=self.width)
        return _weighted_sums(self._rows2, rows.view(t, -1), hidden.view(-1))

    def _gathered(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        t, k, index = len(z), self.topk, chosen.view(-1)
        fc1 = self.fc1.index_select(0, index)  # [t * topk, inner, ffn]
        fc2 = self.fc2.index_select(0, index).view(t, -1, self.inner)
        each = z.unsqueeze(1).expand(t, k, self.inner).reshape(t * k, 1, -1)
        hidden = torch.bmm(each, fc1).view(t, k, self.width)
        hidden = hidden.relu_().mul_(hidden).mul_(weight.unsqueeze(-1))
        return torch.bmm(hidden.view(t, 1, -1), fc2).squeeze(1)

    def _sorted(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        expert = chosen.view(-1)
        order = expert.argsort(stable=True)
        token = order.div(self.topk, rounding_mode="floor")
        rows, weight = z.index_select(0, token), weight.view(-1).index_select(0, order)
        if z.is_cuda and self._grouped:
            y = self._grouped_products(rows, weight, expert)
        else:
            counts = torch.bincount(expert, minlength=self.experts).tolist()
            y = squared_relu_experts(rows, weight, *self.each, counts, recompute=True)
        # Restore the order of the tokens, where one reduction sums a token's experts.
        by_token = torch.empty_like(y).index_copy_(0, order, y)
        return by_token.view(len(z), self.topk, -1).sum(1)

    def _grouped_products(self, rows: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """As `squared_relu_experts` of rows sorted by expert; `expert` [t]: of each, in any order."""
        counts = torch.zeros(self.experts, dtype=torch.int32, device=expert.device)
        ends = counts.scatter_add_(0, expert, torch.ones_like(expert, dtype=torch.int32)).cumsum(0)
        ends = ends.to(torch.int32)
        hidden = grouped_mm(rows, self.fc1, offs=ends)
        result: Tensor = grouped_mm(weighted_values(hidden, weight), self.fc2, offs=ends)
        return result


def _weighted_sums(table: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """Sums of weighted rows of a table."""
    result: Tensor = torch.embedding_bag(table, rows.view(-1), _starts(*rows.shape), False, 0, False, weight)[
        0
    ]
    return result


@lru_cache(maxsize=64)
def _starts(sums: int, r: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(0, sums * r, r)
