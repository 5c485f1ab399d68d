"""The layers by transformers' own modules (`nemotron_h`): each is built, loaded from disk, run and dropped.

A block is built on the meta device and its tensors are assigned by name, each exactly once. transformers'
expert module holds all routed experts of a layer (Ultra: 43 GB in FP32), so here it holds one: the layer's
own router selects, and transformers' expert code runs with one selected expert at a time.

transformers has no multi-token prediction. Its blocks compute the layers of an MTP block; the rest of the
block (enorm, hnorm, eh_proj, final_layernorm) is implemented here a second time, on Hugging Face's names.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_nemotron3.checkpoints.convert import config_json
from megatron_nemotron3.checkpoints.convert.block_configs import KEY, MTP_KEY, flattened
from megatron_nemotron3.checkpoints.convert.config_keys import LIMITS, NO_CLAMP
from megatron_nemotron3.checkpoints.convert.logits.reader import TensorReader
from megatron_nemotron3.checkpoints.convert.logits.report import Selection
from megatron_nemotron3.checkpoints.convert.omni_config import TEXT, is_omni, part
from megatron_nemotron3.checkpoints.convert.sources import TensorSource
from megatron_nemotron3.checkpoints.metadata import read_json
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.parameters import Prefix
from megatron_nemotron3.models.tensors import hf_root

#: Earlier versions compute the scan incorrectly on a CPU after its first chunk (transformers #47246).
MINIMUM_VERSION = (5, 15, 1)
_CURE = f"pip install 'transformers>={'.'.join(map(str, MINIMUM_VERSION))}'"


@dataclass(frozen=True)
class LayerOutput:
    """Result of one layer for x [1, s, d]."""

    #: The residual stream after the layer, and the mixer's update to it.
    stream: Tensor
    update: Tensor
    #: Only for an E layer.
    selection: Selection | None


def transformers_model() -> tuple[Any, Any]:
    """Return transformers' modeling module of the family, and its configuration class."""
    try:
        import transformers
    except ImportError:
        raise ImportError(f"--check-logits computes one side with transformers: {_CURE}") from None
    numbers = [int(n) if n.isdigit() else 0 for n in transformers.__version__.split(".")[:3]]
    if tuple(numbers) < MINIMUM_VERSION:
        raise ImportError(
            f"transformers {transformers.__version__} computes Mamba-2 incorrectly on a CPU after one chunk: "
            + _CURE
        )
    from transformers.models.nemotron_h import modeling_nemotron_h

    return modeling_nemotron_h, transformers.NemotronHConfig


class HuggingFace:
    """A Hugging Face checkpoint, run one layer at a time; its config.json must describe `config`."""

    def __init__(self, source: TensorSource, config: Nemotron3Config) -> None:
        self.modeling, config_class = transformers_model()
        path = source.folder / "config.json"
        if not path.exists():
            raise ValueError(f"{path} is missing: transformers builds its layers from it")
        data = read_json(path)
        if is_omni(data):
            data = part(data, TEXT) or {}
        data = config_json.with_mtp(data, config)  # which may be another's, or left out
        config_json.read(data, name=str(path), base=config)
        #: What this side leaves out of transformers' computation, for a message; None if nothing.
        self.note: str | None = None
        #: Of each layer: what config.json states for it alone.
        self._stated = {"": data.get(KEY) or [], "mtp.": data.get(MTP_KEY) or []}
        # Infinite, as `config_json.read` has checked; libraries write that in several ways.
        stated = {key: value for key, value in data.items() if key not in LIMITS}
        try:
            self.config = config_class.from_dict(flattened(stated)[0])
        except Exception as problem:  # its validators raise exceptions of their own
            raise ValueError(f"{path}: transformers cannot read it: {problem}") from None
        self.config._attn_implementation = self.config._experts_implementation = "eager"
        self.weights, self.hidden = TensorReader("Hugging Face", source), config.hidden_size
        self._root = hf_root(config)
        self._block_types = {"": list(self.config.layers_block_type)}
        if config.has_mtp:
            self._block_types["mtp."] = list(self.config.mtp_layers_block_type) * config.mtp_num_blocks
        if "M" in config.pattern:
            with torch.device("meta"):
                block = self.modeling.NemotronHBlock(self.config, config.pattern.index("M"))
            if getattr(block.mixer, "time_step_limit", (0.0,))[0] > NO_CLAMP:
                self.note = config_json.clamp_note(data)

    def embed(self, ids: Tensor) -> Tensor:
        """[s] token ids -> [1, s, d]."""
        return self.weights.rows(self._table(f"{self._root}.embeddings.weight"), ids.tolist())[None]

    def layer(self, layer: Prefix, x: Tensor) -> LayerOutput:
        """Run one block."""
        block = self._block(layer.hf)
        seen: dict[str, Any] = {}
        block.mixer.register_forward_hook(lambda module, args, out: seen.update(mixer=out))
        if hasattr(block.mixer, "gate"):
            block.mixer.gate.register_forward_hook(lambda module, args, out: seen.update(gate=out))
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu_(1)[None, None]
        attention = block.block_type in ("full_attention", "attention")
        with _torch_kernels(self.modeling):
            stream = block(x, attention_mask=mask if attention else None)
        update = seen["mixer"][0] if isinstance(seen["mixer"], tuple) else seen["mixer"]
        selection = None
        if "gate" in seen:
            logits, _, experts = seen["gate"]
            bias = block.mixer.gate.e_score_correction_bias
            selection = Selection(logits.sigmoid() + bias, experts)
        return LayerOutput(stream, update, selection)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply transformers' RMSNorm with the weight of that name."""
        with torch.device("meta"):
            module = self.modeling.NemotronHRMSNorm(self.hidden, eps=self.config.layer_norm_epsilon)
        module.load_state_dict({"weight": self.weights.tensor(name, (self.hidden,))}, assign=True)
        result: Tensor = module(x)
        return result

    def vocabulary(self, x: Tensor) -> Iterator[Tensor]:
        """Logits [1, s, n] of normed x, one band of the vocabulary after the other."""
        for band in self.weights.bands(self._table("lm_head.weight")):
            yield F.linear(x, band)

    def mtp_input(self, prefix: str, embedded: Tensor, x: Tensor) -> Tensor:
        """Input of the layers of an MTP block; as `Definition.mtp_input`."""
        embedded = self.norm(embedded, prefix + "enorm.weight")
        both = torch.cat([embedded, self.norm(x, prefix + "hnorm.weight")], dim=-1)
        return F.linear(both, self.weights.tensor(prefix + "eh_proj.weight", (self.hidden, 2 * self.hidden)))

    def _table(self, name: str) -> str:
        self.weights.check(name, (self.config.vocab_size, self.hidden))
        return name

    def _block(self, prefix: str) -> Any:
        """Build transformers' block with its weights; `OneExpertAtATime` replaces its experts."""
        before, _, layer = prefix.partition("layers.")
        index, part = int(layer.rstrip(".")), "mtp." if before == "mtp." else ""
        config = copy.copy(self.config)
        config.layers_block_type = self._block_types[part]
        stated = self._stated[part]
        for key, value in stated[index % len(stated)].items() if stated else ():
            if key != "block_type" and value is not None:
                setattr(config, key, value)
        one = copy.copy(config)
        one.n_routed_experts = 1
        with torch.device("meta"):
            block = self.modeling.NemotronHBlock(config, index).eval()
            if hasattr(block.mixer, "experts"):
                expert = type(block.mixer.experts)(one)
                block.mixer.experts = OneExpertAtATime(expert, self.weights, prefix + "mixer.experts.")
        if hasattr(block.mixer, "conv1d"):
            if not hasattr(block.mixer, "time_step_limit"):
                raise ValueError(
                    "transformers' Mamba-2 mixer has no time_step_limit: this version is not supported"
                )
            # `config_json.clamp_note` says so.
            block.mixer.time_step_limit = (0.0, math.inf)
        own = {name: t for name, t in block.state_dict().items() if not name.startswith("mixer.experts.")}
        filled = {name: self.weights.tensor(prefix + name, tuple(t.shape)) for name, t in own.items()}
        block.load_state_dict(filled, assign=True, strict=True)
        return block


@contextmanager
def _torch_kernels(modeling: Any) -> Iterator[None]:
    """Make transformers use its torch functions; mamba-ssm's and causal-conv1d's need a GPU."""
    names = ("causal_conv1d_fn", "mamba2_chunk_scan")
    chosen = {name: getattr(modeling, name) for name in names if hasattr(modeling, name)}
    try:
        for name, function in chosen.items():
            setattr(modeling, name, inspect.unwrap(function))
        yield
    finally:
        for name, function in chosen.items():
            setattr(modeling, name, function)


class OneExpertAtATime(torch.nn.Module):
    """Replaces transformers' experts: runs its module with one expert, once for each selected expert."""

    def __init__(self, expert: Any, weights: TensorReader, prefix: str) -> None:
        super().__init__()
        # In a list, not as a submodule: its weights must not appear in the block's state dict.
        self.run, self.weights, self.prefix = [expert], weights, prefix

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [s, d], chosen experts and their weights [s, topk] -> [s, d]."""
        (expert,) = self.run
        result = torch.zeros_like(hidden_states)
        shapes = {name: tuple(t.shape)[1:] for name, t in expert.state_dict().items()}
        for e in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == e)
            names = {name: f"{self.prefix}{e}.{name}.weight" for name in shapes}
            weights = {n: self.weights.tensor(names[n], shape).unsqueeze(0) for n, shape in shapes.items()}
            expert.load_state_dict(weights, assign=True, strict=True)
            first = torch.zeros(len(token), 1, dtype=torch.long)
            # Each token occurs once per expert, so this is the same sum as in transformers.
            result[token] += expert(hidden_states[token], first, top_k_weights[token, place].unsqueeze(1))
        return result
