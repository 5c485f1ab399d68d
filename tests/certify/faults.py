"""The catalogue of seeded faults: what a proof must find, where, and by which property.

Each fault is a patch of Megatron or of this package, active on the ranks of a test alone.

python -m tests.certify.faults            # run every fault and write the figures of the table
python -m tests.certify.faults NAME …     # run some of them
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_nemotron3.args import command_line
from megatron_nemotron3.certify import proof, twin
from megatron_nemotron3.certify.case import Case
from megatron_nemotron3.certify.finding import Finding, State
from megatron_nemotron3.certify.layouts import Sizes
from tests.certify import expert_faults as experts
from tests.certify import gradient_faults as gradients
from tests.certify import sequence_faults as sequence

#: What was found when the table was last written.
GOLDEN = Path(__file__).parents[1] / "golden" / "certified_faults.json"
#: A launch of the Super form: latent experts, shared expert, MTP of two depths from one block.
_MODEL = """--hidden-size 4096 --ffn-hidden-size 2688 --num-attention-heads 32 --group-query-attention
--num-query-groups 2 --kv-channels 128 --mamba-num-heads 128 --mamba-head-dim 64 --mamba-state-dim 128
--mamba-num-groups 8 --squared-relu --normalization RMSNorm --norm-epsilon 1e-05 --disable-bias-linear
--untie-embeddings-and-output-weights --position-embedding-type none --init-method-std 0.014
--num-experts 512 --moe-ffn-hidden-size 2688 --moe-shared-expert-intermediate-size 5376
--moe-latent-size 1024 --moe-router-topk 22 --moe-router-topk-scaling-factor 5.0
--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.001
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01 --mtp-num-layers 2
--mtp-use-repeated-layer --mtp-loss-scaling-factor 0.3 --moe-token-dispatcher-type alltoall
--seq-length 8192 --micro-batch-size 1 --global-batch-size 3072 --weight-decay 0.1 --clip-grad 0.1
--attention-dropout 0.0 --hidden-dropout 0.0"""
_TOKEN = "--calculate-per-token-loss"
_OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Launch:
    """A launch of few ranks, as a user would give it."""

    #: Options that differ between launches.
    options: str
    ranks: int = 2
    pattern: str = "MEM*E"

    @property
    def text(self) -> str:
        """Megatron's command line."""
        return f"{_MODEL} --hybrid-layer-pattern '{self.pattern}/*E/*E' {self.options}"


LAUNCHES: dict[str, Launch] = {
    "TP2": Launch(f"--tensor-model-parallel-size 2 --sequence-parallel {_TOKEN}"),
    "TP2 EP2": Launch(
        f"--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 {_TOKEN}"
    ),
    "EP2": Launch(f"--expert-model-parallel-size 2 --use-distributed-optimizer {_TOKEN}"),
    "PP2": Launch(f"--pipeline-model-parallel-size 2 {_TOKEN}", pattern="MEM|*E"),
    "PP2 VPP2": Launch(f"--pipeline-model-parallel-size 2 {_TOKEN}", pattern="ME|M*|EM|*E"),
    "CP2": Launch(f"--context-parallel-size 2 --eod-mask-loss {_TOKEN}"),
    "CP2 packed": Launch(f"--context-parallel-size 2 --sft {_TOKEN}"),
    "DP2": Launch(f"{_OVERLAP} --eod-mask-loss {_TOKEN}"),
    "DP2 per batch": Launch(_OVERLAP),
    "DP4, 2 optimizers": Launch(f"{_OVERLAP} --num-distributed-optimizer-instances 2 {_TOKEN}", ranks=4),
    "DP2, recomputed": Launch(f"--recompute-granularity selective --recompute-modules moe {_TOKEN}"),
}


@dataclass(frozen=True)
class Fault:
    """Something wrong that no error message reports."""

    #: The patch; its docstring says what is wrong.
    patch: Callable[[], None]
    #: A key of LAUNCHES.
    launch: str
    #: Properties of which one or more must fail.
    found_by: tuple[str, ...]
    #: A report of the same fault in real code, or "seeded".
    source: str = "seeded"
    #: The stage of the proof that must find it.
    stage: str = "layouts"
    #: Whether it is a fault in one process, too.
    everywhere: bool = False

    @property
    def what(self) -> str:
        """What is wrong, as a sentence."""
        assert self.patch.__doc__
        return " ".join(self.patch.__doc__.split())


_COPIES = ("copies on several ranks",)
_GRADIENTS, _NORM, _LOSS, _WEIGHTS = ("gradients",), ("gradient norms",), ("losses",), ("weights",)
_BIAS, _MTP = ("expert biases",), ("losses of MTP",)

FAULTS: dict[str, Fault] = {
    "norm gains under SP": Fault(gradients.norms_not_reduced, "TP2", _COPIES),
    "latent projections under SP": Fault(gradients.latent_not_reduced, "TP2", _COPIES),
    "router under SP": Fault(gradients.router_not_reduced, "TP2", _COPIES),
    "norm gains summed twice": Fault(gradients.norms_reduced_twice, "TP2", _GRADIENTS),
    "shared embedding at PP": Fault(gradients.embedding_not_tied, "PP2", _COPIES),
    "second chunk not divided": Fault(gradients.only_first_chunk_finalized, "PP2 VPP2", _COPIES),
    "experts times EP": Fault(gradients.experts_scaled_by_ep, "EP2", _GRADIENTS),
    "experts summed as dense": Fault(gradients.experts_summed_as_dense, "EP2", _GRADIENTS),
    "mean over DP": Fault(gradients.averaged_over_dp, "DP2", _GRADIENTS),
    "tokens of one rank": Fault(gradients.tokens_of_one_rank, "DP2", _COPIES),
    "tokens of the last stage": Fault(gradients.tokens_not_sent_to_stages, "PP2", _GRADIENTS),
    "loss scale with accumulation": Fault(
        gradients.divided_by_microbatches, "DP2", _GRADIENTS, everywhere=True
    ),
    "bucket not reduced": Fault(gradients.last_bucket_not_reduced, "DP2", _COPIES),
    "optimizer instances": Fault(gradients.instances_not_reduced, "DP4, 2 optimizers", _COPIES),
    "stale gathered weights": Fault(gradients.stale_gathered_weights, "DP2", _LOSS),
    "shard one too short": Fault(gradients.shard_ends_early, "DP2", _WEIGHTS),
    "duplicates in the norm": Fault(
        gradients.duplicates_in_norm, "TP2", _NORM, "TransformerEngine (ROCm) #715"
    ),
    "head vectors in the norm": Fault(
        gradients.head_vectors_missing_in_norm, "TP2", _NORM, "Megatron-LM #7452, finding 8"
    ),
    "experts in the norm": Fault(gradients.experts_missing_in_norm, "TP2 EP2", _NORM, "Megatron-LM #5916"),
    "experts not clipped": Fault(gradients.experts_not_clipped, "EP2", _WEIGHTS),
    "norm of one stage": Fault(gradients.norm_of_one_stage, "PP2", _COPIES),
    "counts of one rank": Fault(experts.counts_of_one_rank, "DP2", _COPIES),
    "counts without CP": Fault(experts.counts_without_cp, "CP2", _COPIES),
    "counts of one micro-batch": Fault(experts.counts_of_last_microbatch, "DP2", _BIAS, everywhere=True),
    "counts in BF16": Fault(
        experts.counts_in_bf16, "DP2", _BIAS, "prime-rl #2338, Megatron-LM #1482", everywhere=True
    ),
    "balance times TP": Fault(experts.balance_times_tp, "TP2", _GRADIENTS),
    "balance of local tokens": Fault(experts.balance_of_local_tokens, "TP2", _GRADIENTS),
    "balance per micro-batch": Fault(
        experts.balance_not_averaged, "DP2 per batch", _GRADIENTS, everywhere=True
    ),
    "shared expert per TP rank": Fault(experts.shared_expert_per_tp_rank, "TP2", _LOSS),
    "tokens at other experts": Fault(experts.dispatched_to_neighbor, "EP2", _LOSS),
    "parts of experts averaged": Fault(experts.expert_parts_averaged, "TP2", _LOSS),
    "probabilities of other tokens": Fault(experts.probabilities_of_other_experts, "EP2", _LOSS),
    "recompute routes anew": Fault(experts.recompute_routes_anew, "DP2, recomputed", _GRADIENTS),
    "CP positions shifted": Fault(sequence.cp_positions_shifted, "CP2", _LOSS),
    "CP order of Mamba": Fault(sequence.cp_tokens_in_rank_order, "CP2", _LOSS),
    "CP order of documents": Fault(sequence.cp_document_order, "CP2 packed", _LOSS),
    "CP heads shifted": Fault(sequence.cp_heads_shifted, "CP2", _LOSS),
    "CP gradients of keys": Fault(sequence.cp_kv_gradient_local, "CP2", _GRADIENTS, "Megatron-LM #1464"),
    "MTP tokens of a CP rank": Fault(
        sequence.mtp_tokens_of_cp_rank, "CP2", _MTP, "Megatron-LM #7452, finding 3; #7498"
    ),
    "last layer of a stage": Fault(sequence.stage_drops_last_layer, "PP2", _LOSS),
    "key and value swapped": Fault(sequence.key_and_value_swapped, "TP2", _LOSS),
    "logits gathered": Fault(sequence.logits_gathered, "TP2", _LOSS, "Megatron-LM #7452"),
}


@dataclass(frozen=True, kw_only=True)
class FaultyBench(proof.Bench):
    """A bench whose single process is healthy, unless the fault is one there, too.

    A fault of ranks between them changes nothing in one process, so that all faults of a launch share one.
    """

    everywhere: bool = False

    def case(self, sizes: Sizes | None, **changes: Any) -> Case:
        """Return the training in a layout, with the fault, or in one process."""
        healthy = {"fault": None} if sizes is None and not self.everywhere else {}
        return super().case(sizes, **(healthy | changes))


STAGES = {"layouts": proof.layouts}


@cache
def _twin(launch: str) -> tuple[Any, Any]:
    given = LAUNCHES[launch]
    flags = tuple(command_line.read(given.text))
    return twin.make(flags, given.ranks, world_size=given.ranks), flags


def run(launch: str, stage: str, fault: Fault | None) -> list[Finding]:
    """Return what a stage of the proof says of a launch."""
    made, flags = _twin(launch)
    with tempfile.TemporaryDirectory() as folder:
        bench = FaultyBench(
            twin=made,
            flags=flags,
            folder=Path(folder),
            fault=fault.patch if fault else None,
            everywhere=fault is not None and fault.everywhere,
        )
        return list(STAGES[stage](bench))


@cache
def healthy(launch: str, stage: str) -> list[Finding]:
    """Return what a stage says without a fault."""
    return run(launch, stage, None)


def failures(found: list[Finding]) -> dict[str, Finding]:
    """Return the properties that failed, each where it is farthest."""
    worst: dict[str, Finding] = {}
    for finding in found:
        if finding.state is State.FAIL:
            old = worst.get(finding.name)
            if old is None or (finding.difference or 0) > (old.difference or 0):
                worst[finding.name] = finding
    return worst


def measured() -> dict[str, dict[str, str]]:
    """Return what was found when the table was last written."""
    rows: dict[str, dict[str, str]] = json.loads(GOLDEN.read_text())
    return rows


def _row(fault: Fault, found: dict[str, Finding]) -> dict[str, str]:
    finding = next(found[name] for name in fault.found_by if name in found)
    share = "" if finding.difference is None else f"{finding.difference:.2g}"
    return {"found by": finding.name, "where": finding.where, "share": share, "detail": finding.detail}


def main(names: list[str]) -> None:
    """Run faults, print what finds them, and write it to the file of figures."""
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"no such fault: {unknown[0]}; there are: {', '.join(FAULTS)}")
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Megatron prints a great deal on every rank
    say = functools.partial(print, file=out, flush=True)
    rows = {name: row for name, row in measured().items() if name in FAULTS}
    for name in names or FAULTS:
        fault, begin = FAULTS[name], time.monotonic()
        try:
            alarms = failures(healthy(fault.launch, fault.stage))
            found = failures(run(fault.launch, fault.stage, fault))
        except Exception as problem:  # a defect of the proof
            say(f"ERROR {name}: {str(problem).strip().splitlines()[-1]}")
            continue
        right = not alarms and set(fault.found_by) <= found.keys() and "training" not in found
        say(f"{'ok' if right else 'MISS'} {name} [{fault.launch}] {time.monotonic() - begin:.1f} s")
        for finding in alarms.values():
            say(f"      FALSE ALARM {finding}"[:200])
        for finding in found.values():
            say(f"      {finding.name}: {finding.difference} {finding.detail}"[:200])
        if right:
            rows[name] = _row(fault, found)
    ordered = {name: rows[name] for name in FAULTS if name in rows}
    GOLDEN.write_text(json.dumps(ordered, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
