"""Supervised fine-tuning (SFT) for the training script: rows of conversations, and the mean the loss is.

Every rank reads the rows itself, so nothing is broadcast and all pipeline stages know the borders and the
padding, which the routers leave out (layers/padding.py).

    mean over tokens          sum of the assistant's token losses / their number, over the global batch
    mean over conversations   mean of the conversations' own means: a token weighs 1 / n in one of n

Both are a sum of token losses times weights, divided by a number that Megatron adds up over micro-batches and
ranks (`--calculate-per-token-loss`). MTP takes the same weights from the loss mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.common.switches import SFT_MEAN, EnvironmentSetting
from megatron_nemotron3.layers.context_parallel import zigzag
from megatron_nemotron3.train.data.packing import (
    PackedConversations,
    PackedRow,
    conversation_multiple,
    epoch_order,
    pack_arguments,
)
from megatron_nemotron3.train.inputs import parse_mean

Sample = dict[str, Any]


MEAN = EnvironmentSetting(SFT_MEAN, parse_mean)


def problem(args: Any) -> str | None:
    """Why Megatron's parsed arguments do not go with conversations, with the cure; None if they do."""
    if args.micro_batch_size != 1:
        return (
            f"--micro-batch-size {args.micro_batch_size} with --sft: rows are packed; use 1 and longer rows"
        )
    if not args.calculate_per_token_loss:
        return "--sft needs --calculate-per-token-loss: its loss is a mean over the global batch, not of rows"
    if args.tokenizer_type != "SFTTokenizer" or args.sft_tokenizer_prompt_format != "default":
        return (
            f"--tokenizer-type {args.tokenizer_type} --sft-tokenizer-prompt-format "
            f"{args.sft_tokenizer_prompt_format}: this script uses the tokenizer's own chat template; give "
            "SFTTokenizer and default"
        )
    if args.mock_data:
        return "--mock-data with --sft: give --data-path FILE.jsonl"
    return None


@dataclass
class ConversationConfig(BlendedMegatronDatasetConfig):
    """What the rows depend on, on top of Megatron's."""

    #: Folder of the tokenizer.
    chat_tokenizer: str = ""
    #: As in `PackedConversations`.
    multiple: int = 1


class ConversationDataset(MegatronDataset):
    """Rows of a split of a file, in another order in each epoch. Sample: tensors of one `PackedRow`."""

    dataset: PackedConversations

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not len(self.indices):
            raise ValueError(
                f"{self.dataset_path}: --split {self.config.split} leaves none of {len(self.dataset)} rows "
                f"for {self.index_split.name}: give it a larger share"
            )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: PackedConversations) -> int:
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: ConversationConfig) -> PackedConversations:
        packed = PackedConversations(
            dataset_path, config.chat_tokenizer, config.sequence_length, config.multiple, config.path_to_cache
        )
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            print(packed.describe(), packed.samples(config.chat_tokenizer), sep="\n", flush=True)
        return packed

    def __len__(self) -> int:
        """Number of samples; all rows once if no number was requested."""
        return self.num_samples or len(self.indices)

    def __getitem__(self, index: int) -> Sample:
        epoch, place = divmod(int(index), len(self.indices))
        order = epoch_order(self.config.random_seed, epoch, len(self.indices))
        return sample(self.dataset.row(int(self.indices[order[place]])))


def sample(row: PackedRow) -> Sample:
    """Tensors of a row, without the dimension of the micro-batch, which the loader adds."""
    arrays = {
        "tokens": row.tokens,
        "labels": row.labels,
        "loss_mask": row.loss_mask,
        "position_ids": row.positions,
        "padding": row.padding,
        "borders": row.borders,
    }
    return {name: torch.from_numpy(values) for name, values in arrays.items()}


def datasets(args: Any, num_samples: list[int | None], settings: dict[str, Any]) -> Any:
    """Build the training, validation and test sets of Megatron's arguments, on every rank."""
    config = ConversationConfig(
        **settings,
        chat_tokenizer=args.tokenizer_model,
        multiple=conversation_multiple(args.context_parallel_size),
    )
    return BlendedMegatronDatasetBuilder(ConversationDataset, num_samples, lambda: True, config).build()


def weights(mask: torch.Tensor, borders: torch.Tensor, mean: str) -> tuple[torch.Tensor, int]:
    """Weight of each token [1, s], and what the weighted sum is divided by."""
    if mean == "tokens":
        return mask, int(mask.sum())
    result, count = torch.zeros_like(mask), 0
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        part = mask[:, start:end]
        if counted := float(part.sum()):
            result[:, start:end] = part * (CONVERSATION / counted)
            count += 1
    return result, count * CONVERSATION


#: Weight of a conversation in the mean over conversations.
CONVERSATION = 1024


@dataclass(frozen=True)
class RankInputs:
    """A row's share of this context-parallel rank, and the divisor of its loss."""

    tensors: dict[str, torch.Tensor]
    packed: PackedSeqParams
    divisor: int


def inputs(drawn: Sample, mean: str, cp: int, rank: int) -> RankInputs:
    """Inputs of the model for a sample of the loader."""
    borders = drawn["borders"][0]
    named = {name: drawn[name] for name in ("tokens", "labels", "position_ids", "padding")}
    named["loss_mask"], divisor = weights(drawn["loss_mask"], borders, mean)
    if cp > 1:
        here = zigzag(borders, cp, rank)
        named = {name: tensor[:, here] for name, tensor in named.items()}
    device = torch.device(torch.cuda.current_device())
    on_device = borders.to(device, non_blocking=True)
    arguments = pack_arguments(on_device, int(borders.diff().max()), int(borders[-1]))
    packed = PackedSeqParams(qkv_format="thd", **arguments)
    moved = {name: tensor.to(device, non_blocking=True).contiguous() for name, tensor in named.items()}
    return RankInputs(moved, packed, divisor if rank == 0 else 0)


def forward(model: torch.nn.Module, given: RankInputs) -> torch.Tensor:
    """Token losses [1, s / cp] of the last stage, or what its stage computes."""
    tensors = given.tensors
    output: torch.Tensor = model(
        tensors["tokens"],
        tensors["position_ids"],
        None,
        labels=tensors["labels"],
        loss_mask=tensors["loss_mask"],
        packed_seq_params=given.packed,
        padding_mask=tensors["padding"],
    )
    return output


def reported(
    model: Any, output: torch.Tensor, weights: torch.Tensor, divisor: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What Megatron logs of token losses, as [weighted sum, divisor]: cross-entropy and divergences."""
    hooks = getattr(unwrapped(model), "distillation", None)
    entropy, *divergences = hooks.parts if hooks is not None and hooks.parts else [output]

    def total(tokens: torch.Tensor) -> torch.Tensor:
        loss = (tokens.detach().reshape(-1).float() * weights.reshape(-1).float()).sum()
        return torch.stack([loss, divisor.to(loss.dtype)])

    numbers = [""] if len(divergences) == 1 else [f" {i}" for i in range(1, len(divergences) + 1)]
    # Rounding makes that of equal models negative, and Megatron prints no value below 0.
    found = {f"divergence{number}": total(one).clamp(min=0) for number, one in zip(numbers, divergences)}
    return {"lm loss": total(entropy), **found}


def loss_function(
    model: torch.nn.Module, given: RankInputs, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Weighted sum of the token losses, its divisor, and what Megatron logs."""
    mask = given.tensors["loss_mask"]
    loss = (output.reshape(-1).float() * mask.reshape(-1)).sum()
    divisor = torch.tensor(given.divisor, dtype=torch.int, device=loss.device)
    return loss, divisor, reported(model, output, mask, divisor)


def forward_step(data_iterator: Iterator[Sample], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One row forward; Megatron's schedule calls the returned loss function on the last stage."""
    cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    given = inputs(next(data_iterator), MEAN.current(), cp, rank)
    return forward(model, given), partial(loss_function, model, given)
