"""Turn fields of Megatron's configuration, or stored arguments, into options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_nemotron3.launch import parser
from megatron_nemotron3.launch.flag import text

#: Minor version whose options are meant.
_VERSION = "0.19"

#: Field -> option, where the names differ.
_NAMES = {
    "num_moe_experts": "num-experts",
    "layernorm_epsilon": "norm-epsilon",
    "gated_linear_unit": "swiglu",
    "layernorm_zero_centered_gamma": "apply-layernorm-1p",
    "fp8": "fp8-format",
    "fp4": "fp4-format",
    "use_te_rng_tracker": "te-rng-tracker",
}
#: Field -> the switch that turns it off.
_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "share_embeddings_and_output_weights": "untie-embeddings-and-output-weights",
    "grad_reduce_in_fp32": "grad-reduce-in-bf16",
}
#: Fields that say nothing about the options of their names.
_NO_OPTION = ("bf16", "fp16", "params_dtype")


def option_of(field: str) -> str:
    """Return the option, with its dashes, that a field belongs to, whether it exists or not."""
    return "--" + (_OFF.get(field) or _NAMES.get(field) or field.replace("_", "-"))


def options_of(fields: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the options that fields of Megatron's configuration or stored arguments stand for.

    A field without an option is left out, and so is one whose value means that the option is not passed.
    """
    found: dict[str, tuple[str, ...]] = {}
    for field, value in fields.items():
        option = option_of(str(field))
        known = parser.argument(option, _VERSION)
        if known is None or known.package or field in _NO_OPTION or value is None:
            continue
        if known.type == "switch":
            if value is (field not in _OFF):
                found[option] = ()
        elif isinstance(value, (str, int, float, list, tuple)) and not isinstance(value, bool):
            values = value if isinstance(value, (list, tuple)) else (value,)
            if known.type == "int":  # a whole number may be stored as a float
                values = [int(v) if isinstance(v, float) and v.is_integer() else v for v in values]
            if words := tuple(map(text, values)):
                found[option] = words
    if "squared_relu" in str(fields.get("activation_func")):
        found["--squared-relu"] = ()
    heads, groups = found.get("--num-attention-heads"), found.get("--num-query-groups")
    if groups and groups != heads and "group_query_attention" not in fields:
        found["--group-query-attention"] = ()
    if found.get("--mtp-num-layers") == ("0",):
        del found["--mtp-num-layers"]
    return found
