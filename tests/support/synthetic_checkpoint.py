"""A checkpoint with real layer widths and no files: its numbers are generated when they are read.

python -m tests.support.synthetic_checkpoint super 200       # one layer of each kind and MTP; time, memory
python -m tests.support.synthetic_checkpoint super 4 whole   # all 88 layers and MTP
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
import zlib
from math import prod
from pathlib import Path

import torch

from megatron_nemotron3.checkpoints.convert import config_json, inventory
from megatron_nemotron3.checkpoints.convert.logits.compare import (
    LogitsCheckOptions,
    check_logits,
    memory_bound,
)
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.views import Converted
from megatron_nemotron3.models import Nemotron3Config, get
from tests.support.megatron_tensors import megatron_tensors

#: Random numbers that are repeated; their count is prime, so that rows of a weight are not copies.
_POOL = torch.randn(4_194_319, generator=torch.Generator().manual_seed(0)).mul_(0.5)

#: End of a name -> (mean, standard deviation); other vectors are norms, matrices have 1 / sqrt(columns).
_SCALES = {
    "expert_bias": (0.0, 0.1),
    "dt_bias": (-3.0, 1.5),
    "A_log": (1.0, 1.0),
    "conv1d.weight": (0.0, 0.4),
    "conv1d.bias": (0.0, 0.4),
}


class Synthetic(TensorSource):
    """A Megatron checkpoint of a model, random as `tests.support.model_mapping.randomize` makes it, BF16."""

    def __init__(self, config: Nemotron3Config, folder: Path) -> None:
        self.folder, self.files = folder, {}
        self.tensors = {t.name: SourceTensor(t.dtype, t.shape) for t in megatron_tensors(config)}

    def read(self, name: str, slices: tuple[tuple[int, int], ...]) -> torch.Tensor:
        shape, extent = self.tensors[name].shape, [stop - start for start, stop in slices]
        strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        assert prod(extent) < len(_POOL), f"{name}: {prod(extent):,} elements are read at once"
        # Slices are whole rows, so they are one run of the tensor.
        begin = (zlib.crc32(name.encode()) + sum(s * n for (s, _), n in zip(slices, strides))) % len(_POOL)
        run = torch.cat(
            [_POOL[begin : begin + prod(extent)], _POOL[: max(0, begin + prod(extent) - len(_POOL))]]
        )
        whole = re.sub(r"\.(z|x|B|C|dt)$", "", name)
        mean, std = next((v for end, v in _SCALES.items() if whole.endswith(end)), (1.0, 0.3))
        if len(shape) > 1 and "conv1d" not in name:
            mean, std = 0.0, shape[-1] ** -0.5
        values = run.mul_(2 * std).add_(mean).view(extent)
        return values if self.tensors[name].dtype == "float32" else values.bfloat16()


def main(name: str, tokens: int, whole: bool) -> None:
    """Print the report, and a last line that a test reads."""
    config = get(name)
    if not whole:
        kinds = "".join(kind for kind in "M*-E" if kind in config.pattern)
        config = config.but(name=f"{name}-cut", pattern=kinds)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_json.write(config)))
        megatron = Synthetic(config, Path(folder))
        hf = Converted(megatron, inventory.mappings(config), to_hf=True)
        started = time.monotonic()
        report = check_logits(megatron, hf, config, LogitsCheckOptions(tokens))
        seconds = time.monotonic() - started
    result = {
        "passed": report.passed,
        "seconds": round(seconds, 1),
        "peak": report.peak_memory,
        "bound": memory_bound(config, tokens),
        "difference": max(layer.difference for layer in report.layers),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["whole"])
