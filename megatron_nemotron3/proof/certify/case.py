"""What is trained, on what, and in which layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config

if TYPE_CHECKING:  # Python 3.11
    from typing import Self

    from torch import Tensor

    from megatron_nemotron3.proof.certify.batch import Batch


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
        from megatron_nemotron3.proof.certify.batch import cut, cut_packed

        if self.documents:
            share, packed = cut_packed(batch, self.documents, whole=self.cut_whole)
        else:
            share, packed = cut(batch)
        yield {**share, "model_mask": share["loss_mask"].clone()}, packed

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
