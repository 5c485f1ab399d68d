"""Call Megatron's pretrain() with our model provider, as a pipeline with its own entry point does.

    python examples/04_pretrain_with_model_provider.py

A real entry point parses the command line. This one sets its options itself, so that it runs as it is.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # this checkout, if the package is not installed

if __name__ == "__main__" and "RANK" not in os.environ:  # by itself: the launcher also runs without a GPU
    from megatron_nemotron3 import run

    run.main([__file__])
    raise SystemExit

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_nemotron3 import get, model_provider
from megatron_nemotron3.launch import Launch, TrainingSchedule, adjusted, flags, mock_data, to_argv
from megatron_nemotron3.models import tiny
from megatron_nemotron3.train import datasets_provider, forward_step

config = tiny(get("nano"))
schedule = adjusted(
    TrainingSchedule(log_interval=1, eval_iters=1), steps=3, seq_length=64, global_batch_size=2, lr=1e-3
)
sys.argv += to_argv(
    flags(Launch.of(config, precision="fp32", backend="torch", schedule=schedule, data=mock_data(config)))
)

pretrain(
    pretrain_cfg_container_from_args(parse_and_validate_args()),
    datasets_provider,
    ModelType.encoder_or_decoder,
    forward_step,
    model_provider=model_provider,
)
