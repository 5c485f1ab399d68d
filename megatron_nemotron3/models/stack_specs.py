"""Names of the stacks in `megatron_nemotron3.specs`, for `--spec`: one per backend, for most models the same.

A model whose E layers differ (`moe_layers`) has its own, because Megatron has one option for all layers.
Those of the catalog are there from the start. The name of any other holds its table: the pattern of the
decoder, then width and top-k of each E layer. `specs.named` makes the stack of such a name:

    nemotron3_torch_stack_spec@ME*E@64:4,96:8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_nemotron3.models.catalog import get, names
from megatron_nemotron3.models.config import Nemotron3Config
from megatron_nemotron3.models.tiny import TINY_SUFFIX

#: Backend -> its part of the name.
BACKENDS = {"auto": "", "te": "te_", "torch": "torch_"}
#: The module that has them.
MODULE = "megatron_nemotron3.specs"
#: Where a checkpoint's stored arguments keep `experts_text`.
ARGUMENT = "nemotron3_moe_layers"
_EXPERTS = re.compile(r"(?:[1-9]\d{0,11}:[1-9]\d{0,11}(?: |\Z))*")
#: Between the parts of a name that holds a table.
TABLE = "@"


def spec_name(config: Nemotron3Config | None, backend: str) -> str:
    """Return the name of a stack: "nemotron3_torch_stack_spec", "nemotron3_puzzle_torch_stack_spec".

    Args:
        config: the model; None for one whose E layers are alike.
    """
    alike = f"nemotron3_{BACKENDS[backend]}stack_spec"
    if config is None or config.moe_layers is None:
        return alike
    if has_spec(config):
        return _catalog_name(config, backend)
    return TABLE.join((alike, config.pattern, experts_text(config).replace(" ", ",")))


def _catalog_name(config: Nemotron3Config, backend: str) -> str:
    return f"nemotron3_{config.name.replace('-', '_')}_{BACKENDS[backend]}stack_spec"


def has_spec(config: Nemotron3Config) -> bool:
    """Whether `MODULE` has a stack for this model from the start, so that its name holds no table."""
    if config.moe_layers is None:
        return True
    _, known = models_by_spec().get(_catalog_name(config, "auto"), ("", None))
    return known is not None and (known.pattern, known.moe_layers) == (config.pattern, config.moe_layers)


@lru_cache(maxsize=1)
def models_by_spec() -> dict[str, tuple[str, Nemotron3Config]]:
    """Name of a stack -> its backend and the catalog model, or tiny form, whose E layers it builds."""
    forms = [form for name in names() for form in (get(name), get(name + TINY_SUFFIX))]
    return {_catalog_name(form, b): (b, form) for form in forms if form.moe_layers for b in BACKENDS}


def named_table(name: str) -> tuple[str, Nemotron3Config] | None:
    """Return backend and E layers of a name that holds a table; None for another name.

    The config has the pattern and the `moe_layers` of the name; its other sizes mean nothing.
    """
    alike, mark, table = name.partition(TABLE)
    backends = {spec_name(None, backend): backend for backend in BACKENDS}
    if not mark or alike not in backends:
        return None
    pattern, _, text = table.partition(TABLE)
    rows = read_experts(text.replace(",", " "))
    if rows is None:
        raise ValueError(f"{name!r:.60} names no experts: end it with width:top-k of each E layer")
    most = max(topk for _, topk in rows)
    start = get("super").but(name="the model in its name", mtp_pattern=None, mtp_num_layers=0)
    dense = {"dense_ffn_hidden_size": start.hidden_size} if "-" in pattern else {}
    return backends[alike], start.but(
        pattern=pattern, moe_layers=rows, num_moe_experts=most, moe_router_topk=most, **dense
    )


def experts_text(config: Nemotron3Config | None) -> str:
    """Return width and top-k of each E layer, "1280:4 1280:8"; "" where they are alike."""
    rows = None if config is None else config.moe_layers
    return " ".join(f"{width}:{topk}" for width, topk in rows or ())


def read_experts(text: str) -> tuple[tuple[int, int], ...] | None:
    """Return `moe_layers` of an `experts_text`."""
    if not _EXPERTS.fullmatch(text):
        raise ValueError(f"{ARGUMENT} {text!r:.60} is not of the form 1280:4 1280:8")
    rows = (one.split(":") for one in text.split())
    return tuple((int(width), int(topk)) for width, topk in rows) or None


def stored_experts(args: Mapping[str, Any]) -> str | None:
    """Return `experts_text` of the model that saved a checkpoint; None if its arguments do not say."""
    if ARGUMENT in args:  # None: of a list of layer configs, which no stack of ours has read
        return text if isinstance(text := args[ARGUMENT], str) else None
    spec = args.get("spec") or ("megatron", "")
    if not isinstance(spec, (list, tuple)) or len(spec) != 2 or not all(isinstance(s, str) for s in spec):
        return None
    module, name = spec
    if module == MODULE:
        try:
            found = named_table(name) or models_by_spec().get(name)
        except ValueError:
            return None
        return experts_text(found[1] if found else None)
    return "" if module.split(".")[0] == "megatron" else None
