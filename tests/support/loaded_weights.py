"""What a converted folder holds, and specs that load it; run by TE_PYTHON too, which has no pytest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_nemotron3.checkpoints.metadata import read_metadata
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.proof.certify.ranks import run_distributed
from megatron_nemotron3.proof.certify.tensors import Tensors, gather
from tests.support.checkpoint_reading import read_rows
from tests.support.convert_models import GOLDEN

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
#: Arguments of `initialize`.
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "TP2 EP2": {"tp": 2, "ep": 2, "etp": 1},
    "PP2": {"pp": 2},
}


def written(folder: Path) -> Tensors:
    """Every tensor of the folder, as our own reader finds it."""
    index = read_metadata(folder / "release")
    return {name: read_rows(index, name) for name in index.tensors}


def same(kept: Tensors, got: Tensors, config: Nemotron3Config) -> None:
    """Equal to the bit; a model may pad its vocabulary less than the file or more."""
    assert kept.keys() == got.keys(), sorted(kept.keys() ^ got.keys())
    for key, tensor in kept.items():
        rows = config.vocab_size if key in VOCABULARY else tensor.shape[0]
        assert rows <= min(len(tensor), len(got[key])), key
        assert got[key][:rows].equal(tensor[:rows].to(got[key].dtype)), key
        assert key in VOCABULARY or got[key].shape == tensor.shape, key


def load_with_te(folder: Path, name: str, specs: dict[str, list[str]]) -> dict[str, int]:
    """Spec and layout -> number of tensors that arrived.

    Raises:
        AssertionError: a weight is not the one in the folder.
        RuntimeError: Megatron refused to load, with strictness `raise_all`.
    """
    kept, compared = written(folder), {}
    for who, spec in specs.items():
        for layout, sizes in LAYOUTS.items():
            if not GOLDEN[name].is_moe and "ep" in sizes:
                continue
            world = 2 if sizes else 1
            ranks = run_distributed(_load_spec, world, spec, name, sizes, folder / "release")
            same(kept, gather(ranks), GOLDEN[name])
            compared[f"{who} at {layout}"] = len(kept)
    return compared


def _load_spec(spec: list[str], name: str, sizes: dict[str, int], folder: Path) -> Any:
    """On a rank: a golden model of that spec, with what the folder holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.transformer.spec_utils import import_module

    from megatron_nemotron3.proof.certify.ranks import initialize
    from megatron_nemotron3.proof.certify.tensors import pieces
    from tests.support.models import GOLDEN_MODELS, build_hybrid
    from tests.support.te_interchange import state

    initialize(**sizes)
    pattern, fields = GOLDEN_MODELS[name]
    if "pp" in sizes:
        main, *mtp = pattern.split("/")
        pattern = "/".join([f"{main[:2]}|{main[2:]}", *mtp])
    model = build_hybrid(pattern, import_module(tuple(spec)), **fields)
    loaded = dist_checkpointing.load({"model": state(model)}, str(folder), strict=StrictHandling.RAISE_ALL)
    model.load_state_dict(loaded["model"], strict=True)
    return pieces([model])
