"""Evidence for options and layouts that are wrong together: runs of tests/parallel against one rank."""

from __future__ import annotations

from megatron_nemotron3.proof.certify.compare import weights
from tests.parallel import case as parallel
from tests.parallel.checkpoint import shifted_state
from tests.parallel.layouts import CASES
from tests.parallel.wrong import one_step, relative
from tests.properties.entries import Evidence, Wrong, case
from tests.properties.step import Case

MTP_CONFIG, MEAN_CONFIG = CASES["super"].config, CASES["nano"].config


def _off(one: parallel.Case, run: Case, part: str) -> float:
    """Largest relative error of gradients whose name holds `part`, in the layout of `run`."""
    return relative(*one_step(one, one.at(run.layout)), part)


def mean_masked(run: Case) -> str:
    """Other numbers of tokens count on each rank."""
    return f"gradients are off by {_off(CASES['nano'], run, ''):.0%}, the printed loss is right"


def shifted(run: Case) -> str:
    """Parameters whose optimizer state would be saved wrongly."""
    wrong = shifted_state(
        CASES["super"].at(run.layout, *run.extra, against_rules=True), weights(CASES["super"])
    )
    return f"saves another state than it has of {', '.join(sorted(wrong))}"


COMBINATIONS: dict[str, Evidence] = {
    "masked-mean-cp": Wrong(
        case=case(MEAN_CONFIG, "--eod-mask-loss", cp=2),
        measured=mean_masked,
        shown="gradients are off by 23%, the printed loss is right",
        along=("option-layout",),
    ),
    "reshardable-buckets": Wrong(
        case=case(MTP_CONFIG, "--dist-ckpt-optim-fully-reshardable", pp=2),
        measured=shifted,
        shown="saves another state than it has of embedding.word_embeddings.weight",
    ),
}
