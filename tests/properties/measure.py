"""What Megatron makes of runs that the rules refuse, as a sentence with the number."""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_nemotron3.models import count
from megatron_nemotron3.precision.settings import Logging, logging_precision
from megatron_nemotron3.proof.certify.ranks import run_distributed
from tests.properties import step
from tests.properties.step import Case, Outcome, Refusal

# -- what is pretended to be there ---------------------------------------------------------------------------


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """Nothing is pretended."""
    yield


@contextlib.contextmanager
def transformer_engine() -> Iterator[None]:
    """Transformer Engine answers when asked for its version; none of its code exists."""
    from megatron.core.transformer import transformer_config
    from megatron.training import arguments

    with contextlib.ExitStack() as stack:
        for module in (arguments, transformer_config):
            stack.enter_context(mock.patch.object(module, "is_te_min_version", lambda *_, **__: True))
        stack.enter_context(mock.patch.object(arguments, "get_device_arch_version", lambda: 10))
        yield


@contextlib.contextmanager
def yaml_file() -> Iterator[None]:
    """A run.yaml lies in the working directory."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("run.yaml").write_text("language_model: {num_layers: 4}\nmodel_parallel: {}\n")
        yield


@contextlib.contextmanager
def mamba_ssm() -> Iterator[None]:
    """Upstream's mixer is constructed in the place of ours, as if mamba-ssm were installed."""
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    ours = importlib.import_module("megatron_nemotron3.layers.mamba").Mamba2Mixer
    with (
        mock.patch.object(ours, "__init__", mixer.MambaMixer.__init__),
        mock.patch.object(mixer, "HAVE_MAMBA_SSM", True),
        mock.patch.object(mixer, "HAVE_EINOPS", True),
    ):
        yield


@contextlib.contextmanager
def mamba_ssm_and_transformer_engine() -> Iterator[None]:
    """Both."""
    with mamba_ssm(), transformer_engine():
        yield


@contextlib.contextmanager
def upstream_experts() -> Iterator[None]:
    """The experts' linears check widths as upstream's column-parallel linear does, in the place of ours."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    ours = importlib.import_module("megatron_nemotron3.layers.experts").GroupedLinear

    def construct(self: Any, num_gemms: int, inputs: int, outputs: int, **options: Any) -> None:
        names = ("config", "init_method", "bias", "skip_bias_add", "is_expert", "tp_comm_buffer_name")
        ColumnParallelLinear(
            inputs,
            outputs,
            tp_group=options["pg_collection"].expt_tp,
            **{name: options[name] for name in names if name in options},
        )

    with mock.patch.object(ours, "__init__", construct):
        yield


@contextlib.contextmanager
def upstream_moe() -> Iterator[None]:
    """Upstream's MoE layer is constructed and run in the place of ours, on a latent projection of ours."""
    from megatron.core.transformer.moe import moe_layer

    ours = importlib.import_module("megatron_nemotron3.layers.latent_moe").LatentMoELayer
    linear = importlib.import_module("megatron_nemotron3.layers.linear").DuplicatedLinear

    def projection(inputs: int, outputs: int, *, config: Any, init_method: Any, name: Any, **_: Any) -> Any:
        return linear(inputs, outputs, config=config, init_method=init_method, name=name)

    with contextlib.ExitStack() as stack:
        for method in ("__init__", "shared_experts_compute", "postprocess"):
            stack.enter_context(mock.patch.object(ours, method, getattr(moe_layer.MoELayer, method)))
        stack.enter_context(mock.patch.object(moe_layer, "HAVE_TE", True))
        stack.enter_context(mock.patch.object(moe_layer, "TELinear", projection, create=True))
        yield


# -- on every rank -------------------------------------------------------------------------------------------


def attempts(cases: list[Case], pretend: list[Callable[[], Any]]) -> list[Any]:
    """What Megatron makes of each on this rank, the rules off: an `Outcome` or a `Refusal`."""
    found = []
    for case, context in zip(cases, pretend, strict=True):
        with step.rules_off(), context():
            found.append(step.attempt(case))
    return found


def arguments_of(case: Case, pretend: Callable[[], Any] = nothing) -> Any:
    """Megatron's validated arguments, the rules off."""
    with step.rules_off(), pretend():
        return step.parse(case.argv(), case.layout.world_size)


def outcome(case: Case, pretend: Callable[[], Any] = nothing) -> Outcome:
    """What one rank of the case's world ends with, the rules off."""
    result = run_distributed(attempts, case.layout.world_size, [case], [pretend])[-1][0]
    assert isinstance(result, Outcome), result
    return result


# -- the numbers ---------------------------------------------------------------------------------------------


def biases_of_routers(case: Case) -> str:
    """What is added to the logits in two forwards of a process, and of one that begins at a later step."""
    import torch
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        get_data_parallel_rng_tracker_name,
    )
    from megatron.core.transformer.moe.moe_utils import RandomSTEShared

    from tests.support.world import world_of_one

    deviation, logits, added = float(case.extra[1]), torch.zeros(1, 8), []
    with world_of_one():
        for _process in range(2):
            RandomSTEShared._cache.clear()
            added.append([RandomSTEShared.apply(logits, deviation, 1) for _forward in range(2)])
            with get_cuda_rng_tracker().fork(get_data_parallel_rng_tracker_name()):
                torch.rand(1)  # of a step
        RandomSTEShared._cache.clear()
    kept = all(first.equal(second) for first, second in added)
    other = not added[0][0].equal(added[1][0])
    return (
        f"two forwards of a process add {'one bias' if kept else 'two biases'}, and those of a process that "
        f"begins later {'another' if other else 'the same'}"
    )


def rows(case: Case) -> str:
    """Rows of the embedding."""
    made = outcome(case)
    assert made.parameters == count(case.config.but(vocab_size=made.vocabulary)).trainable
    return f"embedding and output layer have {made.vocabulary} rows, not {case.config.vocab_size}"


def elements(case: Case) -> str:
    """Weights of the model that gets built."""
    return f"{outcome(case).parameters} weights are built, {count(case.config).trainable} are meant"


def epsilons(case: Case) -> str:
    """Epsilons of the norms that get built."""
    return f"norms have the epsilons {' and '.join(run_distributed(_epsilons, 1, case)[0])}"


def _epsilons(case: Case) -> Any:
    with step.rules_off():
        return step.attempt(
            case, lambda model, _: sorted({str(m.eps) for m in model[0].modules() if hasattr(m, "eps")})
        )


def expert_groups(case: Case) -> str:
    """What happens to EP where there are no experts."""
    made = arguments_of(case)
    said = replace(case, extra=("--expert-model-parallel-size", str(case.layout.ep)))
    refusal = run_distributed(attempts, case.layout.world_size, [said], [nothing])[0][0]
    assert isinstance(refusal, Refusal), refusal
    return f"without the option EP is {made.expert_model_parallel_size}; with it: {refusal.message}"


def empty_stage(case: Case) -> str:
    """A stage without layers: which weights its rank holds."""
    held = run_distributed(_held, case.layout.world_size, case)[0]
    return f"trains, with {' and '.join(str(n) for n in held)} weights of layers on the stages"


def _held(case: Case) -> Any:
    import torch

    def weights(chunks: list[Any], _: Any) -> list[int]:
        own = sum(p.numel() for chunk in chunks for n, p in chunk.named_parameters() if "decoder.layers" in n)
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, own)
        return ranks

    empty = "|".join([case.config.pattern, *[""] * (case.layout.stages - 1)])
    with step.rules_off(), mock.patch("megatron_nemotron3.launch.flags.cut_pattern", lambda *_: empty):
        return step.attempt(case, weights)


def sequence_parallel(case: Case) -> str:
    """What becomes of the switch."""
    return f"sequence_parallel becomes {arguments_of(case).sequence_parallel}"


def decay_style(case: Case) -> str:
    """The schedule that is run."""
    return f"the learning rate decays {arguments_of(case).lr_decay_style}, not {case.schedule.lr_decay_style}"


def exempt_modules(case: Case) -> str:
    """Which modules are kept out of NVFP4."""
    from megatron.training.argument_utils import core_transformer_config_from_args

    with transformer_engine():
        config = core_transformer_config_from_args(arguments_of(case))
    return f"fp4={config.fp4}, quant_recipe={config.quant_recipe}: no module is exempt"


def emulated(case: Case) -> str:
    """What the flags ask of linears that do not emulate."""
    import torch
    from megatron.training.argument_utils import core_transformer_config_from_args

    with _precision_file(case) as case:
        config = core_transformer_config_from_args(arguments_of(case))
    assert config.fp8 is None and config.quant_recipe is not None and config.params_dtype == torch.bfloat16
    return f"fp4={config.fp4} and TE's linears where they are: everything is BF16"


#: Everything in NVFP4.
_PRECISION_FILE = """\
configs:
  fp4:
    transformer_engine_config_type: TEQuantizationParams
    training_recipe: {fp4_quantization_recipe: nvfp4}
matchers:
  all: {config: fp4, type: glob, pattern: "*", enabled: true}
"""


def with_precision_file(case: Case) -> str:
    """The loss with and without the file."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(_PRECISION_FILE)
        file.flush()
        words = ((), ("--te-precision-config-file", file.name))
        # Our stack refuses the file in a plain run that is not measured.
        with tempfile.TemporaryDirectory() as folder, logging_precision(Logging(1000, folder)):
            losses = [outcome(replace(case, extra=extra)).loss for extra in words]
    assert losses[0] == losses[1]
    return "the loss is the same to the bit"


def precision_file_in_flags(case: Case) -> str:
    """Whether Megatron hears of the file."""
    with step.rules_off():
        words = case.argv()
    return f"the file is {'' if '--te-precision-config-file' in words else 'not '}among the flags"


def bf16_layers(case: Case) -> str:
    """Layers left for NVFP4."""
    from megatron.core.fp8_utils import is_first_last_bf16_layer
    from megatron.training.argument_utils import core_transformer_config_from_args

    with transformer_engine(), _precision_file(case) as case:
        config = core_transformer_config_from_args(arguments_of(case))
    layers = range(config.num_layers)
    kept = sum(is_first_last_bf16_layer(config, layer) for layer in layers)
    return f"{kept} of {len(layers)} layers are BF16"


@contextlib.contextmanager
def _precision_file(case: Case) -> Iterator[Case]:
    """The case with a file that exists."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(_PRECISION_FILE)
        file.flush()
        yield replace(case, te_precision_config_file=file.name)


#: A value for each option of GPT models.
_GPT_VALUES = {
    "--num-layers": ("4",),
    "--hybrid-override-pattern": ("M*E-",),
    "--mtp-hybrid-override-pattern": ("*E",),
    "--num-layers-per-virtual-pipeline-stage": ("1",),
    "--num-virtual-stages-per-pipeline-rank": ("2",),
    "--pipeline-model-parallel-layout": ("Et|L",),
    "--account-for-embedding-in-pipeline-split": (),
    "--account-for-loss-in-pipeline-split": (),
    "--decoder-first-pipeline-num-layers": ("1",),
    "--decoder-last-pipeline-num-layers": ("1",),
}


def gpt_options(case: Case) -> str:
    """How many of these options Megatron refuses; the others must leave the model as it is."""
    cases = [replace(case, extra=(name, *values)) for name, values in _GPT_VALUES.items()]
    plain, *made = run_distributed(
        attempts, case.layout.world_size, [replace(case, extra=()), *cases], [nothing] * (len(cases) + 1)
    )[-1]
    ignored = [name for name, result in zip(_GPT_VALUES, made, strict=True) if result == plain]
    refused = [name for name, result in zip(_GPT_VALUES, made, strict=True) if isinstance(result, Refusal)]
    assert len(ignored) + len(refused) == len(made), made
    return f"refuses {len(refused)} of {len(made)} such options, ignores {', '.join(ignored)}"


def rolled_documents(case: Case) -> str:
    """Labels that MTP's shift gets wrong, of all: two documents of 5 and 11 tokens."""
    wrong, total = zip(*run_distributed(_rolled, case.layout.world_size, case), strict=True)
    return f"MTP's shift to the next token is wrong for {sum(wrong)} of {sum(total)} tokens"


def _rolled(case: Case) -> tuple[int, int]:
    import torch
    from megatron.core.transformer.multi_token_prediction import roll_tensor
    from megatron.core.utils import get_batch_on_this_cp_rank

    def here(whole: Any) -> Any:
        """As the stock script cuts a row under this option."""
        batch = {"tokens": whole.clone(), "cu_seqlens": torch.tensor([[0, 5, 16]])}
        cut = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=group, use_per_sequence_balancing=True
        )
        return cut["tokens"]

    group = torch.distributed.group.WORLD
    tokens = torch.arange(1, 17)[None]
    borders = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 5, 16]), qkv_format="thd")
    rolled, _ = roll_tensor(here(tokens), shifts=-1, dims=-1, cp_group=group, packed_seq_params=borders)
    wanted = here(torch.tensor([[2, 3, 4, 5, 0, *range(7, 17), 0]]))
    return int((rolled != wanted).sum()), wanted.numel()


def packed_batch(case: Case) -> str:
    """What cutting the batch of `--sft` ends in."""
    return run_distributed(_cut_packed, case.layout.world_size)[0]


def _cut_packed() -> str:
    import torch
    from megatron.core.utils import get_batch_on_this_cp_rank

    batch = {
        "tokens": torch.arange(8)[None],
        "cu_seqlens": torch.tensor([[0, 4, 8]]),
        "cu_seqlens_padded": None,
    }
    try:
        get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=torch.distributed.group.WORLD)
    except (AttributeError, NameError) as error:
        return f"cutting the batch: {type(error).__name__}: {error}"
    return "the batch is cut"


def bf16_gradient(case: Case) -> str:
    """How far BF16 accumulation moves MTP's share of the output layer's gradient."""
    exact, rounded = run_distributed(_mtp_gradients, 1, replace(case, precision="bf16"))[0]
    error = float((rounded - exact).norm() / exact.norm())
    assert error > 0.01, error
    return "MTP's share of the output layer's gradient is off by more than 1 %"


def _mtp_gradients(case: Case) -> list[Any]:
    """MTP's share of the output layer's gradient, accumulated in FP32 and in BF16."""
    return [
        _output_gradient(case, precise, True) - _output_gradient(case, precise, False)
        for precise in (True, False)
    ]


def _output_gradient(case: Case, precise: bool, mtp: bool) -> Any:
    def gradient(chunks: list[Any], _: Any) -> Any:
        weight = step.loop.unwrap_model(chunks[-1]).output_layer.weight
        return weight.main_grad.double().clone()

    config = case.config if mtp else case.config.but(mtp_loss_scaling_factor=0.0)
    with step.rules_off():
        return step.train_step(replace(case, config=config, extra=() if precise else case.extra), gradient)


def checkpoint_arguments(case: Case) -> str:
    """The spec and the hidden size after another model's checkpoint was asked."""
    from megatron.training import checkpointing

    args = arguments_of(replace(case, extra=()))
    args.load = "anywhere"
    before = args.spec
    other = SimpleNamespace(**{**vars(args), "spec": ["another.specs", "stack"], "moe_latent_size": 3})
    state = {"args": other, "checkpoint_version": 3.0, "iteration": 1}
    found = state, "", False, None
    with (
        mock.patch.object(checkpointing, "_load_base_checkpoint", lambda *_, **__: found),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        checkpointing.load_args_from_checkpoint(args)
    return f"--spec {' '.join(before)} becomes {' '.join(args.spec)}"


def router_slots(case: Case) -> str:
    """Whether each depth's slot of the router's metric has a value."""
    filled = run_distributed(_slots, 1, case)[0]
    return "slots with a value, depths " + ", ".join(
        f"{i + 1}: {'yes' if v else 'no'}" for i, v in enumerate(filled)
    )


def _slots(case: Case) -> list[bool]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    def slots(_: list[Any], args: Any) -> list[bool]:
        values = get_moe_metrics_tracker().metrics["seq_load_balancing_loss"].values
        return [bool(v) for v in values[args.num_layers :]]

    with step.rules_off():
        return step.train_step(case, slots)  # type: ignore[no-any-return]
