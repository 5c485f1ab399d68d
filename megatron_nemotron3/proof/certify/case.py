"""What is trained, on what, in which layout; and each context-parallel rank's share of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config

if TYPE_CHECKING:  # Python 3.11
    from typing import Self

    from torch import Tensor

#: Tensors of a micro-batch [b, s / cp], and its PackedSeqParams or None.
Batch = tuple[dict[str, "Tensor"], Any]


@dataclass(frozen=True, kw_only=True)
class TrainingCase:
    """A model, how it is spread, and what it is trained on."""

    config: Nemotron3Config
    layout: ParallelLayout = field(default_factory=ParallelLayout)
    #: Megatron's command line but for batch and schedule.
    arguments: tuple[str, ...] = ()
    seq_length: int = 64
    micro_batch_size: int = 1
    sequences: int = 4  # of a global batch
    steps: int = 3
    seed: int = 7
    #: Tokens that do not count. "random": another number in every sequence.
    mask: Literal["none", "random"] = "random"
    #: The model gets labels and returns a loss; without them it returns logits, as in reinforcement learning.
    labels: bool = True
    #: Lengths of the documents packed into each sequence (THD), None for plain sequences.
    documents: tuple[int, ...] | None = None
    #: Cut a packed sequence over context-parallel ranks as if it were one document
    #: (`--dataloader-inter-document-masking` does).
    cut_whole: bool = False
    #: Whether the layers know that it is: Transformer Engine's do not.
    cut_known: bool = True
    #: Adapters on frozen weights, as `LoRA.parse` reads them; None: train the weights.
    lora: str | None = None
    #: What MTP heads alone are trained for, as `Boost.parse` reads it; None: train the weights.
    boost: str | None = None
    #: Importable function called with this rank's chunks before DistributedDataParallel wraps them, to break
    #: something.
    sabotage: Callable[[Sequence[Any]], None] | None = None
    #: Importable function called on this rank before anything is built, to break something.
    fault: Callable[[], None] | None = None

    def at(self, layout: ParallelLayout, **changes: Any) -> Self:
        return replace(self, layout=layout, **changes)

    @property
    def microbatches(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.sequences // self.micro_batch_size // self.layout.dp

    def counting(self, positions: Tensor, random: Tensor) -> Tensor:
        """Which tokens count, of their positions in documents and a random choice, all [sequences, s]."""
        return random if self.mask == "random" else positions >= 0

    def shares(self, batch: dict[str, Tensor]) -> Iterator[Batch]:
        """This rank's share of a micro-batch [b, s], with "model_mask", the mask that the model gets."""
        if self.documents:
            share, packed = cut_packed(batch, self.documents, whole=self.cut_whole)
            self.mark(packed)
        else:
            share, packed = cut(batch)
        yield {**share, "model_mask": share["loss_mask"].clone()}, packed

    def mark(self, packed: Any) -> None:
        """Let the layers know how a row is cut, as the stack does in a script."""
        from megatron_nemotron3.layers.context_parallel import mark_whole

        if self.cut_whole and self.cut_known and self.layout.cp > 1:
            mark_whole(packed)

    def argv(self) -> list[str]:
        batch = {
            "--micro-batch-size": self.micro_batch_size,
            "--global-batch-size": self.sequences,
            "--train-iters": self.steps,
            "--lr": 1e-2,
            "--min-lr": 1e-2,
            "--lr-decay-style": "constant",
            # The step of Adam divides by |gradient| + epsilon. With an epsilon above the gradients it is
            # nearly linear in them; with 1e-8 rounding noise of a zero gradient moves a weight by lr.
            "--adam-eps": 1e-2,
        }
        return [*self.arguments, *(str(word) for pair in batch.items() for word in pair)]


# What follows runs on the ranks.


def cut(batch: dict[str, Tensor]) -> Batch:
    """This context-parallel rank's share of plain sequences."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group), None


def cut_packed(
    batch: dict[str, Tensor],
    documents: tuple[int, ...],
    padded: tuple[int, ...] | None = None,
    whole: bool = False,
) -> Batch:
    """The same of packed documents: two chunks of each, the rank'th from the front and from the back.

    Args:
        documents: their lengths.
        padded: the same with the padding of each inside the row, if they are padded.
        whole: cut the row as if it were one document.
    """
    import torch
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    rows, length = batch["tokens"].shape
    assert rows == 1
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    inside = padded or documents
    lengths = (*inside, length - sum(inside))
    held = []
    for document in torch.arange(length).split((length,) if whole else lengths):
        chunks = document.tensor_split(2 * cp)
        held += [chunks[rank], chunks[-1 - rank]]
    index = torch.cat(held)
    borders, physical = (
        torch.tensor((0, *sizes), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for sizes in (documents, inside)
    )
    longest = max(documents)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=physical if padded else None,
        cu_seqlens_kv_padded=physical if padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        total_tokens=length,
    )
    return {key: t[:, index].contiguous() for key, t in batch.items()}, packed
