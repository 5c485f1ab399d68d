"""Optional parts: what is missing, said in one sentence; and quiet about those nobody asked for."""

from __future__ import annotations

import importlib.util
import logging
import warnings


def te_problem() -> str | None:
    """Why TransformerEngine (TE) cannot be used here, with the cure, or None if it can be built."""
    if importlib.util.find_spec("transformer_engine") is None:
        return (
            "package transformer-engine is not installed: "
            "pip install 'transformer-engine[pytorch]', or use the torch backend"
        )
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return (
            "package transformer-engine is installed but megatron-core cannot import it "
            "(try: python -c 'import transformer_engine.pytorch'), or use the torch backend"
        )
    return None


def quiet_on_cpu() -> None:
    """Drop the import-time remarks of torch and Megatron on a missing GPU, TE and apex."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    for remark in ("Transformer Engine and Apex are not installed", "Could not determine rank"):
        warnings.filterwarnings("ignore", message=remark)
