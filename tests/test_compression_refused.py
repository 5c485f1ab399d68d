"""Sizes that pruning refuses, and the error without nvidia-modelopt."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_nemotron3 import compression
from megatron_nemotron3.compression import minitron
from megatron_nemotron3.models import Nemotron3Config
from tests.support.programs import run_python
from tests.test_compression import DENSE, EXAMPLE, SUPER, WITH_MTP, calibrate


@pytest.mark.parametrize(
    ("config", "sizes", "words"),
    [
        (DENSE, {"num_query_groups": 1}, "choose from hidden_size"),
        (DENSE, {"num_moe_experts": 2}, "nano-4b-tiny has no E layer"),
        (SUPER, {"ffn_hidden_size": 2}, "super-tiny has no - layer"),
        (DENSE, {"hidden_size": 129}, "hidden_size=129: nano-4b-tiny has 128"),
        (DENSE, {"hidden_size": 0}, "give 1 to 128"),
        (DENSE, {"mamba_num_heads": 12}, "within their 8 groups"),
        (DENSE, {"num_attention_heads": 3}, "within their 2 groups"),
        (SUPER, {"num_moe_experts": 5}, "less than moe_router_topk=6"),
        (WITH_MTP, {"hidden_size": 96}, r"MTP block '\*E'"),
        (WITH_MTP, {"num_moe_experts": 24}, "mtp_pattern=None"),
    ],
)
def test_sizes_that_cannot_be(config: Nemotron3Config, sizes: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        minitron.check(config, sizes)


def test_without_modelopt_the_pip_line_is_given() -> None:
    with (
        mock.patch.object(importlib.util, "find_spec", lambda name, *rest: None),
        pytest.raises(ImportError, match="pip install nvidia-modelopt=="),
    ):
        compression.prune(torch.nn.Linear(1, 1), DENSE, {"hidden_size": 96}, calibrate)


def test_example_without_modelopt_ends_with_2() -> None:
    hide = (
        "import importlib.util as u, runpy, sys; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'modelopt' else real(name, *rest)\n"
        f"sys.argv = ['compress_minitron']; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    )
    done = run_python(["-c", hide], Path.cwd())
    assert done.returncode == 2, done.stderr[-2000:]
    assert "pip install nvidia-modelopt==" in done.stderr
    assert not done.stdout
