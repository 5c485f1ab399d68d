"""Measure the importance of a model's parts on text: hooks on a built model, in any layout.

Each rank adds up what its part of each layer computes for its tokens. In the end every sum is reduced over
all ranks of the model: each pair of a token and a channel is counted on one rank only.

    tensor parallel     channels of a rank, all tokens; tokens of a rank behind norms and latent projections
    expert parallel     experts of a rank, the tokens of all ranks that were sent to them
    pipeline parallel   layers of a stage
    data, context       tokens of a rank
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from torch import Tensor

from megatron_nemotron3.checkpoints.convert.into_model import load_weights
from megatron_nemotron3.checkpoints.convert.opened import Checkpoint
from megatron_nemotron3.common.output import Bar
from megatron_nemotron3.cpu import cpu_mode
from megatron_nemotron3.launch import Launch
from megatron_nemotron3.layers.experts import GroupedExperts
from megatron_nemotron3.layers.functional import rms_norm
from megatron_nemotron3.layers.norm import norm_gain
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix, prefixes
from megatron_nemotron3.models.series import decoder_layers
from megatron_nemotron3.post_training.compress.scores import MEANS, Scores, statistics
from megatron_nemotron3.train.build import build


def measure(
    model: HybridModel | Sequence[HybridModel], config: Nemotron3Config, run: Callable[[], object]
) -> Scores:
    """Return the importance of all parts of a model during `run()`. Collective.

    Args:
        model: this rank's, or its chunks (virtual pipeline stages), without wrappers; with the layers of this
            package or TransformerEngine's.
        config: of the whole model.
        run: forward passes on calibration text, without gradients. MTP's layers are measured if it runs
            them, which Megatron's model does by itself.

    Raises:
        ValueError: a layer computed nothing.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    sums = _Sums(chunks, config)
    with _separate_experts(chunks), sums.collecting(), torch.no_grad():
        run()
    return sums.scores()


@contextmanager
def _separate_experts(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Let experts call their linears one after the other, so that hooks see what enters the second."""
    experts = [m for chunk in chunks for m in chunk.modules() if isinstance(m, GroupedExperts)]
    for one in experts:
        one.separate = True
    try:
        yield
    finally:
        for one in experts:
            one.separate = False


class _Sums:
    """The sums of this rank: by key, the part that it holds of an entry, and where this part begins."""

    def __init__(self, chunks: Sequence[HybridModel], config: Nemotron3Config) -> None:
        self.config = config
        summed = statistics(config)
        self.shapes = {key: (*shape, 2) if kind in MEANS else shape for key, _, kind, shape in summed}
        self.parts: dict[str, tuple[Tensor, tuple[int, ...]]] = {}
        self.device = next(chunks[0].parameters()).device
        groups, built = chunks[0].pg_collection, chunks[0].config
        self.tp, self.ep, self.expt_tp = groups.tp, groups.ep, groups.expt_tp
        #: Whether this rank counts tokens that tensor-parallel ranks share without sequence parallelism.
        self.counts_shared = built.sequence_parallel or self.tp.rank() == 0
        self.layers = list(_layers(chunks, config))

    @contextmanager
    def collecting(self) -> Iterator[None]:
        handles = [handle for prefix, layer in self.layers for handle in self._hooks(prefix, layer)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def scores(self) -> Scores:
        """Reduce the sums over all ranks, and turn them into scores."""
        values, tokens = {}, 0.0
        for key, prefix, kind, _ in statistics(self.config):
            whole = torch.zeros(self.shapes[key], dtype=torch.float64, device=self.device)
            if key in self.parts:
                part, start = self.parts[key]
                whole[tuple(slice(a, a + n) for a, n in zip(start, part.shape))] += part
            torch.distributed.all_reduce(whole)
            if kind == "distance":
                tokens = tokens or float(whole[1])
            if kind in MEANS:
                whole = whole[..., 0] / whole[..., 1].clamp(min=1)
            else:
                whole = (whole / max(tokens, 1.0)).sqrt()
            if kind in ("normed", "x", "heads", "experts") and not whole.any():
                raise ValueError(
                    f"{prefix.megatron}: it computed nothing during the measurement: run forward passes of "
                    "the whole model, MTP included"
                )
            values[key] = whole.float().cpu().numpy()
        return Scores(self.config, int(tokens), values)

    def _add(self, key: str, found: Tensor, start: tuple[int, ...]) -> None:
        if key in self.parts:
            self.parts[key][0].add_(found)
        else:
            self.parts[key] = (found.double(), start)

    def _hooks(self, prefix: Prefix, layer: Any) -> Iterator[Any]:
        name, one, part = prefix.megatron, prefix.config, prefix.part

        def split(kind: str, x: Tensor, width: int = 0) -> None:
            """Add channels [..., c / tp] of all tokens; `width` channels are a head."""
            found = _squares(x)
            found = found.unflatten(0, (-1, width)) if width else found
            begin = self.tp.rank() * found.shape[0]
            self._add(f"{name} {kind}", found, (begin, 0) if width else (begin,))

        def shared(kind: str, x: Tensor) -> None:
            """Add channels that every tensor-parallel rank has, [..., c]."""
            if self.counts_shared:
                self._add(f"{name} {kind}", _squares(x), (0,))

        if name.startswith("decoder."):
            yield layer.register_forward_hook(self._distance(f"{name} distance"), with_kwargs=True)
        inputs: Any = None
        if part == "M":
            inputs, inner = layer.mixer.in_proj, one.mamba_inner_size // self.tp.size()

            def x_of(_module: Any, _inputs: Any, output: Any) -> None:
                split("x", output[0][..., inner : 2 * inner], one.mamba_head_dim)

            yield inputs.register_forward_hook(x_of)
        elif part == "*":
            inputs = layer.self_attention.linear_qkv
            yield _before(layer.self_attention.linear_proj, lambda x: split("heads", x, one.kv_channels))
        elif part == "-":
            inputs = layer.mlp.linear_fc1
            yield _before(layer.mlp.linear_fc2, lambda x: split("ffn", x))
        else:
            yield from self._expert_hooks(name, layer.mlp)
            yield _before(layer.mlp.shared_experts.linear_fc2, lambda x: split("shared", x))
            if one.moe_latent_size:
                yield layer.mlp.fc1_latent_proj.register_forward_hook(
                    lambda _module, _inputs, output: shared("latent_in", output[0])
                )
                yield _before(layer.mlp.fc2_latent_proj, lambda x: shared("latent_out", x))
        if not name.startswith("decoder."):
            return
        if inputs is None:
            yield layer.pre_mlp_layernorm.register_forward_hook(
                lambda _module, _inputs, output: shared("normed", output)
            )
        else:  # its norm is fused
            gain = norm_gain(inputs.layer_norm_weight, inputs.zero_centered_gamma)
            yield _before(inputs, lambda x: shared("normed", rms_norm(x, gain, inputs.eps)))

    def _distance(self, key: str) -> Callable[..., None]:
        def hook(_module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if not self.counts_shared:
                return
            before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            after = output[0] if isinstance(output, tuple) else output
            found = 1 - torch.cosine_similarity(before.double(), after.double(), dim=-1)
            count = found.new_tensor(float(found.numel()))
            self._add(key, torch.stack([found.sum(), count]), (0,))

        return hook

    def _expert_hooks(self, name: str, moe: Any) -> Iterator[Any]:
        first = self.ep.rank() * moe.num_local_experts

        def outputs(_module: Any, args: Any, output: Any) -> None:
            y, counts = output[0], args[1]
            if self.expt_tp.size() > 1:  # each rank has a part of the sum
                y = y.contiguous().clone()
                torch.distributed.all_reduce(y, group=self.expt_tp)
                if self.expt_tp.rank():
                    return
            norms = torch.linalg.vector_norm(y, dim=-1, dtype=torch.float64).split(counts.tolist())
            sums = torch.stack([one.sum() for one in norms])
            self._add(f"{name} experts", torch.stack([sums, counts.to(sums)], dim=-1), (first, 0))

        def inputs(_module: Any, args: Any) -> None:
            x, counts = args[0], args[1]
            counts = counts.tolist() if isinstance(counts, Tensor) else counts
            found = torch.stack([_squares(one) for one in x.split(counts)])
            self._add(f"{name} ffn", found, (first, self.expt_tp.rank() * found.shape[1]))

        def ranks(_module: Any, _args: Any, output: Any) -> None:
            if not self.counts_shared:
                return
            weights = output[0].detach().flatten(0, -2).double()
            best = weights.topk(self.shapes[f"{name} ranks"][0], dim=-1).values
            count = torch.full_like(best[0], len(best))
            self._add(f"{name} ranks", torch.stack([best.sum(0), count], dim=-1), (0, 0))

        yield moe.router.register_forward_hook(ranks)
        yield moe.experts.register_forward_hook(outputs)
        yield moe.experts.linear_fc2.register_forward_pre_hook(inputs)


def _squares(x: Tensor) -> Tensor:
    """Sum of squares over tokens: [..., c] -> [c], FP64."""
    return x.detach().flatten(0, -2).double().square().sum(0)


def _before(module: torch.nn.Module, see: Callable[[Tensor], None]) -> Any:
    return module.register_forward_pre_hook(lambda _module, inputs: see(inputs[0]))


def _layers(chunks: Sequence[HybridModel], config: Nemotron3Config) -> Iterator[tuple[Prefix, Any]]:
    named = {prefix.megatron: prefix for prefix in prefixes(config)}
    for chunk in chunks:
        for layer in decoder_layers(chunk.decoder):
            yield named[f"decoder.layers.{layer.layer_number - 1}."], layer
        for block in chunk.mtp.layers if chunk.mtp_process else ():
            for number, layer in enumerate(block.mtp_model_layer.layers):
                yield named[f"mtp.layers.{block.layer_number - 1}.mtp_model_layer.layers.{number}."], layer


def calibrate(opened: Checkpoint, launch: Launch, text: Tensor, device: str) -> tuple[Scores, float]:
    """Return the scores of a checkpoint's model, and its loss on the text in nats per token. Collective."""
    with cpu_mode() if device == "cpu" else nullcontext(), _world(device):
        model = build(launch)
        load_weights(model, opened)
        model.eval()
        losses: list[Tensor] = []
        scores = measure(model, opened.config, partial(_forward, model, text, losses))
        total = torch.stack(losses).sum(0) if losses else text.new_zeros(2, dtype=torch.float64)
        total = total.to(next(model.parameters()).device)
        torch.distributed.all_reduce(total)  # ranks that share tokens count them alike
        return scores, float(total[0] / total[1])


@contextmanager
def _world(device: str) -> Iterator[None]:
    """The ranks of torchrun, if it started this process; `build` makes a world of one process otherwise."""
    existed = torch.distributed.is_initialized()
    if "RANK" in os.environ and not existed:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        yield
    finally:
        if not existed and torch.distributed.is_initialized():
            from megatron.core import parallel_state

            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


def _forward(model: HybridModel, text: Tensor, losses: list[Tensor]) -> None:
    """Run this data-parallel rank's windows through the stages; sums of losses are added on the last one."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    own = text[rank::size].to(next(model.parameters()).device)
    tokens = text.shape[0] * (text.shape[1] - 1)
    positions = torch.arange(own.shape[1] - 1, device=own.device)[None]

    def loss(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        losses.append(torch.stack([output.double().sum(), output.new_tensor(output.numel()).double()]))
        return output.float().mean(), {}

    def step(windows: Iterator[Tensor], part: Any) -> tuple[Tensor, Any]:
        window = next(windows)[None]
        return part(window[:, :-1], positions, None, labels=window[:, 1:].contiguous()), loss

    def windows(bar: Bar | None) -> Iterator[Tensor]:
        for number, window in enumerate(own):
            if bar is not None:
                bar.to(number * tokens // len(own))
            yield window

    with ExitStack() as stack:
        first = torch.distributed.get_rank() == 0
        bar = stack.enter_context(Bar("measure", "tokens", tokens)) if first else None
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=windows(bar),
            model=model,
            num_microbatches=len(own),
            seq_length=own.shape[1] - 1,
            micro_batch_size=1,
            forward_only=True,
        )
