"""Training runs of Megatron-Bridge on a CPU, with the numbers of `short_run`; for `run_distributed`."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

# Before megatron.bridge, which it lets be imported without TransformerEngine.
import megatron_nemotron3.bridge  # isort: skip
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_nemotron3.cpu.async_save import forked_results
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import get, tiny
from megatron_nemotron3.train import log, processes
from tests.bridge.ranks import set_layout
from tests.support import distributed
from tests.support.short_run import mock_argv, short_schedule

CONFIG = tiny(get("super")).but(pattern="ME*", vocab_size=255)
STEPS, EVERY, SEQUENCE, BATCH = 4, 2, 32, 2


def our_options(layout: ParallelLayout, *extra: str, **folders: str) -> list[str]:
    """Options of our launcher's run."""
    schedule = short_schedule(STEPS, seq_length=SEQUENCE, global_batch_size=BATCH, save_interval=EVERY)
    return mock_argv(CONFIG, layout, schedule, extra, **folders)


def ours(layout: ParallelLayout, *extra: str, **folders: str) -> dict[int, log.LogStep]:
    """Steps of our launcher's run, which is started with the same numbers."""
    words = our_options(layout, *extra, **folders)
    output = distributed.run_launcher(["--device", "cpu", str(processes.ENTRY), *words], layout.world_size)
    return steps_of(output)


def steps_of(output: str) -> dict[int, log.LogStep]:
    """Iteration -> losses in what a run printed."""
    curve = log.Curve()
    for line in output.splitlines():
        curve.add(line)
    return curve.steps


def bridges(hf: Path, save: Path, load: Path, builder: bool, sizes: dict[str, int]) -> dict[int, log.LogStep]:
    """Steps of Bridge's `pretrain` on this rank, from the checkpoint in `load`, else the weights in `hf`."""
    provider = AutoBridge.from_hf_pretrained(str(hf)).to_megatron_provider()
    set_layout(provider, **sizes)
    provider.seq_length, provider.calculate_per_token_loss = SEQUENCE, True
    # As our flags, so that the checkpoints have equal shapes.
    option, words = "--make-vocab-size-divisible-by", our_options(ParallelLayout(**sizes))
    divisor = words[words.index(option) + 1] if option in words else "128"  # Megatron's default
    provider.make_vocab_size_divisible_by = int(divisor)
    model: Any = megatron_nemotron3.bridge.model_config(provider) if builder else provider
    with redirect_stdout(io.StringIO()) as output, forked_results():
        pretrain(_configuration(model, save, load), forward_step)
    return steps_of(output.getvalue())


def export(hf: Path, checkpoint: Path, output: Path) -> str:
    """Bridge's own export of a checkpoint; returns the class of the stack built from run_config.yaml."""
    bridge = AutoBridge.from_hf_pretrained(str(hf))
    models = bridge.load_megatron_model(checkpoint, wrap_with_ddp=False)
    bridge.save_hf_pretrained(models, output, show_progress=False, strict=True)
    return type(models[0].decoder).__name__


def _configuration(model: Any, save: Path, load: Path) -> ConfigContainer:
    """The rest of the run: numbers of `short_schedule` and `mock_argv`."""
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=STEPS, global_batch_size=BATCH, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=100, eval_iters=0),
        optimizer=OptimizerConfig(
            lr=3e-3,
            min_lr=1e-4,
            weight_decay=0.1,
            adam_beta2=0.95,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="WSD",
            lr_wsd_decay_style="minus_sqrt",
            lr_decay_iters=STEPS,
            lr_wsd_decay_iters=1,
            lr_warmup_iters=0,
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            weight_decay_incr_style="constant",
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, average_in_collective=False),
        dataset=MockGPTDatasetConfig(
            seq_length=SEQUENCE,
            random_seed=1234,
            split="969,30,1",
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            dataloader_type="single",
            num_workers=0,
            skip_getting_attention_mask_from_dataset=True,
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer", vocab_size=CONFIG.vocab_size, use_tokenizer_vocab_size=True
        ),
        checkpoint=CheckpointConfig(
            save=str(save), load=str(load), save_interval=EVERY, ckpt_format="torch_dist", async_save=False
        ),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo"),
        mixed_precision=None,
    )
