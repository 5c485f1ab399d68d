"""`--gpu`: what Megatron makes of our options equals what Megatron-Bridge's recipes set, field by field.

The oracle is tests/golden/bridge_performance.json, which was read off Bridge's
recipe functions. Every difference is in `bridge_differences.DIFFERENCES`, with its reason.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3 import cli, models
from megatron_nemotron3.launch import Launch, TrainingSchedule, check, flags, parser, performance, to_argv
from megatron_nemotron3.launch.performance import (
    GPUS,
    HARDWARE,
    ROWS,
    RUNS,
    PerformanceRow,
    Tuned,
    published,
    recipe_name,
    relative,
)
from megatron_nemotron3.launch.plan.hardware import GPUS as PLANNED
from megatron_nemotron3.precision import yaml_file
from tests.launch.megatron_parser import ask, plain

core = pytest.importorskip("megatron.core")
pytest.importorskip("megatron.training")

from tests.launch.bridge_differences import DIFFERENCES, ONLY_ON_19, Case, Key, differing  # noqa: E402

GOLDEN = Path(__file__).parents[1] / "golden" / "bridge_performance.json"


def recorded() -> dict[str, dict[str, Any]]:
    """The recipes with all their settings, by name."""
    data = json.loads(GOLDEN.read_text())
    for recipe in data["recipes"].values():
        common = data["common"][recipe["model"]]
        recipe["settings"] = {part: common[part] | values for part, values in recipe["settings"].items()}
    found: dict[str, dict[str, Any]] = data["recipes"]
    return found | merged_since(found)


def merged_since(recorded: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Recipes merged after the recording, as Bridge's text at 130e14d4c8da makes them of recorded ones."""

    def of(name: str, environment: dict[str, str], **transformer: Any) -> dict[str, Any]:
        recipe = copy.deepcopy(recorded[name])
        recipe["settings"]["transformer"] |= transformer
        recipe["settings"]["environment"] |= environment
        return recipe

    ultra = "nemotron_3_ultra_pretrain_256gpu_{}_fp8mx_config"  # pull request 5721
    norms = {f"NVTE_NORM_{way}_USE_CUDNN": "1" for way in ("FWD", "BWD")}
    found = {ultra.format("vr200"): of(ultra.format("gb300"), norms)}
    heavy, light = ["moe_act", "moe", "layernorm", "core_attn"], ["moe_act", "layernorm"]
    for precision, modules in {"bf16": heavy, "fp8mx": heavy, "nvfp4": light}.items():  # 6043
        name = f"nemotron_3_super_pretrain_64gpu_b200_{precision}_config"
        recompute = {"recompute_granularity": "selective", "recompute_modules": modules}
        found[name] = of(name, {}, expert_model_parallel_size=8, **recompute)
    mtp: dict[str, Any] = {"mtp_num_layers": 2, "mtp_hybrid_override_pattern": "*E"}
    mtp |= {"mtp_use_repeated_layer": True, "mtp_loss_scaling_factor": 0.3}
    fused = ("use_transformer_engine_op_fuser", "fp8_dot_product_attention", "moe_use_grouped_tensor")
    for gpu, precision in itertools.product(("b200", "b300"), ("bf16", "fp8mx", "nvfp4")):  # 5793
        name = f"nemotron_3_{{}}_pretrain_8gpu_{gpu}_{precision}_config"
        mxfp8 = precision == "fp8mx"
        kernel = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1"} if mxfp8 else {}
        transformer = mtp | (dict.fromkeys(fused, True) if mxfp8 else {})
        found[name.format("5_lightning")] = of(name.format("nano"), kernel, **transformer)
    return found


def launch(key: Key, file: str = "FILE", **settings: Any) -> Launch:
    """A published set as its recipe runs it."""
    model, gpu, precision = key
    run = RUNS[key]
    batch = {name: getattr(run, name) for name in ("micro_batch_size", "global_batch_size", "seq_length")}
    return Launch.of(
        model,
        run.layout,
        gpu=gpu,
        precision=precision,
        backend="te",
        te_precision_config_file=file if precision == "nvfp4" else None,
        schedule=TrainingSchedule(**batch),
        megatron_core=core.__version__,
        **settings,
    )


def of(key: Key) -> Tuned:
    found = launch(key).tuned
    assert found is not None
    return found


def defaults() -> dict[str, dict[str, Any]]:
    """Defaults of Megatron's dataclasses, by part."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    def of_class(kind: Any) -> dict[str, Any]:
        found = {}
        for field in dataclasses.fields(kind):
            if field.default_factory is not dataclasses.MISSING:
                found[field.name] = plain(field.default_factory())
            elif field.default is not dataclasses.MISSING:
                found[field.name] = plain(field.default)
        return found

    classes = {
        "transformer": TransformerConfig,
        "ddp": DistributedDataParallelConfig,
        "optimizer": OptimizerConfig,
    }
    return {part: of_class(kind) for part, kind in classes.items()}


#: Part of the recording -> its fields that are arguments of Megatron-LM, with their names there.
ARGUMENTS = {
    "train": {
        "manual_gc": "manual_gc",
        "manual_gc_interval": "manual_gc_interval",
        "te_rng_tracker": "te_rng_tracker",
    },
    "checkpoint": {
        "ckpt_format": "ckpt_format",
        "async_save": "async_save",
        "fully_parallel_save": "ckpt_fully_parallel_save",
        "ckpt_assume_constant_structure": "ckpt_assume_constant_structure",
    },
    "distributed": {
        "high_priority_stream_groups": "high_priority_stream_groups",
        "distributed_timeout_minutes": "distributed_timeout_minutes",
    },
}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Every published set, as recorded and as Megatron parses our options."""
    folder, jobs = tmp_path_factory.mktemp("precision"), []
    for key in RUNS:
        file = folder / f"{key[0]}.yaml"
        if key[2] == "nvfp4" and not file.exists():
            file.write_text(yaml_file.render(models.get(key[0])))
        asked = launch(key, str(file))
        jobs.append(
            {
                "argv": to_argv(flags(asked)),
                "world_size": RUNS[key].gpus,
                "patched": True,
                "training": True,
                "environment": dict(of(key).environment),
                "capability": asked.capability or (10, 0),
            }
        )
    found, recipes, base = [], recorded(), defaults()
    for key, answer in zip(RUNS, ask(jobs), strict=True):
        assert "error" not in answer, f"{key}: {answer['error']}"
        settings = recipes[recipe_name(key)]["settings"]
        ours = {"transformer": answer["config"], "ddp": answer["ddp"], "optimizer": answer["optimizer"]}
        ours |= {
            part: {field: answer["args"][name] for field, name in names.items()}
            for part, names in ARGUMENTS.items()
        }
        ours["environment"] = dict(of(key).environment)
        theirs = {part: base.get(part, {}) | values for part, values in settings.items()}
        found.append(Case(key, theirs, ours))
    return found


def test_megatron_makes_of_our_options_what_the_recipes_set(cases: list[Case]) -> None:
    unexplained, used = [], set()
    for case in cases:
        for part, field, theirs, ours in differing(case):
            for difference in DIFFERENCES:
                named = difference.part == part and field in difference.fields.split()
                if named and difference.holds(case, theirs, ours):
                    used.add((part, field))
                    break
            else:
                unexplained.append(f"{'/'.join(case.key)}: {part}.{field}: recipe {theirs!r}, ours {ours!r}")
    assert not unexplained, f"{len(unexplained)}\n" + "\n".join(unexplained[:20])
    listed = {(d.part, field) for d in DIFFERENCES for field in d.fields.split()}
    stale = listed - used - (ONLY_ON_19 if core.__version__ >= "0.20" else set())
    assert stale == set(), "no set differs in these any more"


def test_every_recorded_recipe_has_a_set() -> None:
    """But a second form of a set: on Megatron-FSDP, and on four times the GPUs."""
    others = {name for name in recorded() if name.endswith("_fsdp_config") or "_256gpu_" in name}
    ultra = {recipe_name(key) for key in RUNS if key[0] == "ultra"}
    assert {recipe_name(key) for key in RUNS} == (set(recorded()) - others) | ultra & set(recorded())
    for key, run in RUNS.items():
        recipe = recorded()[recipe_name(key)]
        train, transformer = recipe["settings"]["train"], recipe["settings"]["transformer"]
        batch = (train["micro_batch_size"], train["global_batch_size"], train["seq_length"])
        assert batch == (run.micro_batch_size, run.global_batch_size, run.seq_length), key
        assert run.gpus == run.layout.world_size, key
        sizes = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "cp": "context"}
        for size, name in sizes.items():
            assert getattr(run.layout, size) == transformer.get(f"{name}_parallel_size", 1), key


def test_hardware_is_plans() -> None:
    for name in set(HARDWARE) & set(PLANNED):
        assert HARDWARE[name].nvlink_domain == PLANNED[name].nvlink_domain
        assert HARDWARE[name].capability == PLANNED[name].capability
    assert set(PLANNED) <= set(GPUS)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("model", models.names())
def test_every_model_has_options_on_every_gpu(model: str, gpu: str) -> None:
    """And says what it took where none were published."""
    for precision in ("bf16", "mxfp8", "nvfp4"):
        found = Launch.of(model, gpu=gpu, precision=precision, backend="te").tuned
        assert found is not None
        assert "--attention-backend" in found.options or not models.get(model).is_moe
        assert (not found.instead) == ((model, gpu, precision) in RUNS)
        assert not found.instead or (f"for {model} on {gpu} in {precision}" in found.notes[0])
        # The op fuser and what rests on it are published for MXFP8 alone.
        if precision != "mxfp8":
            assert "--use-transformer-engine-op-fuser" not in found.options
            assert "fused_group_mlp" not in found.options.get("--offload-modules", ())


def test_what_is_taken_instead() -> None:
    def instead(model: str, gpu: str, precision: str = "bf16") -> str:
        found = Launch.of(model, gpu=gpu, precision=precision, backend="te").tuned
        assert found is not None
        return found.recipe

    assert relative(models.get("puzzle")) == "super"
    assert relative(models.tiny(models.ULTRA)) == "super"
    assert relative(models.get("nano-4b")) == "nemotron-h-56b"
    assert instead("puzzle", "b200") == "nemotron_3_super_pretrain_64gpu_b200_bf16_config"
    assert instead("super", "h200") == "nemotron_3_super_pretrain_64gpu_h100_bf16_config"
    assert instead("ultra", "gb200", "nvfp4") == "nemotron_3_ultra_pretrain_256gpu_gb200_fp8mx_config"
    assert instead("lightning", "vr200") == "nemotron_3_5_lightning_pretrain_8gpu_gb300_bf16_config"
    assert published(models.SUPER, "GB200", "bf16") == RUNS["super", "gb200", "bf16"]
    assert published(models.get("puzzle"), "gb200", "bf16") is None


def environment(model: str, gpu: str, **sizes: int) -> dict[str, str]:
    found = Launch.of(model, gpu=gpu, backend="te", **sizes).tuned
    assert found is not None
    return dict(found.environment)


def test_variables_follow_the_layout() -> None:
    ranks = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    assert environment("nano", "h100", ep=4, dp=4)[ranks] == "4"
    assert environment("super", "h100", ep=12, dp=12)[ranks] == "6"  # of 8, and divides 12
    assert environment("super", "gb200", ep=128, dp=128)[ranks] == "64"
    assert ranks not in environment("nemotron-h-56b", "gb200")
    connections = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert environment("super", "h100", tp=2)[connections] == "1"  # Megatron refuses another before Blackwell
    assert environment("super", "h100", pp=2)[connections] == "32"
    assert environment("super", "gb200", tp=2)[connections] == "32"


def test_sharding_follows_the_number_of_gpus() -> None:
    def options(dp: int) -> dict[str, tuple[str, ...]]:
        found = Launch.of("ultra", gpu="gb200", precision="mxfp8", backend="te", ep=64, dp=dp).tuned
        assert found is not None
        return dict(found.options)

    assert options(512)["--num-distributed-optimizer-instances"] == ("8",)
    assert options(512)["--outer-dp-sharding-strategy"] == ("optim",)
    assert "--outer-dp-sharding-strategy" not in options(64)  # one domain: nothing to replicate


def test_words_of_the_users_own_win() -> None:
    launched = launch(("super", "gb200", "bf16"), extra=("--moe-flex-dispatcher-num-sms", "24"))
    words = [str(flag) for flag in flags(launched)]
    assert "--moe-flex-dispatcher-num-sms 24" in words and "--moe-flex-dispatcher-num-sms 32" not in words
    assert launched.option("--moe-flex-dispatcher-num-sms", "") == "24"
    assert launched.option("--cuda-graph-impl", "none") == "transformer_engine"  # what rules read


def test_options_can_be_left_out() -> None:
    key = ("super", "gb200", "bf16")
    left = launch(key, without=("grad-reduce-in-bf16",))
    assert {f.name for f in flags(launch(key))} - {f.name for f in flags(left)} == {"--grad-reduce-in-bf16"}
    with pytest.raises(ValueError, match="--foo is not an option of --gpu gb200: it has --att"):
        launch(key, without=("foo",))
    with pytest.raises(ValueError, match="give gpu"):
        Launch.of("super", without=("manual-gc",))


def test_another_gpu_has_its_own_capability() -> None:
    """A copy of a launch takes nothing from the GPU before; a capability that was given stays."""
    hopper = Launch.of("super", gpu="h100", backend="te")
    assert hopper.capability == (9, 0)
    assert dataclasses.replace(hopper, gpu="gb300").capability == HARDWARE["gb300"].capability == (10, 3)
    assert dataclasses.replace(hopper, gpu=None).capability is None
    given = Launch.of("super", gpu="h100", backend="te", compute_capability=(10, 0))
    assert dataclasses.replace(given, gpu="gb300").capability == (10, 0)
    fp4 = dataclasses.replace(hopper, precision="nvfp4", gpu="gb200", allow_plain_nvfp4=True)
    assert not [v for v in check(fp4) if v.rule == "quantized-hardware"]


def test_options_of_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        performance, "ROWS", (*ROWS, PerformanceRow(("super",), options={"--moe-use-grouped-tensor": ()}))
    )
    # Its answers are kept: not those of other tests here, and not those with this row afterwards.
    monkeypatch.setattr(performance, "_tuned", performance._tuned.__wrapped__)
    old = Launch.of("super", gpu="gb200", backend="te", megatron_core="0.19")
    new = Launch.of("super", gpu="gb200", backend="te", megatron_core="main")
    assert old.tuned and new.tuned
    assert "--moe-use-grouped-tensor" not in old.tuned.options
    assert "published, but not passed: --moe-use-grouped-tensor (new in 0.20)" in " ".join(old.tuned.notes)
    assert new.tuned.options["--moe-use-grouped-tensor"] == () and not new.tuned.unknown


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    """Options and variables on stdout, what was published on stderr, the published layout by default."""
    assert cli.main(["flags", "super", "--gpu", "GB200"]) == 0
    out, err = capfd.readouterr()
    assert "--tensor-model-parallel-size 2\n" in out and "--transformer-impl transformer_engine\n" in out
    assert "# environment\n" in out and "\nUSE_MNNVL=1\n" in out
    assert "published with TP2 EP64 DP32 SP on 64 GPUs" in err and "this layout: TP2 EP64 DP32 SP" in err
    assert cli.main(["flags", "super", "--gpu", "gb200", "--dp", "64", "--shell"]) == 0
    out, err = capfd.readouterr()
    assert "this layout: TP2 EP64 DP64 SP" in err and "USE_MNNVL" not in out
    assert cli.main(["flags", "super", "--gpu", "gb200", "--tp", "4"]) == 0
    assert "this layout: TP4 SP" in capfd.readouterr().err
    assert cli.main(["flags", "puzzle", "--gpu", "b300"]) == 0
    assert (
        "nothing is published for puzzle on b300 in bf16; taken from super on b300" in capfd.readouterr().err
    )
    assert cli.main(["flags", "super", "--gpu", "h100", "--backend", "torch"]) == 2
    assert "use backend te, or leave gpu out" in capfd.readouterr().err
    assert cli.main(["flags", "super", "--gpu", "gb200", "--precision", "mxfp8"]) == 0
    assert "no option of Megatron sets it: fp8_dot_product_attention" in capfd.readouterr().err
    assert cli.main(["flags", "super", "--environment"]) == 2
    with pytest.raises(SystemExit, match="2"):
        cli.main(["flags", "super", "--gpu", "a100"])
    assert "choose from h100, h200, b200" in capfd.readouterr().err


def test_variables_in_a_shell(capfd: pytest.CaptureFixture[str]) -> None:
    """What is set already keeps its value."""
    assert cli.main(["flags", "ultra", "--gpu", "gb200", "--precision", "mxfp8", "--environment"]) == 0
    script = capfd.readouterr().out + 'echo "$NVLINK_DOMAIN_SIZE $PYTORCH_CUDA_ALLOC_CONF"'
    done = subprocess.run(
        ["bash", "-euc", script],
        env={"NVLINK_DOMAIN_SIZE": "36", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "36 expandable_segments:True,graph_capture_record_stream_reuse:True\n"


def test_what_a_run_gives_up_is_said() -> None:
    assert "--without exp-avg-dtype" in " ".join(of(("lightning", "h100", "bf16")).notes)
    assert "1.1 times" in " ".join(of(("super", "h100", "bf16")).notes)
    assert of(("super", "h100", "bf16")).notes != of(("nano", "b200", "bf16")).notes == []


def test_what_was_published_since_is_said() -> None:
    """0.7.0 and 0.7.1 changed these sets; what could be read of them is named, and no option is unknown."""

    def notes(*key: str) -> str:
        return " ".join(of((key[0], key[1], key[2])).notes)

    assert "0.7.0 has GTP" in notes("ultra", "gb300", "mxfp8")
    assert "GTP" not in notes("ultra", "vr200", "mxfp8")  # published with FSDP
    assert "full_iteration" in notes("super", "gb200", "nvfp4")
    assert "full_iteration" not in notes("super", "gb200", "bf16")
    assert "with EP 16" in notes("super", "gb200", "nvfp4")
    graphs = "--moe-paged-stash-buffer-size-factor-cuda 1.2 --moe-paged-stash-buffer-size-factor-cpu 1.0"
    assert graphs in notes("super", "gb300", "mxfp8") and "drops tokens" in notes("super", "vr200", "nvfp4")
    named = {word.strip("(),;") for key in RUNS for word in notes(*key).split() if word.startswith("--")}
    assert not parser.unknown(named - {"--gpu", "--without"}, "0.20")
    assert all(
        "ncclep" in notes(*key) for key in RUNS if key[0] in ("lightning", "super") and key[1] != "h100"
    )
    assert "ncclep" in notes("ultra", "vr200", "mxfp8") and "ncclep" not in notes("nano", "b300", "bf16")
    assert of(("ultra", "vr200", "mxfp8")).environment["NVTE_NORM_FWD_USE_CUDNN"] == "1"
