"""`nemotron3 prune search`: the smaller forms of a model that meet a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_nemotron3.common.files import require_output, write_json
from megatron_nemotron3.common.options import NEEDED, add_command, json_flag, option
from megatron_nemotron3.common.output import result, say
from megatron_nemotron3.launch.plan.hardware import GPUS
from megatron_nemotron3.launch.plan.serving import ServingUse
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.command import ModelOptions, chosen_model
from megatron_nemotron3.models.show import describe
from megatron_nemotron3.post_training.compress.candidates import (
    MEASURES,
    CandidateLosses,
    SearchResult,
    SmallerModel,
    amount,
    costs,
    parse_budget,
    search,
    sizes_text,
)
from megatron_nemotron3.post_training.compress.sizes import BY_LAYER, parse_numbers

_SERVED = "serving (for memory and latency)"


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Options of `nemotron3 prune search`."""

    which: ModelOptions
    budget: list[str] = option(
        "upper limits: params=60B, active=9B, memory=80GiB (weights in BF16, and the state "
        "of the sequences), latency=12ms (to decode a token of every sequence)",
        "MEASURE=N",
        default=NEEDED,
        nargs="+",
    )
    vary: list[str] = option(
        f"candidate values of a size; {' and '.join(BY_LAYER)} are chosen per layer",
        "NAME=N,N,…",
        default=NEEDED,
        nargs="+",
    )
    scores: Path | None = option(
        "importance file of nemotron3 prune --text … --scores FILE (default: equal importance)", "FILE"
    )
    gpu: str = option("GPU type (default h100)", default="h100", choices=GPUS, group=_SERVED)
    sequences: int = option("number of sequences decoded together (default 1)", "N", default=1, group=_SERVED)
    context: int | None = option(
        "tokens per sequence so far (default: the training length)", "N", group=_SERVED
    )
    best: int = option("number of candidates to print (default 10)", "N", default=10, group="output", least=1)
    output: Path | None = option(
        "output file with the best candidate, for --model of other commands", "FILE.json", group="output"
    )
    json: bool = json_flag(group="output")


def register(commands: Any) -> None:
    """Add `nemotron3 prune search`."""
    add_command(commands.add_parser("prune search"), SearchOptions, search_command)


def search_command(options: SearchOptions) -> int:
    """Print the candidates, best first. Exit status 0."""
    config = chosen_model(options.which)
    budget = parse_budget(options.budget)
    given = parse_numbers(options.vary, "--vary", "NAME=N,N,…, such as moe_ffn_hidden_size=1280,1792,2688")
    values = {name: tuple(dict.fromkeys(numbers)) for name, numbers in given.items()}
    if options.output is not None:
        if options.output.suffix != ".json":
            raise ValueError(f"--output {options.output}: give a file that ends with .json, for --model")
        require_output(options.output, "--output", b'"title": ')
    context = config.seq_length if options.context is None else options.context
    serving = ServingUse(GPUS[options.gpu], options.sequences, context)
    losses: CandidateLosses | None = None
    if options.scores is not None:
        from megatron_nemotron3.post_training.compress.scores import ScoredLosses, Scores

        losses = ScoredLosses(Scores.load(options.scores, config))
    found = search(config, values, budget, serving, losses)
    if options.output is not None:
        write_json(options.output, describe(found.candidates[0].config), indent=2)
    with result(options.json):
        _say(config, budget, serving, found, options)
    return 0


def _say(
    config: Nemotron3Config,
    budget: dict[str, float],
    serving: ServingUse,
    found: SearchResult,
    options: SearchOptions,
) -> None:
    def row(number: str, loss: str, values: list[str], sizes: str) -> None:
        say(f"{number:>3} {loss:>9}" + "".join(f"{value:>11}" for value in values) + f"  {sizes}")

    whole, shown = costs(config, serving), found.candidates[: options.best]
    limits = ", ".join(f"{name} {amount(name, n)}" for name, n in budget.items())
    say(f"{config.title}: at most {limits}", model=config.name, costs=whole, budget=budget)
    say(f"latency: a token of {serving.sequences} x {serving.context:,} on {serving.gpu.name}, an estimate\n")
    row("", "loss", list(MEASURES), "sizes")
    row("", "0", [amount(name, whole[name]) for name in MEASURES], "as it is")
    for number, one in enumerate(shown, 1):
        values = [amount(name, one.costs[name]) for name in MEASURES]
        row(str(number), f"{one.loss:.4f}", values, sizes_text(one))
    if options.scores is None:
        say("\nloss: without --scores all channels, heads, experts and layers count alike")
    if found.skipped:
        say(f"\n{found.skipped} combinations are no model, the first: {found.why}")
    candidates = [{**vars(one), "config": describe(one.config)["config"]} for one in shown]
    say(
        f"\n{_prune_command(shown[0])}",
        scores=options.scores,
        candidates=candidates,
        met=len(found.candidates),
        skipped=found.skipped,
    )
    if options.output is not None:
        say(f"wrote {options.output}: nemotron3 train --model {options.output}")


def _prune_command(best: SmallerModel) -> str:
    sizes = " ".join(
        f"{name}={','.join(map(str, size)) if isinstance(size, tuple) else size}"
        for name, size in best.sizes.items()
    )
    return f"nemotron3 prune … --sizes {sizes}"
