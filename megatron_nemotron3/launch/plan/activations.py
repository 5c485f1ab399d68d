"""Bytes of activations that one microbatch leaves on a rank until its backward.

Routing is taken to be balanced, but for `imbalance`: the rows on the busiest rank over those that its tokens
send.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from megatron_nemotron3.launch import Launch
from megatron_nemotron3.launch.plan.activation_forms import DROPPED, FORMS, Form, RankShare
from megatron_nemotron3.launch.plan.kinds import letter, resolve, symbols
from megatron_nemotron3.launch.plan.recompute import MODULES, Recompute, runs
from megatron_nemotron3.launch.plan.savings import offloaded, packing_saves
from megatron_nemotron3.models import Nemotron3Config

#: Kind -> bytes of one microbatch, see `_kind_bytes`.
Table = dict[str, tuple[int, int, int]]
#: The kinds of `layer_activations`: those of the pattern, and the parts of a model that are no layers.
KINDS = tuple(FORMS)


@lru_cache(maxsize=65536)
def _whole_form(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Bytes of a kind by module when nothing is recomputed."""
    config, kind = resolve(config, kind)
    form = FORMS[kind](config, share)
    for part, saved in packing_saves(config, share, kind).items():
        form[part] -= saved
    return form


@lru_cache(maxsize=65536)
def _kept_form(config: Nemotron3Config, share: RankShare, kind: str) -> Form:
    """Bytes of a kind by module, without what selective recomputation drops."""
    config, kind = resolve(config, kind)
    form = _whole_form(config, share, kind)
    # A name of MODULES belongs to one kind of layer; parts of other kinds may have the same names.
    names = [name for name in share.recompute.modules if kind == MODULES[name][0]]
    dropped = {part for name in names for part in DROPPED[name]}
    moved = offloaded(config, share, kind)
    return {
        part: number - moved.get(part, 0)
        for part, number in form.items()
        if part not in dropped and number > moved.get(part, 0)
    }


@lru_cache(maxsize=65536)
def _kind_bytes(config: Nemotron3Config, share: RankShare) -> Table:
    """Kind -> bytes (kept, recomputed, of its input), without the recomputation of whole layers."""
    kinds = dict.fromkeys(symbols(config) + (config.mtp_pattern or ""))
    found = {}
    for kind in (*kinds, "mtp", "embedding", "output"):
        whole, kept = (sum(form(config, share, kind).values()) for form in (_whole_form, _kept_form))
        found[kind] = (kept, whole - kept, share.stream(config.hidden_size))
    return found


def layer_activations(launch: Launch, kind: str, *, imbalance: float = 1.0) -> dict[str, int]:
    """Bytes that one layer keeps for one microbatch on one rank, by module.

    Backend "torch" is measured on a CPU; "auto", with its GPU kernels, and "te" are derived, not measured.
    When whole layers are recomputed, the layer is taken to be the first of a run: it keeps its input.
    """
    if letter(kind) not in KINDS:
        raise ValueError(f"kind={kind!r}: use one of {', '.join(KINDS)}")
    share = RankShare.of(launch, imbalance)
    if share.recompute.full and letter(kind) in "M*E-":
        return {"input": share.stream(launch.config.hidden_size)}
    return dict(_kept_form(launch.config, share, kind))


@dataclass(frozen=True)
class _Unit:
    """A layer, a run of recomputed layers, an MTP depth or the model's end, in backward."""

    kind: str
    kept: int
    again: int
    experts: bool


def _layer_units(pattern: str, recompute: Recompute, table: Table) -> list[_Unit]:
    saved, whole = runs(pattern, recompute)
    found = []
    for run in saved:
        kept = table[run[0]][2]
        experts = any(letter(kind) == "E" for kind in run)
        again = sum(table[kind][0] for kind in run) - kept
        found.append(_Unit(letter(run[0]), kept, again, experts))
    return found + [_Unit(letter(kind), *table[kind][:2], letter(kind) == "E") for kind in whole]


def _mtp_units(config: Nemotron3Config, recompute: Recompute, table: Table) -> list[_Unit]:
    """One depth in the order of forward. Method "uniform" recomputes the whole depth, others its layers."""
    inner, (own, _, stream) = config.mtp_pattern or "", table["mtp"]
    if not (recompute.full and recompute.method == "uniform"):
        return [_Unit("mtp", own, 0, False), *_layer_units(inner, recompute, table)]
    kept = 2 * stream + table["embedding"][0]
    layers = [table[kind][2] for kind in inner]  # inside the depth, each layer is checkpointed once more
    again = own - kept + sum(layers) + max(table[kind][0] - table[kind][2] for kind in inner)
    return [_Unit("mtp", kept, again, "E" in inner)]


@lru_cache(maxsize=65536)
def stage_bytes(
    config: Nemotron3Config, share: RankShare, patterns: tuple[str, ...], stage: int, expert_work: int = 0
) -> tuple[dict[str, int], int, int]:
    """Bytes of one microbatch on a stage: (kept by layer kind, peak of recomputation, peak of `expert_work`).

    MTP's layers are counted under their own kinds; "mtp" is what the depths keep in addition.
    """
    recompute, table = share.recompute, _kind_bytes(config, share)
    units = [_Unit("embedding", table["embedding"][0], 0, False)] if stage == 0 else []
    units += _layer_units(patterns[stage], recompute, table)
    if stage == len(patterns) - 1:
        for _ in range(config.mtp_num_layers):
            units += _mtp_units(config, recompute, table)
        units.append(_Unit("output", table["output"][0], 0, False))
    found: dict[str, int] = {}
    for unit in units:
        found[unit.kind] = found.get(unit.kind, 0) + unit.kept
    freed = exceeds = with_work = 0
    for unit in reversed(units):
        exceeds = max(exceeds, unit.again - freed)
        with_work = max(with_work, unit.again + unit.experts * expert_work - freed)
        freed += unit.kept
    return found, exceeds, with_work - exceeds
