"""Pre-train with Megatron's own training loop: a short form of the stock `pretrain_hybrid.py`.

    flags=$(nemotron3 flags super --schedule published --shell) || exit 1
    eval "set -- $flags"
    nemotron3 run megatron_nemotron3/train/pretrain_script.py "$@" --data-path …

`nemotron3 train` starts this script, because PyPI's megatron-core has the loop but not the stock script. It
does pre-training, with `--dataloader-inter-document-masking` on isolated documents, and with `--sft`
fine-tuning on packed conversations (`fine_tuning.py`). ModelOpt is left to the stock script.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_nemotron3.train import fine_tuning
from megatron_nemotron3.train.build import model_provider
from megatron_nemotron3.train.data.packing import pack_arguments
from megatron_nemotron3.train.isolation import micro_batch_problem

#: Options whose batches hold other cuts or teacher data. Only the stock script supports them.
UNSUPPORTED = ("hybrid_context_parallel", "logits_load_dir")

#: A loss is spiky if it is as many times the largest one so far, as in the stock script.
SPIKY_LOSS_FACTOR = 10

#: Inputs of the model; each is [b, s / cp], but for the attention mask (None: causal).
BATCH = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
#: Borders of isolated documents [1, documents + 1], and tokens of the longest one [1].
BORDERS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")

_Batch = dict[str, "torch.Tensor | None"]


def get_batch(data_iterator: Iterator[_Batch], vp_stage: int | None) -> _Batch:
    """This rank's `BATCH` and `BORDERS`; middle pipeline stages need no `BATCH` (MTP is on the last one).

    Rank 0 of each TP group draws a batch; Megatron broadcasts the parts that the ranks need.
    """
    args, tp_rank = get_args(), mpu.get_tensor_model_parallel_rank()
    isolated, names = args.dataloader_inter_document_masking, (*BATCH, *BORDERS)
    if not isolated and not is_first_or_last_pipeline_stage(vp_stage):
        return dict.fromkeys(names)
    batch: _Batch = {}
    if tp_rank == 0:
        drawn = next(data_iterator)  # a blend of several texts adds the number of the text, which has no s
        found = {name: drawn.get(name) for name in names}
        batch = {k: v.cuda(non_blocking=True) if v is not None else None for k, v in found.items()}
    no_hybrid_cp = False
    batch = get_batch_on_this_tp_rank(
        batch,
        isolated,  # by position: it is renamed in each version
        no_hybrid_cp,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=args.mtp_num_layers is not None and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    cut: _Batch = get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        hybrid_cp_group_func=None,
        use_per_sequence_balancing=isolated,
    )
    return {name: cut.get(name) for name in names}


def packed_of(batch: _Batch) -> PackedSeqParams | None:
    """What keeps the layers inside of documents; None if they are not isolated."""
    borders, longest = batch["cu_seqlens"], batch["max_seqlen"]
    if borders is None or longest is None:
        return None
    update_seqlen_stats_from_cu_seqlens(borders[0])  # Megatron's count of FLOPs
    arguments = pack_arguments(borders[0], int(longest), get_args().seq_length)
    return PackedSeqParams(qkv_format="thd", **arguments)


def loss_function(
    model: torch.nn.Module, loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the token losses [b, s] under the mask, number of tokens, and what Megatron logs."""
    mask = loss_mask.reshape(-1).float()
    loss = (output.reshape(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=reject,
                message=f"{what} in the local loss",
                tolerance=0.0,
                fatal=True,
            )
    if get_args().check_for_spiky_loss:
        machine = get_rerun_state_machine()
        machine.validate_result(
            result=loss,
            rejection_func=partial(
                machine.is_unexpectedly_large, threshold=SPIKY_LOSS_FACTOR, context="loss"
            ),
            message="Spiky loss",
            tolerance=0.0,
            fatal=False,
        )
    return loss, tokens, fine_tuning.reported(model, output, mask, tokens)


def forward_step(data_iterator: Iterator[_Batch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """One microbatch forward; Megatron's schedule calls the returned loss function on the last stage."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packed = packed_of(batch)
    timers("batch-generator").stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed,
    )
    # Middle stages have no mask; Megatron calls the loss function on the last stage only.
    return output, partial(loss_function, model, batch["loss_mask"])  # type: ignore[arg-type]


def validation_samples(args: Any, requested: int | None) -> int | None:
    """Samples of the validation set, given the number that Megatron requests (None: the whole set)."""
    if requested is None or not args.eval_interval:
        return requested
    # Megatron counts the evaluations of this command line's interval, and begins behind what the checkpoint's
    # run has consumed. A run that goes on with a longer interval may have consumed more than that count.
    start = getattr(args, "start_eval_at_iter", None) or 0
    before = max(0, args.iteration // args.eval_interval - start // args.eval_interval)
    batch = getattr(args, "eval_global_batch_size", args.global_batch_size)
    return requested + max(0, args.consumed_valid_samples - before * args.eval_iters * batch)


def _wanted(args: Any, num_samples: Sequence[int | None]) -> tuple[list[int | None], dict[str, Any]]:
    train, validation, test = num_samples
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return [train, validation_samples(args, validation), test], {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "multiple_validation_sets": args.multiple_validation_sets,
        "full_validation": args.full_validation,
        "path_to_cache": args.data_cache_path,
    }


def conversations_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Train, validation and test sets of conversations (`--sft`); `num_samples` of each."""
    return fine_tuning.datasets(get_args(), *_wanted(get_args(), num_samples))


def datasets_provider(num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
    """Train, validation and test sets of text; `num_samples` of each."""
    args = get_args()
    wanted, settings = _wanted(args, num_samples)
    sequences = args.per_dataset_sequences_path
    config = GPTDatasetConfig(
        **settings,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        sequences_per_dataset=None if sequences is None else json.loads(Path(sequences).read_text()),
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
        inter_document_masking=args.dataloader_inter_document_masking,
    )

    def needed_here() -> bool:
        stage = args.dataloader_inter_document_masking or is_first_or_last_pipeline_stage(vp_stage)
        return mpu.get_tensor_model_parallel_rank() == 0 and bool(stage)

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, wanted, needed_here, config).build()


for _provider in (conversations_provider, datasets_provider):
    _provider.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's options and train."""
    args = parse_and_validate_args()
    if given := [name for name in UNSUPPORTED if getattr(args, name, None)]:
        option = "--" + given[0].replace("_", "-")
        raise SystemExit(
            f"{option} is not supported by this script: run the stock pretrain_hybrid.py with the same flags"
        )
    if args.dataloader_inter_document_masking and args.micro_batch_size != 1 and not args.sft:
        raise SystemExit(micro_batch_problem(args.micro_batch_size))
    step, provider = forward_step, datasets_provider
    if args.sft:
        if reason := fine_tuning.problem(args):
            raise SystemExit(reason)
        fine_tuning.MEAN.read()
        step, provider = fine_tuning.forward_step, conversations_provider
        # Megatron's evaluation would take the mean of the rows' means, and rows hold different numbers.
        args.sft = False
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=step,
    )


if __name__ == "__main__":
    main()
