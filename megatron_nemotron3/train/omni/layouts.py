"""Where the modules of a training job run, from the options of its command line.

    --tensor-model-parallel-size 2 --vision-layout tp=1,dp=4 --sound-layout tp=1,dp=2

Megatron's own options are the language model's. Encoders come first: vision on ranks 0 to 3, sound on 4 and
5, and the language model on the rest of the world. Encoders whose layouts cover the whole world (`offset=0`)
share all ranks with the language model, and so do encoders without a layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.launch import ParallelLayout

LANGUAGE, VISION, SOUND = "language", "vision", "sound"


def module_layouts(
    world: int, language: ParallelLayout, encoders: Mapping[str, str | None], micro_batch_size: int
) -> dict[str, Layout]:
    """The layout of the language model, whose DP the world gives, and of each encoder."""
    ranks = language.tp * language.pp * language.cp
    found = _encoder_layouts(encoders)
    taken = max((layout.ranks.stop for layout in found.values()), default=0)
    if taken > world:
        raise ValueError(f"{_options(found)} need ranks 0 to {taken - 1}, and the world has {world}")
    spans = {(layout.ranks.start, layout.ranks.stop) for layout in found.values()}
    shared = not found or spans == {(0, world)}
    if not shared and taken == world:
        raise ValueError(
            f"{_options(found)} take all {world} ranks and leave none for the language model: use fewer, or "
            "give each all ranks (offset=0) to share them"
        )
    if not shared and len(spans) < len(found):
        raise ValueError(
            f"{_options(found)} are on the same ranks: Megatron's optimizer needs as many modules on each "
            "rank as on the others; give each encoder ranks of its own, or both all ranks of the world"
        )
    left = world if shared else world - taken
    if left % ranks:
        raise ValueError(
            f"the language model has {left} of {world} ranks, which is no multiple of TP * PP * CP = "
            f"{language.tp} * {language.pp} * {language.cp}: change one of them"
        )
    if shared and language.pp > 1:
        raise ValueError(
            f"--pipeline-model-parallel-size {language.pp} with encoders on the language model's ranks: give "
            "the encoders ranks of their own (--vision-layout, --sound-layout)"
        )
    dp = left // ranks
    if (language.tp * language.cp * dp) % language.expert_ranks:
        raise ValueError(
            f"EP * ETP = {language.ep} * {language.etp} does not divide TP * CP * DP = "
            f"{language.tp} * {language.cp} * {dp} of the language model"
        )
    samples = micro_batch_size * dp
    for name, layout in found.items():
        if samples % layout.dp:
            raise ValueError(
                f"--{name}-layout {layout}: {samples} samples of a microbatch (--micro-batch-size "
                f"{micro_batch_size} * DP {dp} of the language model) do not divide among dp={layout.dp}"
            )
    # Stages vary slowest, as in the checkout's entry, so that EP may cross replicas.
    sizes = (("tp", language.tp), ("cp", language.cp), ("dp", dp), ("pp", language.pp))
    own = Layout(sizes, 0 if shared else taken, language.sequence_parallel)
    default = Layout.of(tp=ranks, dp=dp)
    return {LANGUAGE: own} | {name: found.get(name, default) for name in encoders}


def _encoder_layouts(encoders: Mapping[str, str | None]) -> dict[str, Layout]:
    given = {name: text for name, text in encoders.items() if text}
    if given and (missing := [name for name in encoders if name not in given]):
        raise ValueError(f"--{next(iter(given))}-layout is given: give --{missing[0]}-layout, too")
    found: dict[str, Layout] = {}
    free = 0
    for name, text in given.items():
        try:
            layout = Layout.parse(text if "offset" in text else f"{text},offset={free}")
        except ValueError as problem:
            raise ValueError(f"--{name}-layout: {problem}") from None
        if layout.size != layout.tp * layout.dp or layout.sequence_parallel:
            raise ValueError(f"--{name}-layout {text}: encoders have tp=, dp= and offset= only")
        for other, there in found.items():
            mine, theirs = layout.ranks, there.ranks
            if mine != theirs and set(mine) & set(theirs):
                raise ValueError(
                    f"--{other}-layout {there} and --{name}-layout {layout} share some of their ranks: give "
                    "them the same ranks or different ones"
                )
        found[name] = layout
        free = max(free, layout.ranks.stop)
    covered = {rank for layout in found.values() for rank in layout.ranks}
    if covered != set(range(free)):
        gap = min(set(range(free)) - covered)
        raise ValueError(
            f"{_options(found)} leave rank {gap} idle: encoders take the first ranks, without gaps"
        )
    return found


def _options(layouts: Mapping[str, Layout]) -> str:
    return " and ".join(f"--{name}-layout {layout}" for name, layout in layouts.items())


def main() -> None:
    """Print the language model's data-parallel size, for recipes; exit code 2 if the layouts do not fit."""
    parser = argparse.ArgumentParser(prog="layouts", description=__doc__)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, default=1)
    for name in ("tp", "pp", "cp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    for name in (VISION, SOUND):
        parser.add_argument(f"--{name}-layout")
    given = parser.parse_args()
    encoders = {VISION: given.vision_layout, SOUND: given.sound_layout}
    try:
        language = ParallelLayout(**{name: getattr(given, name) for name in ("tp", "pp", "cp", "ep", "etp")})
        print(module_layouts(given.world, language, encoders, given.micro_batch_size)[LANGUAGE].dp)
    except ValueError as problem:
        print(problem, file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
