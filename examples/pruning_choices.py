"""Studies of `paired_studies.py`: which parts of a model are kept, and how much of each layer.

    parts     a model cut to 55 % of its parameters: with the parts that importance names, with random ones,
              and with the least important
    layers    experts cut to half their width: alike in every layer; by layer as `nemotron3 prune search`
              chooses under the same number of parameters; by layer at random; as searched, with the layers in
              reverse
    experts   the model of `layers` without one of its experts: how much is there to choose from

Every cut is measured as it is, and after a short distillation from the model before the cut. All arms of a
study have the same budget of parameters. In `layers` every arm keeps each expert's most important channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from tiny_runs import VALIDATION, build, on_teacher, token_losses

from megatron_nemotron3.launch.plan import GPUS, ServingUse
from megatron_nemotron3.models import Nemotron3Config, count, get, tiny
from megatron_nemotron3.post_training import compress
from megatron_nemotron3.post_training.compress import ScoredLosses, Scores, Sizes, candidate_config, search

if TYPE_CHECKING:
    from paired_studies import Lab, Measured, Results

#: Five E layers, with experts of width 96.
LAYERED = tiny(get("nano")).but(
    name="layered", pattern="ME*EEMEE", seq_length=128, num_moe_experts=8, moe_router_topk=2
)
EXPERTS, HALF = "moe_ffn_hidden_size", 48
WIDTHS = (16, 32, 48, 64, 80, 96)
RATE = 2e-3


def scores_of(lab: Lab, teacher: torch.nn.Module, config: Nemotron3Config, seed: int) -> Scores:
    """Importance on text that no student is trained on first."""
    calibration = lab.text.batches("train", VALIDATION, seed + 20_000)
    return compress.measure(teacher, config, lambda: [token_losses(teacher, batch) for batch in calibration])


def cut_and_distilled(
    lab: Lab, seed: int, teacher: torch.nn.Module, scores: Scores, sizes: Sizes, stored: int
) -> Measured:
    """Validation loss of a cut model with at most so many parameters, before and after a distillation."""
    pruned, weights = compress.prune(teacher, scores, sizes)
    assert count(pruned).stored <= stored
    model = build(pruned, seed)
    compress.load(model, weights)
    before = lab.loss(model)["loss"]
    lab.trained(model, seed, RATE, on_teacher(teacher))
    return {"loss, cut": before, "loss, distilled": lab.loss(model)["loss"]}


def parts(lab: Lab, seed: int, sizes: Sizes, config: Nemotron3Config) -> Results:
    """Which parts stay."""
    teacher = lab.teacher(seed, config)
    scores, drawn = scores_of(lab, teacher, config, seed), np.random.default_rng(seed)
    random = {key: np.asarray(drawn.random(v.shape), np.float32) for key, v in scores.values.items()}
    least = {key: 1 / np.maximum(v, np.float32(1e-12)) for key, v in scores.values.items()}
    arms = {
        "most important": scores,
        "random": Scores(config, scores.tokens, random),
        "least important": Scores(config, scores.tokens, least),
    }
    stored = count(candidate_config(config, sizes)).stored
    return {name: cut_and_distilled(lab, seed, teacher, of, sizes, stored) for name, of in arms.items()}


def layers(lab: Lab, seed: int) -> Results:
    """How wide the experts of each layer stay."""
    teacher = lab.teacher(seed, LAYERED)
    scores, number = scores_of(lab, teacher, LAYERED, seed), LAYERED.pattern.count("E")
    stored = count(candidate_config(LAYERED, {EXPERTS: HALF})).stored
    found = search(
        LAYERED, {EXPERTS: WIDTHS}, {"params": stored}, ServingUse(GPUS["h100"]), ScoredLosses(scores)
    )
    chosen = np.array([width for width, _ in found.candidates[0].config.expert_sizes])
    drawn = np.random.default_rng(seed)
    while (random := drawn.choice(WIDTHS, number)).sum() != HALF * number:
        pass
    reverse, order = chosen.copy(), np.argsort(chosen, kind="stable")
    reverse[order] = chosen[order[::-1]]
    arms = {
        "alike": np.full(number, HALF),
        "searched": chosen,
        "random": random,
        "searched, layers in reverse": reverse,
    }
    print(f"layers, seed {seed}: searched {chosen.tolist()}, random {random.tolist()}", flush=True)
    return {
        name: cut_and_distilled(lab, seed, teacher, scores, {EXPERTS: tuple(widths.tolist())}, stored)
        for name, widths in arms.items()
    }


def experts(lab: Lab, seed: int) -> Results:
    """The model without one expert: the one that matters most, the median, and the one that matters least."""
    teacher = lab.teacher(seed, LAYERED)
    found = []
    for name, weight in teacher.named_parameters():
        if ".mlp.experts.linear_fc2.weight" in name:
            kept = weight.detach().clone()
            weight.data.zero_()
            found.append(lab.loss(teacher)["loss"])
            weight.data.copy_(kept)
    assert len(found) == LAYERED.pattern.count("E") * LAYERED.num_moe_experts
    found.sort()
    removed = {"the most": found[-1], "the median": found[len(found) // 2], "the least": found[0]}
    return {"whole": lab.loss(teacher), **{f"without {name}": {"loss": x} for name, x in removed.items()}}
