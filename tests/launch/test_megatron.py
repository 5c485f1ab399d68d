"""Every set of flags we emit is accepted by the installed Megatron and means what the config says.

The oracle is megatron.training's own parser, `validate_args` and `core_transformer_config_from_args`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import random
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import models
from megatron_nemotron3.launch import (
    BACKENDS,
    PRECISIONS,
    Launch,
    ParallelLayout,
    RuleError,
    TrainingSchedule,
    check,
    cut_pattern,
    flags,
    mock_data,
    published,
    published_layout,
    smoke,
    to_argv,
)
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.precision.formats import FORMATS
from megatron_nemotron3.precision.table import bf16_layers
from tests.launch.megatron_parser import ask

pytest.importorskip("megatron.training")

# Enough of a precision file for Megatron to load: the generator of the real one is another piece of work.
PRECISION_YAML = """\
configs:
  bf16:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {}
    evaluation_recipe: {}
matchers:
  qkv: {config: bf16, type: glob, pattern: "*.linear_qkv", enabled: true}
"""

LAYOUTS = (
    ParallelLayout(),
    ParallelLayout(tp=2, dp=2, ep=4),
    ParallelLayout(tp=8, dp=2),
    ParallelLayout(pp=4, dp=2, ep=2),
    ParallelLayout(pp=2, vpp=2, tp=2, ep=2),
    ParallelLayout(cp=2, dp=2),
)


EVEN = models.get("super-tiny").but(vocab_size=1000)
ODD = EVEN.but(vocab_size=1001)


def random_layouts(number: int = 30) -> list[ParallelLayout]:
    """Layouts of sizes nobody picks, that the rules let through."""
    rng = random.Random(0)
    found: list[ParallelLayout] = []
    while len(found) < number:
        sizes = {
            name: rng.choice((1, 1, 2, 3, 4, 6, 8, 16)) for name in ("tp", "pp", "vpp", "ep", "cp", "dp")
        }
        layout = ParallelLayout(**sizes, etp=rng.choice((1, 1, 2)))
        schedule = TrainingSchedule(global_batch_size=layout.dp * 8)
        violations = check(Launch.of(models.SUPER, layout, precision="bf16", backend="te", schedule=schedule))
        if all(violation.severity == "warning" for violation in violations):
            found.append(layout)
    return found


def cases(every: bool) -> list[tuple[Nemotron3Config, ParallelLayout, str, str, TrainingSchedule]]:
    """Models, layouts, and precisions on backends: every combination, or a sixth that has every pair."""
    out = []
    full = [(models.get(name), published(models.get(name))) for name in models.names()]
    small = [(models.tiny(config), smoke(config, global_batch_size=16)) for config, _ in full]
    for i, (config, schedule) in enumerate((*full, *small)):
        own = published_layout(config)
        for j, layout in enumerate((*LAYOUTS, *((own,) if own else ()))):
            if not config.is_moe:
                layout = dataclasses.replace(layout, ep=1)
            for k, (precision, backend) in enumerate(itertools.product(PRECISIONS, BACKENDS)):
                if every or (i + j + k) % 6 == 0:
                    out.append((config, layout, precision, backend, schedule))
    for layout in random_layouts():
        out.append((models.SUPER, layout, "bf16", "te", TrainingSchedule(global_batch_size=layout.dp * 8)))
    for config, layout in itertools.product((EVEN, ODD), (ParallelLayout(), ParallelLayout(tp=2))):
        out.append((config, layout, "bf16", "torch", smoke(config)))
    return out


#: What backend.py says Megatron's parser does without a GPU and without Transformer Engine: options added to
#: the torch flags of Super -> part of the error, None if accepted.
CLAIMS: tuple[tuple[str, str | None], ...] = (
    ("--moe-latent-size 1024", None),
    ("--moe-grouped-gemm", "NVIDIA driver"),
    ("--moe-permute-fusion", "install TE"),
    ("--fp8-recipe mxfp8 --fp8-format e4m3", "transformer-engine>=1.7.0"),
    ("--fp4-format e2m1", "Transformer Engine >= 2.7.0"),
)
BARE = importlib.util.find_spec("transformer_engine") is None and not Path("/dev/nvidia0").exists()

Answers = tuple[list[dict[str, Any]], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def parsed(answers: Answers) -> list[dict[str, Any]]:
    """A dictionary for each case: what went in, and what Megatron made of it."""
    return answers[0]


@pytest.mark.skipif(not BARE, reason="a GPU or Transformer Engine is installed")
def test_what_the_parser_refuses_without_transformer_engine(answers: Answers) -> None:
    for (options, error), reply in zip(CLAIMS, answers[1], strict=True):
        assert (error in reply.get("error", "")) if error else ("error" not in reply), (options, reply)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="pairs"), pytest.param(True, id="all", marks=pytest.mark.full)],
)
def answers(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Answers:
    """One process for all sets: those of `cases`, then those of `CLAIMS`."""
    file = tmp_path_factory.mktemp("precision") / "precision.yaml"
    file.write_text(PRECISION_YAML)
    found: list[dict[str, Any]] = []
    for config, layout, precision, backend, schedule in cases(request.param):
        options: dict[str, Any] = {}
        if precision == "nvfp4":
            options = {"te_precision_config_file": str(file), "emulate": backend == "torch"}
        answer: dict[str, Any] = {
            "config_in": config,
            "layout": layout,
            "precision": precision,
            "backend": backend,
            "schedule": schedule,
        }
        try:
            answer["argv"] = to_argv(
                flags(
                    Launch.of(
                        config,
                        layout,
                        precision=precision,
                        backend=backend,
                        schedule=schedule,
                        data=mock_data(config),
                        **options,
                    )
                )
            )
        except RuleError as error:
            answer["refused"] = error
        found.append(answer)
    jobs = [
        {
            "argv": answer["argv"],
            "world_size": answer["layout"].world_size,
            "patched": not runs_anywhere(answer),
        }
        for answer in found
        if "argv" in answer
    ]
    base = to_argv(flags(Launch.of(models.SUPER, backend="torch")))
    jobs += [{"argv": base + options.split(), "world_size": 1, "patched": False} for options, _ in CLAIMS]
    replies = ask(jobs, forked=False)
    for answer, reply in zip((a for a in found if "argv" in a), replies, strict=False):
        answer.update(reply)
    return found, replies[-len(CLAIMS) :]


def runs_anywhere(answer: dict[str, Any]) -> bool:
    """Sets that Megatron must parse without a GPU and without Transformer Engine, nothing patched.

    With TP or CP it asks for the GPU's architecture, for a check of CUDA_DEVICE_MAX_CONNECTIONS.
    """
    layout = answer["layout"]
    plain = answer["precision"] in ("bf16", "fp32") and layout.tp * layout.cp == 1
    return plain and answer["backend"] in ("auto", "torch")


def label(answer: dict[str, Any]) -> str:
    return f"{answer['config_in'].name} {answer['layout']} {answer['precision']} {answer['backend']}"


def accepted(parsed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [answer for answer in parsed if "config" in answer]


def test_megatron_accepts_every_set_we_emit(parsed: list[dict[str, Any]]) -> None:
    errors = [f"{label(answer)}: {answer['error']}" for answer in parsed if "error" in answer]
    assert not errors, f"{len(errors)} of {len(parsed)}\n" + "\n".join(errors[:10])


def test_what_we_refuse_is_the_known_few(parsed: list[dict[str, Any]]) -> None:
    """So that the acceptance test above cannot pass by refusing everything."""
    reasons: dict[str, set[str]] = {}
    for answer in parsed:
        if "refused" in answer:
            for violation in answer["refused"].violations:
                reasons.setdefault(violation.rule, set()).add(answer["config_in"].name)
    assert set(reasons) <= {"fp8-torch", "weight-alignment"}, reasons
    for answer in parsed:
        if answer["layout"] == published_layout(answer["config_in"]) and "refused" in answer:
            assert answer["precision"] in FORMATS and answer["backend"] == "torch", label(answer)
        if answer["precision"] in ("bf16", "fp32"):
            assert "refused" not in answer, label(answer)


# -- field by field ------------------------------------------------------------------------------------------

#: Fields of our config that Megatron's TransformerConfig has under the same name, with the same value.
SAME = (
    *("hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
    *("num_moe_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    *("moe_router_topk_scaling_factor", "moe_router_bias_update_rate"),
    *("mtp_loss_scaling_factor", "layernorm_epsilon"),
)
#: The others -> fields of Megatron's, and how our value reads there.
TransformerField = tuple[str, Callable[[Nemotron3Config], Any]]
MAPPING: dict[str, tuple[TransformerField, ...]] = {
    **{name: ((name, attrgetter(name)),) for name in SAME},
    "pattern": (("num_layers", lambda c: len(c.pattern)), ("is_hybrid_model", lambda c: True)),
    "dense_ffn_hidden_size": (
        ("ffn_hidden_size", lambda c: c.dense_ffn_hidden_size or c.moe_ffn_hidden_size),
    ),
    "moe_router_topk": (("moe_router_topk", lambda c: c.moe_router_topk or 2),),
    "moe_aux_loss_coeff": (("moe_aux_loss_coeff", lambda c: c.moe_aux_loss_coeff if c.is_moe else 0.0),),
    "mtp_num_layers": (("mtp_num_layers", lambda c: c.mtp_num_layers or None),),
    "mtp_use_repeated_layer": (("mtp_use_repeated_layer", lambda c: c.mtp_use_repeated_layer and c.has_mtp),),
    "init_method_std": tuple(
        (name, lambda c: c.init_method_std) for name in ("init_method_std", "embedding_init_method_std")
    ),
}
#: Fields that Megatron's TransformerConfig does not have, and why. Tested elsewhere where they say so.
NOT_A_TRANSFORMER_FIELD = {
    "name": "ours",
    "title": "ours",
    "vocab_size": "an argument of the model; test_vocabulary_is_not_padded",
    "seq_length": "an argument of the data; test_arguments",
    "max_position_embeddings": "what the Hugging Face config states; no flag depends on it",
    "mamba_conv_kernel": "no flag: MambaMixer builds 4; rule conv-kernel",
    "mamba_chunk_size": "no flag: MambaMixer uses 128; the result does not depend on it",
    "mtp_pattern": "part of --hybrid-layer-pattern; test_arguments",
    "published_total": "documentation",
    "published_active": "documentation",
    "source": "documentation",
    "moe_layers": "the stack of --spec (test_arguments)",
    "moe_use_norm_before_up_proj": "no option of 0.19; tests/layers/test_latent_norm.py",
}
#: What all models of the family share.
FAMILY = {
    "activation_func": "squared_relu",
    "gated_linear_unit": False,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
FAMILY_MOE = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_num_groups": None,
    "moe_expert_capacity_factor": None,
    "moe_input_jitter_eps": None,
    "moe_shared_expert_overlap": False,
    "moe_z_loss_coeff": None,
}


def test_mapping_covers_every_field() -> None:
    fields = {field.name for field in dataclasses.fields(Nemotron3Config)}
    assert set(MAPPING) | set(NOT_A_TRANSFORMER_FIELD) == fields
    assert not set(MAPPING) & set(NOT_A_TRANSFORMER_FIELD)


def test_transformer_config_equals_ours(parsed: list[dict[str, Any]]) -> None:
    wrong = []
    for answer in accepted(parsed):
        config, theirs = answer["config_in"], answer["config"]
        expected = {name: value(config) for rows in MAPPING.values() for name, value in rows}
        expected |= FAMILY | (FAMILY_MOE if config.is_moe else {})
        wrong += [
            f"{label(answer)}: {name} is {theirs[name]!r}, not {value!r}"
            for name, value in expected.items()
            if theirs[name] != value
        ]
    assert not wrong, "\n".join(wrong[:20])


def test_parallelism(parsed: list[dict[str, Any]]) -> None:
    for answer in accepted(parsed):
        layout, theirs, args = answer["layout"], answer["config"], answer["args"]
        assert theirs["tensor_model_parallel_size"] == layout.tp, label(answer)
        assert theirs["pipeline_model_parallel_size"] == layout.pp
        assert theirs["virtual_pipeline_model_parallel_size"] == (layout.vpp if layout.vpp > 1 else None)
        assert theirs["context_parallel_size"] == layout.cp
        assert theirs["sequence_parallel"] == layout.sequence_parallel
        assert args["data_parallel_size"] == layout.dp
        if answer["config_in"].is_moe:
            assert theirs["expert_model_parallel_size"] == layout.ep
            assert theirs["expert_tensor_parallel_size"] == layout.etp
        assert args["use_distributed_optimizer"]
        assert args["overlap_param_gather"] == args["overlap_grad_reduce"] == (answer["backend"] != "torch")
        # The microbatches Megatron derives exist.
        if args["global_batch_size"]:
            assert args["global_batch_size"] % (args["micro_batch_size"] * layout.dp) == 0


def test_precision(parsed: list[dict[str, Any]]) -> None:
    dtypes = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}
    for answer in accepted(parsed):
        config, theirs, precision = answer["config_in"], answer["config"], answer["precision"]
        assert theirs["params_dtype"] == dtypes.get(precision, "torch.bfloat16"), label(answer)
        emulated = (precision, answer["backend"]) == ("nvfp4", "torch")
        assert theirs["fp4"] == ("e2m1" if precision == "nvfp4" and not emulated else None)
        fmt = FORMATS.get(precision)
        assert theirs["fp8"] == (fmt.elements if fmt and fmt.kind == "fp8" else None)
        assert (theirs["fp4_param"], theirs["fp8_param"]) == (False, False)
        kept = bf16_layers(config, precision)
        assert theirs["first_last_layers_bf16"] == bool(fmt and fmt.bf16_layers)
        padded = fmt is not None and config.is_moe and not emulated
        assert theirs["moe_router_padding_for_quantization"] == padded
        if theirs["first_last_layers_bf16"]:
            assert theirs["num_layers_at_start_in_bf16"] == kept.start
            assert theirs["num_layers_at_end_in_bf16"] == kept.end
        if fmt and fmt.kind == "fp8":
            assert theirs["fp8_recipe"] == fmt.recipe
        if precision == "fp8-delayed":
            assert (theirs["fp8_amax_history_len"], theirs["fp8_amax_compute_algo"]) == (1024, "max")
        # The precision file reached the config.
        assert (theirs["quant_recipe"] is not None) == (precision == "nvfp4")


def test_arguments(parsed: list[dict[str, Any]]) -> None:
    """What is no field of TransformerConfig: the pattern, the spec, the schedule, the embedding."""
    for answer in accepted(parsed):
        config, layout, args = answer["config_in"], answer["layout"], answer["args"]
        seq_length = answer["schedule"].seq_length or config.seq_length
        assert args["hybrid_layer_pattern"] == cut_pattern(config, layout, seq_length), label(answer)
        assert args["hybrid_layer_pattern"].replace("|", "") == config.full_pattern
        spec = {"auto": "stack", "te": "te_stack", "torch": "torch_stack"}[answer["backend"]]
        own = config.name.replace("-", "_") + "_" if config.moe_layers else ""
        assert args["spec"] == ["megatron_nemotron3.specs", f"nemotron3_{own}{spec}_spec"]
        assert args["seq_length"] == args["max_position_embeddings"] == seq_length
        assert args["position_embedding_type"] == "none"
        assert args["untie_embeddings_and_output_weights"] is True
        assert args["create_attention_mask_in_dataloader"] is False
        schedule = answer["schedule"]
        for field in dataclasses.fields(TrainingSchedule):
            value = getattr(schedule, field.name)
            if value is not None and field.name not in ("seq_length", "save_interval"):
                if field.name.startswith("lr_") and field.name.endswith("style") and schedule.lr is None:
                    continue  # no schedule, no style
                assert args[field.name] == value, f"{label(answer)}: {field.name}"


def test_vocabulary_is_not_padded(parsed: list[dict[str, Any]]) -> None:
    """Not even where TP divides it but 128 * TP does not: then the divisor is lowered."""
    for answer in accepted(parsed):
        if answer["config_in"] == ODD:
            continue
        assert answer["padded_vocab_size"] == answer["config_in"].vocab_size, label(answer)


def test_vocabulary_that_tp_does_not_divide(parsed: list[dict[str, Any]]) -> None:
    sizes = {a["layout"].tp: a["padded_vocab_size"] for a in accepted(parsed) if a["config_in"] == ODD}
    assert sizes == {1: 1001, 2: 1024}
    assert [v.rule for v in check(Launch.of(ODD, ParallelLayout(tp=2)))] == ["vocabulary-tp"]
    assert check(Launch.of(EVEN, ParallelLayout(tp=2))) == []
