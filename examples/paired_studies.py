"""Paired studies of distillation at CPU scale: every seed has its own teacher, students and text.

    python examples/paired_studies.py                          # all studies, five seeds
    python examples/paired_studies.py qad --seeds 8

    distill   a small model trained on the text, on KL(teacher || student), on half of each, and on half of
              each with a teacher of another tokenizer (X-Token, docs/post_training.md)
    stored    the same model trained on KL from 32, 128 or 512 stored tokens of each position: the most
              probable ones, or half of them drawn from the others (`nemotron3 distill logits`)
    prune     a model cut to 55 % of its parameters: as it is, trained on the text and on the teacher; and a
              model of these sizes from random weights
    parts, layers, experts    which parts of a model are cut, and in which layers (pruning_choices.py)
    qad       a model whose weights are packed in NVFP4: as it is, trained on its own logits before packing,
              trained on the text; the model itself, trained on as much text; all with activations in NVFP4
    boost     the MTP heads of a model, trained alone: on the text, and on the model's own distribution;
              boost-losses by each loss, without mixing, on a tenth of the batches. What five drafts give

All arms of a seed start from the same weights, and see the same batches in the same order with the same
schedule. A table has the mean of each arm, losses in nats per token of held-out text, and the mean of the
paired differences from the first arm (or --against) with its 95 % interval and p by Student's t. A finished
seed is a line of results.jsonl and is not computed again.

The text is Python's own sources. Minutes on one core show what the methods do here, not what holds at scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # this checkout, if the package is not installed
for needed in ("pruning_choices.py", "tiny_runs.py"):
    if not (HERE / needed).exists():
        sys.exit(f"{__file__}: {needed} is not beside it: copy the whole folder examples/")

import pruning_choices
import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler, MTPLossLoggingHelper
from tiny_runs import (
    BATCH,
    VALIDATION,
    Loss,
    Text,
    build,
    evaluate,
    logits,
    on_teacher,
    on_text,
    token_losses,
    train,
)

import megatron_nemotron3 as n3
from megatron_nemotron3.common import interval, paired
from megatron_nemotron3.inference.generate import Engine, acceptance, load, losses, windows
from megatron_nemotron3.launch import Boost
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.post_training import compress
from megatron_nemotron3.post_training.boost import train_heads
from megatron_nemotron3.post_training.distill import draw_quantiles, most_probable, topk_divergence
from megatron_nemotron3.post_training.xtoken import Aligner, Kind, SpanLoss, span_losses
from megatron_nemotron3.precision import emulating, parse_emulation
from megatron_nemotron3.train.teacher import ByteVocabulary, Projection

TEACHER = tiny(get("nano")).but(
    name="teacher", pattern="MEM*E", seq_length=128, num_moe_experts=8, moe_router_topk=2
)
#: Of half the vocabulary, so of another tokenizer.
FOREIGN = TEACHER.but(name="foreign", vocab_size=1024)
STUDENT = TEACHER.but(
    name="student", hidden_size=64, moe_ffn_hidden_size=48, moe_shared_expert_intermediate_size=96
)
#: The teacher with an MTP block that learns two depths beside it; boosting trains it at five.
DRAFTER = TEACHER.but(
    name="drafter",
    mtp_pattern="*E",
    mtp_num_layers=2,
    mtp_use_repeated_layer=True,
    max_position_embeddings=256,
)
DRAFTS, HEADS_RATE = 5, 1e-3
#: Tokens of the text, prompts and new tokens that drafts are measured on.
MEASURED, PROMPTS = 8192, (8, 64, 64)
#: Learning rates from random weights, and of models that go on; not searched.
RATE, CUT_RATE, FINE_RATE = 4e-3, 2e-3, 1e-4
#: Sizes of the cut teacher: 55 % of its parameters.
KEPT = {
    "hidden_size": 96,
    "mamba_num_heads": 8,
    "num_attention_heads": 4,
    "num_moe_experts": 6,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 128,
}
#: Values of NEMOTRON3_EMULATE: weights alone, as the converter packs them; weights and activations.
PACKED = "nano-nvfp4"
ACTIVATIONS = "nvfp4,2d=0,every_layer=1,dgrad=0,wgrad=0"

#: Measure -> value of a model; arm -> measures.
Measured = dict[str, float]
Results = dict[str, Measured]


def on_foreign(
    teacher: torch.nn.Module,
    aligner: Aligner,
    projection: Projection,
    kind: Kind,
    model: torch.nn.Module,
    batch: torch.Tensor,
) -> torch.Tensor:
    """Half the X-Token loss against a teacher of another tokenizer, half the loss of the text."""
    tokens, alignment = aligner.batch(batch.tolist())
    with torch.no_grad():
        expected = logits(teacher, torch.nn.functional.pad(tokens, (0, 1)))
    found = logits(model, batch)
    text = torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), batch[:, 1:].flatten())
    return (span_losses(found, expected, alignment, projection, SpanLoss(kind)).mean() + text) / 2


class Lab:
    """The text, sizes of the runs, and what a seed's arms have in common."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.text = Text(options.output / "data", TEACHER)
        self.foreign_text = Text(options.output / "foreign", FOREIGN)
        self.validation = self.text.batches("validation", VALIDATION, seed=0)
        self.folder = options.output
        self.teacher_steps, self.steps = options.teacher_steps, options.steps
        self._teachers: dict[str, tuple[int, torch.nn.Module]] = {}
        ours, theirs = (ByteVocabulary(text.tokenizer) for text in (self.text, self.foreign_text))
        self.aligner, self.projection = Aligner(ours, theirs), Projection.build(ours, theirs)

    def batches(self, seed: int) -> list[torch.Tensor]:
        """What every student of a seed sees; its teacher has seen other windows, most of them."""
        return self.text.batches("train", self.steps, seed)

    def teacher(self, seed: int, config: Nemotron3Config = TEACHER) -> torch.nn.Module:
        """A teacher of the seed, trained on the text; its weights are kept in a file."""
        if self._teachers.get(config.name, (None,))[0] != seed:
            model = build(config, seed)
            file = self.folder / f"{config.name}-{self.teacher_steps}-{seed}.pt"
            tensors = (*model.parameters(), *model.buffers())
            if file.exists():
                with torch.no_grad():
                    for own, stored in zip(tensors, torch.load(file), strict=True):
                        own.copy_(stored)
            else:
                text = self.foreign_text if config is FOREIGN else self.text
                train(model, text.batches("train", self.teacher_steps, seed + 10_000), RATE, on_text)
                torch.save([tensor.detach() for tensor in tensors], file)
            self._teachers[config.name] = seed, model.eval().requires_grad_(False)
        return self._teachers[config.name][1]

    def trained(self, model: torch.nn.Module, seed: int, rate: float, loss: Loss) -> torch.nn.Module:
        """The model after the batches of a seed."""
        train(model, self.batches(seed), rate, loss)
        return model

    def loss(self, model: torch.nn.Module) -> Measured:
        """Validation loss."""
        return {"loss": evaluate(model, self.validation)}

    def loss_and_distance(self, model: torch.nn.Module, seed: int) -> Measured:
        """Validation loss, and KL(teacher || model) on the same text."""
        found = self.loss(model)
        with torch.no_grad():
            distance = on_teacher(self.teacher(seed))
            values = [float(distance(model, batch)) for batch in self.validation]
        return {**found, "KL to the model": sum(values) / len(values)}


def copied(model: torch.nn.Module, emulate: str) -> torch.nn.Module:
    """A trainable model with the same weights, which emulates."""
    with emulating(parse_emulation(emulate)):
        copy = build(TEACHER, 0)
    with torch.no_grad():
        for new, old in zip((*copy.parameters(), *copy.buffers()), (*model.parameters(), *model.buffers())):
            new.copy_(old)
    return copy


def distill(lab: Lab, seed: int) -> Results:
    """Students of the same size and tokens."""
    teacher, foreign = lab.teacher(seed), lab.teacher(seed, FOREIGN)
    losses: dict[str, Loss] = {
        "on the text": on_text,
        "on the teacher": on_teacher(teacher),
        "half of each": on_teacher(teacher, share=0.5),
        "half, foreign, P-KL": partial(on_foreign, foreign, lab.aligner, lab.projection, "p-kl"),
        "half, foreign, H-KL": partial(on_foreign, foreign, lab.aligner, lab.projection, "h-kl"),
    }
    found = {
        name: lab.loss(lab.trained(build(STUDENT, seed), seed, RATE, loss)) for name, loss in losses.items()
    }
    ratio = len(lab.foreign_text.parts["validation"]) / len(lab.text.parts["validation"])
    batches = lab.foreign_text.batches("validation", VALIDATION, seed=0)
    own_tokens = {"loss": ratio * evaluate(foreign, batches)}  # per token of the student
    return {**found, "the teacher": lab.loss(teacher), "the foreign teacher": own_tokens}


def on_stored(
    teacher: torch.nn.Module, k: int, drawn: int, share: float, model: torch.nn.Module, batch: torch.Tensor
) -> torch.Tensor:
    """KL from k + drawn tokens of the teacher, and the loss of the text with the rest of the weight."""
    with torch.no_grad():
        expected = logits(teacher, batch).flatten(0, 1)
    quantiles = draw_quantiles(len(expected), drawn, seed=int(batch.sum())) if drawn else None
    found = logits(model, batch).flatten(0, 1)
    target = most_probable(expected, k, quantiles=quantiles)
    text = torch.nn.functional.cross_entropy(found.float(), batch[:, 1:].flatten())
    return share * topk_divergence(found, target).mean() + (1 - share) * text


def stored(lab: Lab, seed: int) -> Results:
    """Students of the same size and tokens, from what `nemotron3 distill logits` keeps of a teacher."""
    teacher = lab.teacher(seed)
    losses: dict[str, Loss] = {"the text": on_text, "KL(teacher || student)": on_teacher(teacher)}
    for k in (32, 128, 512):
        losses[f"{k} most probable"] = partial(on_stored, teacher, k, 0, 1.0)
        losses[f"{k} most probable, half the text"] = partial(on_stored, teacher, k, 0, 0.5)
        losses[f"{k // 2} most probable, {k // 2} drawn"] = partial(on_stored, teacher, k // 2, k // 2, 1.0)
    return {
        name: lab.loss(lab.trained(build(STUDENT, seed), seed, RATE, loss)) for name, loss in losses.items()
    }


def prune(lab: Lab, seed: int) -> Results:
    """Students of the same size and tokens, cut from the teacher or from random weights."""
    teacher = lab.teacher(seed)
    calibration = lab.text.batches("train", VALIDATION, seed + 20_000)
    scores = compress.measure(
        teacher, TEACHER, lambda: [token_losses(teacher, batch) for batch in calibration]
    )
    cut, weights = compress.prune(teacher, scores, KEPT)
    runs: dict[str, tuple[bool, float, Loss | None]] = {
        "from random weights, on the text": (False, RATE, on_text),
        "from random weights, on the teacher": (False, RATE, on_teacher(teacher)),
        "cut": (True, 0.0, None),
        "cut, on the text": (True, CUT_RATE, on_text),
        "cut, on the teacher": (True, CUT_RATE, on_teacher(teacher)),
    }
    found = {}
    for name, (pruned, rate, loss) in runs.items():
        model = build(cut, seed)
        if pruned:
            compress.load(model, weights)
        if loss is not None:
            lab.trained(model, seed, rate, loss)
        found[name] = lab.loss(model)
    return {**found, "the teacher": lab.loss(teacher)}


def qad(lab: Lab, seed: int) -> Results:
    """A model, and what packing its weights in NVFP4 does to it."""
    teacher = lab.teacher(seed)
    own = on_teacher(teacher)
    runs: dict[str, tuple[str, Loss | None]] = {
        "as it is": ("0", None),
        "packed": (PACKED, None),
        "packed, on its own logits": (PACKED, own),
        "packed, on the text": (PACKED, on_text),
        "not packed, on the text": ("0", on_text),
        "activations, too": (ACTIVATIONS, None),
        "activations, too, on its own logits": (ACTIVATIONS, own),
    }
    found = {}
    for name, (emulate, loss) in runs.items():
        model = copied(teacher, emulate)
        if loss is not None:
            lab.trained(model, seed, FINE_RATE, loss)
        found[name] = lab.loss_and_distance(model, seed)
    return found


def drafts(lab: Lab, model: torch.nn.Module, config: Nemotron3Config) -> Measured:
    """Of a model's MTP heads by the engine, on held-out text: means over the depths, and what drafts give."""
    held_out = lab.text.parts["validation"].tolist()
    number, prompt, new = PROMPTS
    prompts = [held_out[at : at + prompt] for at in range(0, len(held_out), len(held_out) // number)][:number]
    with tempfile.TemporaryDirectory() as folder:
        compress.save(model, config, Path(folder) / "model")
        engine = Engine(load(Path(folder) / "model", config))
    found = losses(engine, windows(held_out, config.seq_length, MEASURED), DRAFTS)
    (continued,) = acceptance(engine, prompts, new, [DRAFTS])
    last = found.agreement[-1]
    return {
        "tokens per verification, sampled": statistics.mean(last.sampled),
        "greedy": statistics.mean(last.greedy),
        "greedy continuations": continued.speculation.acceptance_length,
        "KL": statistics.mean(one.kl for one in found.agreement),
        "loss of the text": statistics.mean(found.depths),
    }


def heads(lab: Lab, seed: int, arms: dict[str, Boost]) -> Results:
    """A model's MTP heads before and after training them alone; the model stays as it is."""
    # Losses here are means over tokens; Megatron divides sums of them later.
    MTPLossAutoScaler.set_loss_scale(torch.tensor(1 / (BATCH * DRAFTER.seq_length)))
    MTPLossLoggingHelper.tracker.clear()
    model = lab.teacher(seed, DRAFTER)
    config = DRAFTER.but(mtp_num_layers=DRAFTS)
    found = {"as it is": drafts(lab, model, DRAFTER)}
    for name, settings in arms.items():
        MTPLossLoggingHelper.tracker.clear()  # it has as many depths as the model before
        copy = build(config, seed)
        compress.load(copy, model.state_dict())
        train_heads(copy, settings)
        found[name] = drafts(lab, lab.trained(copy, seed, HEADS_RATE, on_text), config)
    return found


def boost(lab: Lab, seed: int) -> Results:
    """Trained on the text, and as `nemotron3 train boost` does it."""
    return heads(lab, seed, {"on the text": Boost("ce"), "KL, mixed": Boost(mix=1.0)})


def losses_of_heads(lab: Lab, seed: int) -> Results:
    """Other losses, and no mixing."""
    arms = {
        "KL, mixed": Boost(mix=1.0),
        "KL": Boost(),
        "KL, T = 2, mixed": Boost(temperature=2.0, mix=1.0),
        "total variation, mixed": Boost("tv", mix=1.0),
    }
    return heads(lab, seed, arms)


#: The first arm of each is what the others are compared with.
STUDIES: dict[str, Callable[[Lab, int], Results]] = {
    "distill": distill,
    "stored": stored,
    "prune": prune,
    "parts": partial(pruning_choices.parts, sizes=KEPT, config=TEACHER),
    "layers": pruning_choices.layers,
    "experts": pruning_choices.experts,
    "qad": qad,
    "boost": boost,
    "boost-losses": losses_of_heads,
}


def run(name: str, lab: Lab, seeds: range, file: Path) -> list[Results]:
    """The results of each seed, computed or read from the file."""
    key = {"study": name, "teacher_steps": lab.teacher_steps, "steps": lab.steps}
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known = {line["seed"]: line["results"] for line in lines if line.items() >= key.items()}
    for seed in seeds:
        if seed not in known:
            started = time.monotonic()
            known[seed] = STUDIES[name](lab, seed)
            print(f"{name}, seed {seed}: {time.monotonic() - started:.0f} s", flush=True)
            with file.open("a") as out:
                out.write(json.dumps({**key, "seed": seed, "results": known[seed]}) + "\n")
    return [known[seed] for seed in seeds]


def report(name: str, results: list[Results], first: str | None = None) -> None:
    """Print the tables of a study, one for each measure, with the differences from an arm."""
    first = next(iter(results[0])) if first is None else first
    if first not in results[0]:
        raise SystemExit(f"{name} has no arm {first!r}: use one of {', '.join(results[0])}")
    for quantity in results[0][first]:
        print(f"\n| {name}, {len(results)} seeds | {quantity} | minus {first!r} | p |\n|-|-|-|-|")
        values = {arm: [one[arm][quantity] for one in results] for arm in results[0]}
        for arm, own in values.items():
            against = paired(own, values[first])
            cells = f"{against:+.4f} | {against.p:.4f}" if arm != first else " | "
            print(f"| {arm} | {interval(own).mean:.4f} | {cells} |")


def main() -> None:
    """Run the studies and print their tables."""
    parser = argparse.ArgumentParser(description="Paired studies of distillation at CPU scale.")
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; default: all")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--against", metavar="ARM", help="what is subtracted; default: the first arm")
    parser.add_argument("--first", type=int, default=1, help="number of the first seed")
    parser.add_argument("--teacher-steps", type=int, default=400)
    parser.add_argument("--steps", type=int, default=200, help="of every student")
    parser.add_argument("--output", type=Path, default=Path("runs/paired_studies"))
    options = parser.parse_args()
    if unknown := set(options.studies) - set(STUDIES):
        parser.error(f"no study {', '.join(unknown)}: use {', '.join(STUDIES)}")
    seeds = range(options.first, options.first + options.seeds)
    options.output.mkdir(parents=True, exist_ok=True)
    with n3.cpu_mode():
        lab = Lab(options)
        for name in options.studies or STUDIES:
            report(name, run(name, lab, seeds, options.output / "results.jsonl"), options.against)


if __name__ == "__main__":
    main()
