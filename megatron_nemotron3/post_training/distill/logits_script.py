"""Store a teacher's most probable tokens for every row of a training set, for `nemotron3 distill logits`.

The command line is that of a training on the same data with the teacher's own model. A data lane computes one
part at a time, through Megatron's schedule, in any layout; its first rank of the last stage writes it. A run
goes on with the parts that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.training import get_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.initialize import initialize_megatron
from megatron.training.training import build_train_valid_test_datasets, get_model
from torch import Tensor
from torch.utils.data import default_collate

from megatron_nemotron3.common.hooks import unwrapped
from megatron_nemotron3.common.switches import LOGITS_FOLDER, LOGITS_TEACHER
from megatron_nemotron3.layers.context_parallel import borders_of, gathered, zigzag
from megatron_nemotron3.post_training.distill.stored import key_of, missing_parts, write_part
from megatron_nemotron3.post_training.distill.teacher import load_teacher
from megatron_nemotron3.post_training.distill.topk import draw_quantiles, most_probable
from megatron_nemotron3.train import fine_tuning
from megatron_nemotron3.train.build import model_provider
from megatron_nemotron3.train.inputs import MEANS
from megatron_nemotron3.train.pretrain_script import conversations_provider, datasets_provider, get_batch
from megatron_nemotron3.train.teacher.settings import read_manifest


def _forward(sft: bool, entries: int, manifest: Any, iterator: Iterator[Any], model: Any) -> tuple[Any, Any]:
    """Logits of a micro-batch on the last stage, and what makes its rows of them."""
    if sft:
        cp, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        given = fine_tuning.inputs(next(iterator), MEANS[0], cp, rank)
        batch: dict[str, Any] = given.tensors
        more = {"packed_seq_params": given.packed, "padding_mask": batch["padding"]}
    else:
        batch, more = get_batch(iterator, None), {}
    output = model(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), **more)
    packed = more.get("packed_seq_params")
    return output, partial(_rows, manifest, entries, batch["labels"], packed)


def _rows(
    manifest: Any, entries: int, labels: Tensor, packed: Any, logits: Tensor, non_loss_data: bool = True
) -> list[Any]:
    """(key, ids [s, k + m], log-probabilities [s, k + m + 1]) of each row of logits [b, s / cp, v / tp]."""
    cp, tp = mpu.get_context_parallel_group(), mpu.get_tensor_model_parallel_group()
    rows, tokens = labels.shape
    borders, ends = borders_of(packed, tokens * cp.size())
    keys = [key_of(row, borders) for row in gathered(labels, ends, cp).cpu().numpy()]
    quantiles = None
    if manifest.drawn:  # by the row alone, so that every layout draws the same tokens
        here = zigzag(ends, cp.size(), cp.rank()) if cp.size() > 1 else slice(None)
        seeds = (int(key[:15], 16) for key in keys)
        quantiles = torch.cat([draw_quantiles(manifest.length, manifest.drawn, n)[here] for n in seeds])
    found = most_probable(
        logits.reshape(rows * tokens, -1),
        manifest.k,
        manifest.temperature,
        tp,
        vocabulary=entries,
        quantiles=quantiles,
    )
    ids, log_p = (gathered(each.view(rows, tokens, -1), ends, cp) for each in found[:2])
    return list(zip(keys, ids.int().cpu().numpy(), log_p.cpu().numpy(), strict=True))


def _batches(dataset: Any, samples: list[int], size: int) -> Iterator[Any]:
    for first in range(0, len(samples), size):
        yield default_collate([dataset[i] for i in samples[first : first + size]])


def main() -> None:
    """Write the parts that are missing."""
    args = parse_and_validate_args()
    initialize_megatron()
    sft = args.sft
    if sft and (reason := fine_tuning.problem(args)):
        raise SystemExit(reason)
    provider = conversations_provider if sft else datasets_provider
    args.iteration = 0  # what the provider asks of a run
    dataset, _, _ = build_train_valid_test_datasets(provider, (args.train_samples, 0, 0))
    (model,) = get_model(model_provider, wrap_with_ddp=False)
    load_teacher(unwrapped(model), Path(os.environ[LOGITS_TEACHER]))
    model.eval()
    _write(model, dataset, sft)


def _write(model: Any, dataset: Any, sft: bool) -> None:
    args, folder = get_args(), Path(os.environ[LOGITS_FOLDER])
    manifest = read_manifest(folder)
    # Rank 0 decides what is missing, for a part that another rank writes may appear meanwhile.
    missing = [missing_parts(folder, manifest)]
    torch.distributed.broadcast_object_list(missing, src=0)
    lanes, lane = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    writes = (
        mpu.is_pipeline_last_stage()
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_context_parallel_rank() == 0
    )
    entries = manifest.vocabulary.entries or args.padded_vocab_size
    step = partial(_forward, sft, min(entries, args.padded_vocab_size), manifest)
    size = args.micro_batch_size
    for first in range(0, len(missing[0]), lanes):
        parts = missing[0][first : first + lanes]
        part = parts[lane] if lane < len(parts) else None
        # All lanes compute as many micro-batches, because experts are shared; spare ones repeat a sample.
        count = -(-max(map(len, parts)) // size) * size
        samples = list(part or parts[0])
        samples += samples[:1] * (count - len(samples))
        with torch.no_grad():
            found = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=None if dataset is None else _batches(dataset, samples, size),
                model=model,
                num_microbatches=count // size,
                seq_length=args.seq_length,
                micro_batch_size=size,
                decoder_seq_length=args.seq_length,
                forward_only=True,
                collect_non_loss_data=True,
            )
        if writes and part is not None:
            rows = [row for rows in found for row in rows]
            write_part(folder, manifest, part, rows[: len(part)])
        if torch.distributed.get_rank() == 0:
            print(f"{min(first + lanes, len(missing[0]))} of {len(missing[0])} parts", flush=True)


if __name__ == "__main__":
    main()
