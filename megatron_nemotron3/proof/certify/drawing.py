"""The launch's own script with the random numbers that the launch draws: killed and resumed.

Runs in different layouts draw different numbers, so all other stages do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_nemotron3.launch.launch import Launch
from megatron_nemotron3.precision.formats import NVFP4
from megatron_nemotron3.precision.settings import OPTION, Emulation
from megatron_nemotron3.proof.certify import script_stage
from megatron_nemotron3.proof.certify.bench import Bench, Finding, PropertyState, last_line


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


def drawing(bench: Bench) -> Iterator[Finding]:
    """Yield whether a run that draws resumes to the bit; nothing if the launch draws nothing."""
    words, sizes, config = drawn(bench), bench.proxy.sizes[0], bench.proxy.config
    if not words:
        return
    if OPTION in words:  # shards of qkv and of Mamba's in_proj fill blocks of 16
        config = config.but(mamba_num_heads=16 * sizes.layout.tp, mamba_head_dim=4, kv_channels=16)
    folder = bench.folder / "drawing"
    folder.mkdir()
    scripts = script_stage.ScriptRuns(
        replace(bench, folder=folder, proxy=replace(bench.proxy, config=config))
    )
    if script_stage.reason_against(scripts):  # the script's own stage has said it
        return
    scripts.write_data()
    where = f"{sizes}, random numbers"
    try:
        killed = scripts.run("layout", sizes, *scripts.saving, *words, killed_in=scripts.saved)
    except script_stage.FAILURES as problem:
        reason = last_line(problem)
        cut = "is not divisible into" in reason  # a shard of the small model is smaller than a block
        state = PropertyState.UNTESTED if cut else PropertyState.FAIL
        yield Finding("training", state, where, detail=reason)
        return
    yield from script_stage.resume_findings(scripts, sizes, killed, where, *words)
