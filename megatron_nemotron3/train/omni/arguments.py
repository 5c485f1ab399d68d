"""The command line of a training job of Nano Omni: Megatron's, with the encoders and where they run.

Megatron's own arguments describe the language model. A checkpoint stores all arguments, so it describes the
whole model.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from megatron.training.arguments import parse_args, validate_args
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.checkpoints.convert.megatron_args import config_of
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.launch.stored_model import loaded
from megatron_nemotron3.models.omni import OmniConfig, with_encoders
from megatron_nemotron3.train.omni.layouts import LANGUAGE, SOUND, VISION, module_layouts
from megatron_nemotron3.train.omni.model import PARTS


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments that Megatron does not have."""
    group = parser.add_argument_group("Nano Omni")
    group.add_argument("--omni-encoders", metavar="JSON", help="as `nemotron3 flags nano-omni` prints it")
    for name in (VISION, SOUND):
        group.add_argument(
            f"--{name}-layout",
            metavar="tp=1,dp=4",
            help="encoder layout (default: that of the language model)",
        )
    group.add_argument("--omni-processor", metavar="FOLDER", help="transformers processor, for --data-path")
    group.add_argument("--omni-no-packing", action="store_true", help="one conversation per row")
    group.add_argument("--freeze", nargs="+", choices=PARTS, default=[], help="parts of the model to freeze")
    return parser


def parse(words: list[str]) -> argparse.Namespace:
    """Parse and validate the command line; it is also in `sys.argv`, where Megatron reads it."""
    args = parse_args(add_arguments)
    for flag in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(args, flag):
            raise ValueError(
                f"--{flag.replace('_', '-')}: a rank without media would not take part in an encoder's "
                "parameter gathers: leave it out; --use-distributed-optimizer shards the optimizer's states"
            )
    if not args.spec:
        raise ValueError("no --spec: use the flags of `nemotron3 flags nano-omni`")
    if not args.omni_encoders:
        raise ValueError("no --omni-encoders: use the flags of `nemotron3 flags nano-omni`")
    sizes = ParallelLayout(
        tp=args.tensor_model_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=args.context_parallel_size,
        ep=args.expert_model_parallel_size,
        etp=args.expert_tensor_parallel_size or 1,
        sp=args.sequence_parallel,
    )
    encoders = {VISION: args.vision_layout, SOUND: args.sound_layout}
    if '"sound": null' in args.omni_encoders:
        del encoders[SOUND]
    layouts = module_layouts(args.world_size, sizes, encoders, args.micro_batch_size)
    args.calculate_per_token_loss = True  # the scale of the encoders' gradients needs the number of tokens
    args.save_tokenizer_assets = False  # Megatron builds no tokenizer: the text is the processor's
    # Megatron's own validation sees the language model's share of the world.
    world, args.world_size = args.world_size, layouts[LANGUAGE].size
    try:
        validate_args(args, {"dataloader_type": "external"})
    finally:
        args.world_size = world
    if args.padded_vocab_size is None:
        args.padded_vocab_size = calculate_padded_vocab_size(
            args.vocab_size,
            args.make_vocab_size_divisible_by,
            args.tensor_model_parallel_size,
            logging_enabled=False,
        )
    args.omni_layouts = {name: str(layout) for name, layout in layouts.items()}
    _require_data(args)
    _require_same_model(args, words)
    return args


def _require_data(args: argparse.Namespace) -> None:
    if args.mock_data:
        return
    if not args.data_path:
        raise ValueError("no data: give --data-path FILE.jsonl, or --mock-data for random tokens and media")
    if not args.omni_processor:
        raise ValueError("--data-path needs --omni-processor: a folder with transformers' processor")
    if args.eval_iters and not args.valid_data_path:
        raise ValueError(f"--eval-iters {args.eval_iters} needs --valid-data-path FILE.jsonl; 0 turns it off")
    for files in (args.data_path, args.valid_data_path or []):
        if len(files) > 1:
            raise ValueError(f"{len(files)} files of conversations, {files[0]} and others: give one")


def layouts_of(args: argparse.Namespace) -> dict[str, Layout]:
    """The modules' layouts, the language model's first."""
    return {name: Layout.parse(text) for name, text in args.omni_layouts.items()}


def omni_of(args: argparse.Namespace) -> OmniConfig:
    """The model of parsed arguments."""
    language = config_of(args, vocab_size=args.vocab_size or args.padded_vocab_size)
    return with_encoders(language, args.omni_encoders)


def _require_same_model(args: argparse.Namespace, words: list[str]) -> None:
    """Check the checkpoint that a command line loads; another layout does not load its random state."""
    found = loaded(words)
    if found is None:
        return
    which, stored = found
    given = stored.args.get("omni_encoders")
    if given is None:
        raise ValueError(
            f"{which} of --load {args.load} is a language model without encoders: convert a folder with them"
        )
    if given != args.omni_encoders:
        before, now = _leaves(given), _leaves(args.omni_encoders)
        name = next(name for name in {**before, **now} if before.get(name) != now.get(name))
        raise ValueError(
            f"--omni-encoders has {name}={now.get(name)}, and {which} of --load {args.load} has "
            f"{name}={before.get(name)}: give the encoders of the checkpoint"
        )
    if stored.args.get("omni_layouts") != args.omni_layouts:
        args.no_load_rng = True


def _leaves(encoders: str) -> dict[str, Any]:
    """The sizes in what `encoders_json` wrote, by names such as "vision.hidden_size"."""
    found: dict[str, Any] = {}
    for name, value in json.loads(encoders).items():
        found |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return found
