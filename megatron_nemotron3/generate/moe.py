"""The mixture of experts, with or without a latent width (LatentMoE, arXiv 2601.18089).

    y = x + W_up sum_i p_i E_i(W_down u) + shared(u),   u = norm(x)

Three implementations of the same sum; the number of tokens decides which is fastest:

    gathered   gathers the matrices of the selected experts into one product, without a host synchronization
    dense      applies every expert to every token, with zero weights: for few small experts and some tokens
    sorted     sorts tokens by expert, as in training; on a GPU with torch's grouped product the numbers of
               tokens stay on the device
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_nemotron3.generate.batch import ForwardBatch
from megatron_nemotron3.generate.layers import ReadTensor, read_norm, transposed
from megatron_nemotron3.generate.state import LayerState
from megatron_nemotron3.layers.functional import weighted_values
from megatron_nemotron3.layers.grouped import squared_relu_experts
from megatron_nemotron3.layers.grouped_gpu import grouped_mm, grouped_mm_problem
from megatron_nemotron3.models import Nemotron3Config

#: Elements of gathered matrices up to which gathering is faster than one product per expert, by device type.
#: Measured on one AVX-512 core; on a GPU, gathering reads memory three times but saves many launches.
GATHERED_ELEMENTS = {"cpu": 2**18, "cuda": 2**28}
#: The dense product is faster up to these: elements of one of the two stacked weights, and times tokens.
DENSE_ELEMENTS, DENSE_PRODUCTS = 2**18, 2**23
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
        self.router = transposed(read("mixer.gate.weight", experts, d, float32=True))
        self.bias = read("mixer.gate.e_score_correction_bias", experts, float32=True)
        # Tensors, because an operation with a Python number would first create one.
        self.scale = torch.tensor(c.moe_router_topk_scaling_factor, device=self.bias.device)
        self.eps = torch.tensor(EPS, device=self.bias.device)
        up = read("mixer.shared_experts.up_proj.weight", shared, d)
        if self.latent:
            # One product for the latent input and the shared expert: both see the same u.
            up = torch.cat([read("mixer.fc1_latent_proj.weight", inner, d), up])
            self.out = transposed(read("mixer.fc2_latent_proj.weight", d, inner))
        self.up = transposed(up)
        self.shared_down = transposed(read("mixer.shared_experts.down_proj.weight", d, shared))
        self.fc1 = self._stack_experts(read, "up_proj", width, inner)
        # [experts, ffn, inner] like fc1, so that one product also sums over a token's experts.
        self.fc2 = self._stack_experts(read, "down_proj", inner, width, transpose=True)
        self._grouped = grouped_mm_problem(self.fc1[0], [self.fc1[0]], experts) is None
        self.each = list(self.fc1.unbind()), [weight.t() for weight in self.fc2.unbind()]

    def _stack_experts(
        self, read: ReadTensor, name: str, rows: int, columns: int, transpose: bool = False
    ) -> Tensor:
        stack = None
        for e in range(self.experts):
            weight = read(f"mixer.experts.{e}.{name}.weight", rows, columns)
            weight = weight.t() if transpose else weight
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
        up = torch.mm(u, self.up)
        if self.latent:
            z, hidden = up.split_with_sizes((self.inner, up.shape[1] - self.inner), 1)
        else:
            z, hidden = u, up
        hidden = hidden.relu()
        x = torch.addmm(x, hidden.mul_(hidden), self.shared_down)
        y = self._implementation(len(x), x.device.type)(z, chosen, weight)
        return (torch.addmm(x, y, self.out) if self.latent else x.add_(y)), None

    def needs_counts(self, tokens: int, device: str) -> bool:
        """Whether a pass over so many tokens reads the tokens per expert on the host."""
        grouped = device == "cuda" and self._grouped
        return not grouped and self._implementation(tokens, device) == self._sorted

    def _implementation(self, tokens: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        matrix, pairs = self.inner * self.width, tokens * self.topk
        total = self.experts * matrix
        if 2 * pairs >= self.experts and total <= DENSE_ELEMENTS and tokens * total <= DENSE_PRODUCTS:
            return self._dense
        return self._gathered if pairs * matrix <= GATHERED_ELEMENTS.get(device, 0) else self._sorted

    def _gathered(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        t, index = len(z), chosen.view(-1)
        fc1 = self.fc1.index_select(0, index).view(t, -1, self.inner)  # [t, topk * ffn, inner]
        fc2 = self.fc2.index_select(0, index).view(t, -1, self.inner)
        hidden = torch.bmm(fc1, z.unsqueeze(-1)).view(t, self.topk, self.width)
        hidden = hidden.relu_().mul_(hidden).mul_(weight.unsqueeze(-1))
        return torch.bmm(hidden.view(t, 1, -1), fc2).squeeze(1)

    def _dense(self, z: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        t = len(z)
        weights = z.new_zeros(t, self.experts).scatter_(1, chosen, weight.to(z.dtype))
        hidden = torch.mm(z, self.fc1.view(-1, self.inner).t()).relu_()
        hidden = hidden.mul_(hidden).view(t, self.experts, -1).mul_(weights.unsqueeze(-1))
        return torch.mm(hidden.view(t, -1), self.fc2.view(-1, self.inner))

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
        hidden = grouped_mm(rows, self.fc1.transpose(1, 2), offs=ends)
        result: Tensor = grouped_mm(weighted_values(hidden, weight), self.fc2, offs=ends)
        return result
