"""The model of a command line with `--use-checkpoint-args`: that of the checkpoint of `--load`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_nemotron3.checkpoints.folders import checkpoint_path, read_tracker
from megatron_nemotron3.checkpoints.resume import load_options
from megatron_nemotron3.checkpoints.state import StoredState, stored_state
from megatron_nemotron3.common.parser import option_value
from megatron_nemotron3.launch.flag import Flag, is_known, to_argv
from megatron_nemotron3.launch.parser import option_of, options_of
from megatron_nemotron3.models.stack_specs import stored_experts

OPTION = "--use-checkpoint-args"
#: Arguments that Megatron takes from the checkpoint whatever the command line has, and those that it takes
#: if they are not passed (`load_args_from_checkpoint` of megatron/training/checkpointing.py, 0.19).
# fmt: off
_FORCED = (
    "num_query_groups", "group_query_attention", "position_embedding_type",
    "use_rotary_position_embeddings", "rotary_base", "rotary_percent", "add_bias_linear",
    "add_qkv_bias", "squared_relu", "swiglu", "untie_embeddings_and_output_weights",
    "apply_layernorm_1p", "normalization", "attention_dropout", "hidden_dropout", "mtp_num_layers",
    "mtp_use_repeated_layer", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
    "moe_router_pre_softmax", "moe_shared_expert_intermediate_size", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_topk_scaling_factor", "mamba_state_dim",
    "mamba_head_dim", "mamba_num_groups", "mamba_num_heads", "moe_latent_size",
    "moe_use_norm_before_up_proj",
)
_IF_NOT_PASSED = (
    "num_layers", "hidden_size", "ffn_hidden_size", "seq_length", "num_attention_heads", "kv_channels",
    "max_position_embeddings", "hybrid_layer_pattern", "moe_token_dispatcher_type", "padded_vocab_size",
)
# fmt: on


@dataclass(frozen=True)
class MergedOptions:
    """What a command line and the checkpoint it loads say together."""

    flags: tuple[Flag, ...]
    #: Options whose values are the checkpoint's.
    names: frozenset[str] = frozenset()
    #: "" without the option.
    note: str = ""
    #: Whether the checkpoint was read; if not, the values of `names` are unknown.
    read: bool = True


def merged_options(flags: Sequence[Flag]) -> MergedOptions:
    """Return a command line with the options of the model as Megatron takes them."""
    passed = {flag.name: flag for flag in flags}
    if OPTION not in passed:
        return MergedOptions(tuple(flags))
    names = {option_of(field) for field in _FORCED}
    names |= {name for field in _IF_NOT_PASSED if (name := option_of(field)) not in passed}
    argv = to_argv(flags)
    folder = option_value(argv, "--load")
    if folder is None:
        raise ValueError(f"{OPTION} needs --load: Megatron takes the model from that checkpoint")
    found = loaded(argv) if is_known([folder]) else None
    if found is None:
        note = (
            f"{OPTION}: Megatron takes the model from the checkpoint of --load {folder}, which cannot be "
            "read here, so options of the model are not compared"
        )
        return MergedOptions(tuple(flags), frozenset(names), note, read=False)
    which, state = found
    # Megatron leaves what the checkpoint does not store as the command line has it.
    fields = [*_FORCED, *(field for field in _IF_NOT_PASSED if option_of(field) in names)]
    stored = {field: state.args[field] for field in fields if state.args.get(field) is not None}
    names = {option_of(field) for field in stored}
    values = options_of(stored | {"group_query_attention": state.args.get("group_query_attention")})
    kept = [flag for flag in flags if flag.name not in names]
    replaced = [flag.name for flag in flags if flag.name in names and values.get(flag.name) != flag.values]
    note = f"{OPTION}: the model is that of {folder}, {which}"
    if replaced:
        note += f"; Megatron does not use this text's {', '.join(replaced)}"
    stack = passed["--spec"].values if "--spec" in passed else ("megatron", "")
    before, now = stored_experts(state.args), stored_experts({"spec": stack})
    if None not in (before, now) and before != now:
        note += (
            f"; the experts of its layers (width:per token) {_experts(before)}, those of this text's "
            f"--spec {_experts(now)}: Megatron does not take --spec from the checkpoint and cannot load it"
        )
    merged = (*kept, *(Flag(name, words) for name, words in values.items() if name in names))
    return MergedOptions(merged, frozenset(names), note)


def _experts(experts: str | None) -> str:
    return f"are {experts:.60}" if experts else "are those of all layers alike"


def loaded(argv: Sequence[str]) -> tuple[str, StoredState] | None:
    """Return which checkpoint a command line loads, and its state; None if it cannot be read."""
    given = load_options(argv)
    try:
        which = given.load and (given.step or read_tracker(given.load))
    except ValueError as problem:
        raise ValueError(f"{OPTION}: the tracker in {given.load} {problem}") from None
    if not (given.load and which):
        return None
    path = checkpoint_path(given.load, which)
    state = stored_state(path) if path.is_dir() else None
    return (path.name, state) if state and state.args else None
