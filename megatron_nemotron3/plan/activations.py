"""Bytes of activations that one microbatch leaves on a rank until its backward. Standard library only.

Routing is taken as balanced: a rank's experts get as many rows as its own tokens send. `imbalance` is the
busiest rank's rows over that. MXFP8 and NVFP4 count as BF16; that Transformer Engine keeps the inputs of
quantized linears packed is not modelled.
What is counted, and how it is measured: docs/plan.md and `activation_forms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.args import BACKENDS, PRECISIONS, ParallelLayout
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.plan.activation_forms import DROPPED, FORMS, Form, Share, output
from megatron_nemotron3.plan.elements import cut
from megatron_nemotron3.plan.packed import saved_less
from megatron_nemotron3.plan.recompute import MODULES, NONE, Recompute, runs
from megatron_nemotron3.plan.state import padded_vocab_size

#: Kind -> bytes of one microbatch, see `sizes`.
Table = dict[str, tuple[int, int, int]]
#: Kinds of `layer_activations`: of the pattern, and what is no layer.
KINDS = ("M", "*", "E", "-", "mtp", "embedding", "output")


@lru_cache(maxsize=65536)
def share(
    layout: ParallelLayout,
    seq_length: int,
    micro_batch_size: int,
    precision: str,
    recompute: Recompute,
    backend: str,
    imbalance: float,
) -> Share:
    """What one rank of `layout` computes of a microbatch.

    Raises:
        ValueError: an unknown precision or backend, or an imbalance below 1.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}")
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}: use one of {', '.join(BACKENDS)}")
    if imbalance < 1:
        raise ValueError(f"imbalance={imbalance}: the busiest rank has at least the mean, use 1 or more")
    return Share(
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        tp=layout.tp,
        cp=layout.cp,
        etp=layout.etp,
        sequence_parallel=layout.sequence_parallel,
        element=4 if precision == "fp32" else 2,
        backend=backend,
        imbalance=imbalance,
        recomputed=recompute.modules,
        precision=precision,
    )


@lru_cache(maxsize=65536)
def _form(config: Nemotron3Config, at: Share, kind: str, vocab: int) -> Form:
    """A kind's bytes by module, nothing recomputed."""
    if kind == "output":
        return output(config, at, vocab, config.mtp_num_layers)
    form = FORMS[kind](config, at)
    for part, spared in saved_less(config, at, kind, at.precision).items():
        form[part] -= spared
    return form


@lru_cache(maxsize=65536)
def _kept(config: Nemotron3Config, at: Share, kind: str, vocab: int) -> Form:
    """The same without what selective recomputation does not keep."""
    form = _form(config, at, kind, vocab)
    # A name of MODULES belongs to one kind of layer; parts of other kinds may have the same names.
    names = [name for name in at.recomputed if kind == MODULES[name][0]]
    dropped = {part for name in names for part in DROPPED[name]}
    return {part: number for part, number in form.items() if part not in dropped and number}


@lru_cache(maxsize=65536)
def sizes(config: Nemotron3Config, at: Share, vocab: int) -> Table:
    """Kind -> bytes (kept, computed again, of its input); selective recomputation or none."""
    kinds = dict.fromkeys(config.pattern + (config.mtp_pattern or ""))
    found = {}
    for kind in (*kinds, "mtp", "embedding", "output"):
        whole, kept = (sum(f(config, at, kind, vocab).values()) for f in (_form, _kept))
        found[kind] = (kept, whole - kept, at.stream(config.hidden_size))
    return found


def layer_activations(
    config: Nemotron3Config,
    layout: ParallelLayout,
    kind: str,
    *,
    seq_length: int,
    micro_batch_size: int,
    precision: str = "bf16",
    recompute: Recompute = NONE,
    backend: str = "torch",
    imbalance: float = 1.0,
) -> dict[str, int]:
    """Bytes one layer keeps for one microbatch on one rank, by module.

    Args:
        kind: one of `KINDS`. "mtp" is what one depth keeps beside its layers, "output" is final norm, output
            layer and loss, those of all MTP depths included.
        seq_length, micro_batch_size: of the whole sequence, in tokens, and sequences of a microbatch.
        recompute: with granularity "full" the layer is the first of a run: its input stays.
        backend: "torch" as measured on a CPU; "auto", its GPU kernels, and "te" are derived, not measured.
        imbalance: routed tokens of the rank over the mean.

    Raises:
        ValueError: no such kind, precision or backend.
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    at = share(layout, seq_length, micro_batch_size, precision, recompute, backend, imbalance)
    if recompute.full and kind in "M*E-":
        return {"input": at.stream(config.hidden_size)}
    return dict(_kept(config, at, kind, padded_vocab_size(config, layout)))


def stage_activations(
    config: Nemotron3Config,
    layout: ParallelLayout,
    stage: int,
    *,
    seq_length: int,
    micro_batch_size: int,
    precision: str = "bf16",
    recompute: Recompute = NONE,
    backend: str = "torch",
    imbalance: float = 1.0,
) -> dict[str, int]:
    """Bytes a stage keeps for one microbatch on one rank, by layer kind.

    MTP's layers are counted under their own kinds; "mtp" is what the depths have beside them.

    Args:
        stage: 0 to pp * vpp - 1. Others: as for `layer_activations`.
    """
    at = share(layout, seq_length, micro_batch_size, precision, recompute, backend, imbalance)
    patterns = cut(config, layout.stages, seq_length)
    return dict(stage_bytes(config, at, recompute, patterns, stage, padded_vocab_size(config, layout))[0])


@dataclass(frozen=True)
class Unit:
    """What goes backward at once: a layer, a run of recomputed layers, an MTP depth, the end of the model.

    kept: bytes held from forward to backward. again: bytes recomputed in its backward. experts: whether
    routed experts are in it.
    """

    kind: str
    kept: int
    again: int
    experts: bool


def _units(pattern: str, recompute: Recompute, table: Table) -> list[Unit]:
    """A stage's layers in the order of forward."""
    saved, whole = runs(pattern, recompute)
    found = []
    for run in saved:
        kept = table[run[0]][2]
        found.append(Unit(run[0], kept, sum(table[kind][0] for kind in run) - kept, "E" in run))
    return found + [Unit(kind, *table[kind][:2], kind == "E") for kind in whole]


def _mtp_units(config: Nemotron3Config, recompute: Recompute, table: Table) -> list[Unit]:
    """One depth in the order of forward. Megatron recomputes all of it with "uniform", else its layers."""
    inner, (own, _, stream) = config.mtp_pattern or "", table["mtp"]
    if not (recompute.full and recompute.method == "uniform"):
        return [Unit("mtp", own, 0, False), *_units(inner, recompute, table)]
    kept = 2 * stream + table["embedding"][0]
    layers = [table[kind][2] for kind in inner]  # inside, layers are checkpointed once more, one by one
    again = own - kept + sum(layers) + max(table[kind][0] - table[kind][2] for kind in inner)
    return [Unit("mtp", kept, again, "E" in inner)]


@lru_cache(maxsize=65536)
def stage_bytes(
    config: Nemotron3Config,
    at: Share,
    recompute: Recompute,
    patterns: tuple[str, ...],
    stage: int,
    vocab: int,
    expert_work: int = 0,
) -> tuple[dict[str, int], int, int]:
    """(what `stage_activations` returns, by how many bytes recomputation in backward exceeds that, by how
    many more with `expert_work` bytes in each backward of an E layer)."""
    table = sizes(config, at, vocab)
    units = [Unit("embedding", table["embedding"][0], 0, False)] if stage == 0 else []
    units += _units(patterns[stage], recompute, table)
    if stage == len(patterns) - 1:
        for _ in range(config.mtp_num_layers):
            units += _mtp_units(config, recompute, table)
        units.append(Unit("output", table["output"][0], 0, False))
    found: dict[str, int] = {}
    for unit in units:
        found[unit.kind] = found.get(unit.kind, 0) + unit.kept
    freed = exceeds = with_work = 0
    for unit in reversed(units):
        exceeds = max(exceeds, unit.again - freed)
        with_work = max(with_work, unit.again + unit.experts * expert_work - freed)
        freed += unit.kept
    return found, exceeds, with_work - exceeds
