"""A training script in which a layer gets no gradients: `hurt_script.py SCRIPT ARGS…` runs SCRIPT."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from tests.support.faults import no_gradients  # now: Megatron-LM has a `tests` of its own


def main() -> None:
    hurt: list[Any] = []

    def before(module: Module, _inputs: Any) -> None:
        layers = getattr(getattr(module, "decoder", None), "layers", None)
        if layers is not None and not hurt:
            hurt.extend(no_gradients(layers[1]))

    register_module_forward_pre_hook(before)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
