"""What Megatron draws before the first step: the distribution of each tensor, and what must not be alike.

A mean of n numbers lies within six of its standard deviations, and so does their standard deviation: of the
numbers that Megatron's seed draws about one in 10^9 lies outside, and a seed that passes once always passes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_nemotron3.proof.certify.bench import Finding, PropertyState, failed
from megatron_nemotron3.proof.certify.tensors import Tensors

INITIALIZATION, DRAWS = "initialization", "draws that differ"
_SIGMAS = 6.0
#: In BF16 torch makes normal numbers on a CPU from 256 uniform ones, so their deviation is 1 % smaller.
_NARROW = 0.01
#: Of a range: a number in BF16 is rounded by 2^-9 of itself at most.
_ROUNDED = 2.0**-8
#: Shortest row of a matrix that is compared with the others: numbers of BF16 repeat by chance.
_ROW = 16


@dataclass(frozen=True)
class Law:
    """A distribution: its mean and standard deviation, and the range of its numbers."""

    mean: float
    deviation: float
    least: float = -math.inf
    most: float = math.inf

    @classmethod
    def uniform(cls, least: float, most: float) -> Law:
        """Numbers between two."""
        return cls((least + most) / 2, (most - least) / math.sqrt(12), least, most)

    @classmethod
    def constant(cls, value: float) -> Law:
        """One number."""
        return cls(value, 0.0, value, value)

    def against(self, values: Tensor) -> str:
        """Say what of some numbers is not of this distribution; "" if nothing is."""
        count, mean = values.numel(), float(values.mean())
        least, most = float(values.min()), float(values.max())
        slack = _ROUNDED * max(abs(self.least), abs(self.most)) if self.deviation else 0.0
        if not self.least - slack <= least <= most <= self.most + slack:
            return f"between {least:.4g} and {most:.4g}, not between {self.least:.4g} and {self.most:.4g}"
        if abs(mean - self.mean) > _SIGMAS * self.deviation / math.sqrt(count):
            return f"mean {mean:.4g} of {count} numbers, not {self.mean:.4g}"
        # Of normal numbers; the bound is wider for numbers in a range.
        found = float((values - self.mean).square().mean().sqrt())
        if abs(found - self.deviation) > (_SIGMAS / math.sqrt(2 * count) + _NARROW) * self.deviation:
            return f"standard deviation {found:.4g} of {count} numbers, not {self.deviation:.4g}"
        return ""


@dataclass(frozen=True)
class Laws:
    """The distributions of a model's tensors, by Megatron's options.

    Source: `--init-method-std`, `--embedding-init-method-std` and `--apply-layernorm-1p`; MambaMixer of
    megatron-core; Mamba-2's reference for A, dt and the convolution.
    """

    #: `--init-method-std`, and that of the embedding.
    deviation: float
    embedding: float
    #: Layers of the decoder: matrices that end a layer are smaller by the square root of their number.
    layers: int
    #: Size of Mamba's convolution.
    kernel: int = 4
    #: What gains begin with.
    gain: float = 1.0

    def of(self, key: str) -> tuple[Law, str] | None:
        """Return the distribution of a tensor, and of what ("", "exp" or "softplus" of it)."""
        if re.search(r"(layer_?norm(_weight|\.weight)|norm\.weight)$", key):
            return Law.constant(self.gain), ""
        if key.endswith(".D"):
            return Law.constant(1.0), ""
        if key.endswith(".A_log"):
            return Law.uniform(1.0, 16.0), "exp"
        if key.endswith(".dt_bias"):  # its logarithm is uniform
            return Law.uniform(math.log(1e-3), math.log(0.1)), "log softplus"
        if ".conv1d." in key:
            return Law.uniform(-(self.kernel**-0.5), self.kernel**-0.5), ""
        if key.endswith("bias"):
            return Law.constant(0.0), ""
        if key.endswith("word_embeddings.weight"):
            return Law(0.0, self.embedding), ""
        if re.search(r"(out_proj|linear_proj|linear_fc2|fc2_latent_proj)\.weight$", key):
            return Law(0.0, self.deviation / math.sqrt(self.layers)), ""
        return (Law(0.0, self.deviation), "") if re.search(r"\.weight(\.\w+)?$", key) else None


_FORMS = {
    "": lambda t: t,
    "exp": torch.exp,
    "log softplus": lambda t: torch.nn.functional.softplus(t).log(),
}


def initialized(laws: Laws, start: Tensors, where: str) -> Iterator[Finding]:
    """Yield whether each tensor, and each kind of tensor over all layers, has its distribution."""
    kinds: dict[str, list[Tensor]] = defaultdict(list)
    count = 0
    for key, tensor in start.items():
        if (found := laws.of(key)) is None:
            continue
        law, form = found
        values, count = _FORMS[form](tensor.double()).flatten(), count + 1
        kinds[re.sub(r"layers\.\d+", "layers.*", key)].append(values)
        if wrong := law.against(values):
            yield failed(INITIALIZATION, where, f"{key}: {wrong}")
            return
    for kind, parts in kinds.items():
        law, _ = laws.of(kind) or (Law(0, 0), "")
        if wrong := law.against(torch.cat(parts)):
            yield failed(INITIALIZATION, where, f"{kind}: {wrong}")
            return
    yield Finding(INITIALIZATION, PropertyState.PASS, where, detail=f"{count} tensors")


def unlike(start: Tensors, where: str) -> Iterator[Finding]:
    """Yield whether two rows or two columns of a matrix, or of its experts, were drawn alike.

    Ranks that draw their parts from the same seed make parts alike.
    """
    matrices = 0
    for key, tensor in start.items():
        if tensor.dim() < 2 or ".conv1d." in key:
            continue
        matrices += 1
        for form, what in ((tensor, "rows"), (tensor.mT, "columns")):
            rows = form.reshape(-1, form.shape[-1])
            if rows.shape[-1] < _ROW:
                continue
            if alike := len(rows) - len(torch.unique(rows.float(), dim=0)):
                yield failed(DRAWS, where, f"{key}: {alike} of {len(rows)} {what} are copies of others")
                return
    yield Finding(DRAWS, PropertyState.PASS, where, detail=f"{matrices} matrices")
