"""The launch's own script in the launch's own precision, from Megatron's own initialization, with all random
numbers that the launch draws: what holds to the bit in every layout; then killed and resumed.

All other stages compute in FP32 without random numbers, so that layouts can be compared. Here nothing is
compared with another layout. A number is compared with what it must be a copy, a cast or a sum of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_nemotron3.launch.flag import to_argv
from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.settings import OPTION, Emulation
from megatron_nemotron3.proof.certify import observer, script_stage
from megatron_nemotron3.proof.certify.bench import (
    Bench,
    Finding,
    PropertyState,
    failed,
    last_line,
    passed,
    untested,
)
from megatron_nemotron3.proof.certify.initialization import INITIALIZATION, Laws, initialized, unlike
from megatron_nemotron3.proof.certify.script_result import ScriptResult
from megatron_nemotron3.proof.certify.tensors import RanksDiffer

PRECISION = "own precision"
#: Options of formats that Megatron takes on any machine. The others need Transformer Engine.
_FORMATS = {
    *("--bf16", "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"),
    *("--attention-softmax-in-fp32", "--fp32-residual-connection"),
}
#: Options with which weights begin in another way than `Laws` says.
_OTHER_STARTS = {
    *("--use-mup", "--init-method-xavier-uniform", "--moe-use-upcycling"),
}
#: Largest error of a router that computes in FP32; one in BF16 has 1e-3 and more.
_ROUTER = 1e-4
#: Largest error of the scale of a norm with statistics in FP32. A BF16 output rounds each channel by up to
#: 2**-9, which averages out to 7e-4 in a group of 16. Statistics in BF16 round all of them alike: 2e-3.
_NORM = 1.2e-3


def drawn(bench: Bench) -> tuple[str, ...]:
    """Return words of what a launch draws: its own options, and stochastic rounding by emulation."""
    return (*bench.proxy.drawing, *_stochastic_rounding(bench.launch))


def _stochastic_rounding(launch: Launch | None) -> tuple[str, ...]:
    if launch is None:
        return ()
    chosen = launch.emulate or (Emulation() if launch.precision == NVFP4 else None)
    if chosen is None or chosen.packed or chosen.format != NVFP4 or not chosen.stochastic:
        return ()
    return OPTION, replace(chosen, every_layer=True).text()


def own_precision(bench: Bench) -> Iterator[Finding]:
    """Yield what holds to the bit in the launch's own precision, and whether the run resumes to the bit."""
    given = {flag.name: flag.values for flag in bench.flags}
    random, formats = drawn(bench), to_argv(flag for flag in bench.flags if flag.name in _FORMATS)
    sizes, config = bench.proxy.sizes[0], bench.proxy.config
    if OPTION in random:  # shards of qkv and of Mamba's in_proj fill blocks of 16
        config = config.but(mamba_num_heads=16 * sizes.layout.tp, mamba_head_dim=4, kv_channels=16)
    folder = bench.folder / "own"
    folder.mkdir()
    scripts = script_stage.ScriptRuns(
        replace(bench, folder=folder, proxy=replace(bench.proxy, config=config))
    )
    if script_stage.reason_against(scripts):  # the script's own stage has said it
        return
    if "--fp16" in given:
        yield untested(PRECISION, "--fp16 skips steps until its scale of the loss fits")
    scripts.write_data()
    words = (*random, *formats)
    where = f"{sizes}, {'BF16' if '--bf16' in given else 'FP32'}{' and random numbers' if random else ''}"
    try:
        killed = scripts.run("layout", sizes, *scripts.saving, *words, killed_in=scripts.saved, own=True)
    except RanksDiffer as problem:
        yield failed("copies on several ranks", where, str(problem))
        return
    except script_stage.FAILURES as problem:
        reason = last_line(problem)
        cut = "is not divisible into" in reason  # a shard of the small model is smaller than a block
        state = PropertyState.UNTESTED if cut else PropertyState.FAIL
        yield Finding("training", state, where, detail=reason)
        return
    yield passed("copies on several ranks", where, "parameters, master weights, optimizer state")
    facts = observer.read_facts(scripts.folder / "layout", sizes.layout.world_size)
    yield from _initialization(scripts, killed, given, where)
    yield from masters(killed, where)
    yield from counters(killed, where)
    yield random_streams(facts, "--data-parallel-random-init" in given, where)
    yield from formats_of(facts, given, where)
    yield from script_stage.resume_findings(scripts, sizes, killed, where, *words)


def _initialization(
    scripts: script_stage.ScriptRuns, run: ScriptResult, given: Mapping[str, Sequence[str]], where: str
) -> Iterator[Finding]:
    start, case = run.seen[1, observer.MODEL], scripts.bench.proxy.case
    if other := sorted(_OTHER_STARTS & given.keys()) or (case.lora or case.boost) and ["adapters or heads"]:
        yield untested(INITIALIZATION, f"not written for {other[0]}", where)
        return
    config = scripts.bench.proxy.config
    deviation = config.init_method_std
    embedding = (given.get("--embedding-init-method-std") or (deviation,))[0]
    laws = Laws(
        deviation=deviation,
        embedding=float(embedding),
        layers=config.num_layers,
        kernel=config.mamba_conv_kernel,
        gain=0.0 if "--apply-layernorm-1p" in given else 1.0,
    )
    yield from initialized(laws, start, where)
    yield from unlike(start, where)


def masters(run: ScriptResult, where: str) -> Iterator[Finding]:
    """Yield whether a step computes with its master weights, in the precision of the model."""
    what = "model and master weights"
    weights = observer.WEIGHTS
    for step, before in ((1, (1, observer.BEFORE + weights)), (2, (1, weights))):
        if (step, observer.MODEL) not in run.seen:
            continue
        used, held = run.seen[step, observer.MODEL], run.seen[before]
        for key, tensor in used.items():
            if not held[key].to(tensor.dtype).equal(tensor):
                apart = float((held[key].to(tensor.dtype).double() - tensor.double()).abs().max())
                yield Finding(what, PropertyState.FAIL, where, apart, 0.0, f"{key}, step {step}")
                return
    yield Finding(what, PropertyState.PASS, where, 0.0, 0.0, f"{len(run.seen[1, observer.MODEL])} tensors")


def counters(run: ScriptResult, where: str) -> Iterator[Finding]:
    """Yield whether the optimizer has counted every step of every weight."""
    for (step, kind), found in sorted(run.seen.items()):
        wrong = [k for k, t in found.items() if kind == "step" and not t.eq(step).all()]
        if wrong:
            yield failed("steps of the optimizer", where, f"{wrong[0]} in step {step}")
            return
    yield passed("steps of the optimizer", where)


def random_streams(facts: Sequence[Mapping[str, Any]], own_replicas: bool, where: str) -> Finding:
    """Return whether ranks that must draw alike do, and those that must not do not.

    Args:
        facts: of each rank (`observer.read_facts`).
        own_replicas: whether data-parallel ranks have seeds of their own (`--data-parallel-random-init`).
    """
    what = "random states"
    apart = {"model-parallel": ("tp",), "expert-parallel": ("ep", "etp")}
    for stream in facts[0]["streams"]:
        own = next((names for part, names in apart.items() if part in stream), ())
        ranks: dict[tuple[int, ...], str] = {}
        states: dict[str, tuple[int, ...]] = {}
        for fact in facts:
            place = fact["ranks"]
            names = ("pp", *(("dp",) if own_replicas else ()), *own)
            key, state = tuple(place[name] for name in names), fact["streams"][stream]
            if ranks.setdefault(key, state) != state:
                return failed(what, where, f"{stream}: ranks of {_named(names, key)} draw different numbers")
            if states.setdefault(state, key) != key:
                same = f"{_named(names, states[state])} and {_named(names, key)}"
                return failed(what, where, f"{stream}: ranks of {same} draw the same numbers")
    return passed(what, where, f"{len(facts[0]['streams'])} streams")


def _named(names: Sequence[str], key: Sequence[int]) -> str:
    return " ".join(f"{name}{number}" for name, number in zip(names, key, strict=True))


def formats_of(
    facts: Sequence[Mapping[str, Any]], given: Mapping[str, Sequence[str]], where: str
) -> Iterator[Finding]:
    """Yield whether gradients, biases of experts and routers have the dtypes that the launch asks for."""
    wanted = "bfloat16" if "--grad-reduce-in-bf16" in given else "float32"
    for what, kind, dtype in (
        ("dtype of summed gradients", "gradients", wanted),
        ("dtype of expert biases", "biases", "float32"),
    ):
        found = {name: each for fact in facts for name, each in fact[kind].items()}
        wrong = [f"{name} is {each}, not {dtype}" for name, each in found.items() if each != dtype]
        if wrong:
            yield failed(what, where, wrong[0])
        elif found:
            yield passed(what, where, f"{dtype}: {len(found)} tensors")
    norms = {name: error for fact in facts for name, error in fact["norms"].items()}
    if norms:
        yield _error("statistics of norms", norms, _NORM, where, "float32")
    router = (given.get("--moe-router-dtype") or ("",))[0]
    errors = {name: error for fact in facts for name, error in fact["routers"].items()}
    if router in ("fp32", "fp64") and errors:
        yield _error("dtype of routers", errors, _ROUTER, where, router)


def _error(what: str, errors: Mapping[str, float], allowed: float, where: str, dtype: str) -> Finding:
    worst = max(errors, key=lambda name: errors[name])
    state = PropertyState.PASS if errors[worst] <= allowed else PropertyState.FAIL
    return Finding(what, state, where, errors[worst], allowed, f"{dtype}: {worst}")
