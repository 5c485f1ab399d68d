"""The table of `_extra_state` objects lists what a stock TE model and our torch spec load."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import pytest
import torch

from megatron_nemotron3.checkpoints.convert.from_hf import EXTRA_STATE, MODULES, extra_state_keys
from megatron_nemotron3.checkpoints.convert.inventory import mappings
from megatron_nemotron3.checkpoints.convert.keys import non_weight_kind
from megatron_nemotron3.launch import ParallelLayout
from megatron_nemotron3.models import Nemotron3Config, get, tiny
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.proof.certify.ranks import initialize, run_distributed
from tests.support.convert_models import DISTINCT, GOLDEN, random_config
from tests.support.models import golden_file

STOCK: dict[str, Any] = json.loads(golden_file().read_text())


@pytest.mark.parametrize("name", GOLDEN)
def test_the_modules_are_those_of_stock_te(name: str) -> None:
    """The golden file lists each object once, without its shards."""
    stock = [key for key, entry in STOCK[name]["checkpoint"].items() if entry == "object"]
    mine = [key.partition("/")[0] for key in extra_state_keys(GOLDEN[name])]
    assert set(mine) == set(stock)
    experts = GOLDEN[name].num_moe_experts or 0
    for key in stock:
        assert mine.count(key) == (experts if ".experts.experts." in key else 1), key


def asked_for(config: Nemotron3Config, layout: ParallelLayout) -> list[str]:
    """Return the keys of the objects that Megatron loads on this rank."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories

    from megatron_nemotron3 import build_model

    initialize(tp=layout.tp, ep=layout.ep, etp=layout.etp)
    model = build_model(config, layout=layout, backend="torch")
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    apply_factories(state)
    return [v.unique_key for v in nested_values(state) if isinstance(v, ShardedObject)]


MODELS = [DISTINCT, tiny(get("super")), tiny(get("nemotron-h-8b")), *map(random_config, range(4))]


@pytest.mark.parametrize("config", MODELS, ids=lambda c: c.name)
def test_the_keys_are_those_our_torch_spec_asks_for(config: Nemotron3Config) -> None:
    (found,) = run_distributed(asked_for, 1, config, ParallelLayout())
    keys = list(extra_state_keys(config))
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(found)


LAYOUTS = [ParallelLayout(tp=2, ep=2), ParallelLayout(dp=2, ep=2), ParallelLayout(tp=2, etp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_keys_do_not_depend_on_the_layout(layout: ParallelLayout) -> None:
    ranks = run_distributed(asked_for, layout.world_size, DISTINCT, layout)
    assert len(ranks) == 2
    assert {key for rank in ranks for key in rank} == set(extra_state_keys(DISTINCT))


def test_every_part_has_its_modules_and_every_module_has_a_weight() -> None:
    config = DISTINCT.but(pattern="ME*-")
    assert {prefix.part for prefix in prefixes(config)} == set(MODULES)
    weights = {t.name for mapping in mappings(config) for t in mapping.megatron}
    for key in extra_state_keys(config):
        module = key.partition("._extra_state")[0]
        assert any(re.match(re.escape(module) + r"\.(weight|bias)", name) for name in weights), key
        assert non_weight_kind(key) == "extra state"


def test_number_for_the_largest_model() -> None:
    """Ultra: 48 layers and an MTP layer of 512 experts with two matrices each; one per other module."""
    keys = list(extra_state_keys(get("ultra")))
    assert sum(".experts.experts." in key for key in keys) == 49 * 512 * 2
    assert len(keys) - 49 * 512 * 2 == 48 * 2 + 13 * 2 + 49 * 5 + 4 + 2


def test_what_is_stored_is_what_megatron_loads() -> None:
    stored = EXTRA_STATE
    assert torch.load(io.BytesIO(stored), weights_only=True) == [None]
    assert len(stored) < 1300  # Ultra has 50,000 of them
