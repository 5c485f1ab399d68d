"""The commands of `nemotron3`, in the order of its help. Standard library only."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One line of the help.

    module: below this package; its `register(commands)` calls `commands.add_parser(name)`, adds the options
        and sets `run`, a function from the options to the exit status. It is imported when the command is
        used, so that the others start without it.
    purpose: a phrase without a full stop, also the first line of the command's own help.
    example: runs as it stands beside a finished `runs/demo`; a test runs it.
    """

    name: str
    module: str
    purpose: str
    example: str


_COMMANDS = (
    Command("show", "models.command", "print the sizes of a model", "nemotron3 show super"),
    Command(
        "flags",
        "launch.command",
        "print Megatron's options for a model",
        "nemotron3 flags super --gpu h100",
    ),
    Command(
        "explain",
        "launch.command",
        "show where every option comes from, and what was published",
        "nemotron3 explain super --tp 2 --ep 8 --dp 4",
    ),
    Command(
        "precision",
        "precision.command",
        "show the format of every linear layer, or write the precision file",
        "nemotron3 precision super",
    ),
    Command("doctor", "cli.doctor.command", "check whether this environment can train", "nemotron3 doctor"),
    Command(
        "plan",
        "launch.plan.command",
        "find the fastest layouts of a model on a number of GPUs",
        "nemotron3 plan nano --gpus 16 --gpu h100",
    ),
    Command(
        "search",
        "post_training.compress.search_command",
        "find the smaller forms of a model that meet a budget and lose least",
        "nemotron3 search super --budget params=75B --vary moe_ffn_hidden_size=1280,1792,2688",
    ),
    Command(
        "certify",
        "proof.certify.command",
        "prove on a CPU that a launch computes what one process computes",
        "nemotron3 certify super --tp 2 --pp 4 --ep 8 --dp 4",
    ),
    Command(
        "boundary",
        "boundary.command",
        "show which rows travel between the layouts of two modules",
        "nemotron3 boundary --from tp=2,dp=2 --to tp=4",
    ),
    Command(
        "refit",
        "inference.refit.command",
        "plan which weights a trainer's ranks send to an inference engine's",
        "nemotron3 refit super --from tp=2,ep=8,pp=4 --to tp=8",
    ),
    Command(
        "recipe",
        "cli.recipes",
        "list, print or copy the launch scripts of every model and phase",
        "nemotron3 recipe super pretrain",
    ),
    Command(
        "train",
        "train.command",
        "prepare text, train with Megatron's loop, and report",
        "nemotron3 train super --tiny --steps 100",
    ),
    Command(
        "run",
        "run",
        "run a stock Megatron script, on CPU if there is no GPU",
        'nemotron3 run pretrain_hybrid.py "${ARGS[@]}"',
    ),
    Command(
        "finetune",
        "post_training.finetune.command",
        "fine-tune a Hugging Face folder on conversations, into a Hugging Face folder",
        "nemotron3 finetune demo-hf --conversations chats.jsonl --output tuned",
    ),
    Command(
        "boost",
        "post_training.boost.command",
        "train the MTP heads of a finished model, so that more drafts are accepted",
        "nemotron3 boost runs/demo --output runs/boosted",
    ),
    Command(
        "report",
        "cli.report",
        "write losses, monitors, precision and versions of a run to one HTML file",
        "nemotron3 report runs/demo",
    ),
    Command(
        "logits",
        "post_training.distill.logits_command",
        "store a teacher's most probable tokens for the rows of a data set",
        "nemotron3 logits runs/demo --output demo-logits --samples 8 --topk 16",
    ),
    Command(
        "watch", "train.monitor.watch", "plot the monitored series of a run", "nemotron3 watch runs/demo"
    ),
    Command(
        "check",
        "checkpoints.convert.check",
        "check that a checkpoint is complete and undamaged",
        "nemotron3 check runs/demo",
    ),
    Command(
        "convert",
        "checkpoints.convert.command",
        "convert a checkpoint between Megatron and Hugging Face",
        "nemotron3 convert to-hf runs/demo demo-hf",
    ),
    Command(
        "prune",
        "post_training.compress.command",
        "measure what matters least in a checkpoint, and cut it to smaller sizes",
        "nemotron3 prune runs/demo --text README.md --sizes mamba_num_heads=8 --output pruned",
    ),
    Command(
        "verify",
        "checkpoints.convert.command",
        "compare two checkpoints tensor by tensor",
        "nemotron3 verify runs/demo demo-hf",
    ),
    Command(
        "xtoken",
        "post_training.xtoken.command",
        "write and inspect the projection between two tokenizers' vocabularies",
        "nemotron3 xtoken runs/demo runs/demo",
    ),
    Command(
        "generate",
        "inference.generate.command",
        "continue prompts with a checkpoint's model",
        'nemotron3 generate --checkpoint runs/demo --prompt "def main"',
    ),
    Command(
        "chat",
        "inference.generate.chat_command",
        "talk to a checkpoint's model in the terminal",
        "nemotron3 chat runs/demo",
    ),
    Command(
        "bisect",
        "proof.bisect.command",
        "say which of a trainer and an engine deviates from their checkpoint, where, and why",
        "nemotron3 bisect --checkpoint runs/demo --trainer trainer.pt --engine engine.pt",
    ),
    Command(
        "evaluate",
        "inference.generate.evaluate_command",
        "measure the loss on other text by MTP depth, and how many drafts are accepted",
        "nemotron3 evaluate --checkpoint runs/demo --text README.md",
    ),
)
#: Every command by name.
COMMANDS: dict[str, Command] = {command.name: command for command in _COMMANDS}

#: Examples of the two directions of `convert`.
DIRECTIONS = {
    "convert to-hf": "nemotron3 convert to-hf runs/demo demo-hf",
    "convert from-hf": "nemotron3 convert from-hf demo-hf demo-megatron",
}
