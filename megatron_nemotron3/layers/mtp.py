"""The multi-token-prediction (MTP) layer, and what its loss needs to be right for padded packs and CP.

Megatron computes the loss of MTP in the model's `forward`, outside the layers that a `--spec` builds. It
shifts at `cu_seqlens_q`, so padded documents would get targets from their neighbors (Megatron-LM #6205,
#4495), and each context-parallel (CP) rank divides by its own number of tokens. `LossHooks` corrects both
with forward hooks of the model: under CP one all-reduce of 2 * CP * (depths + 1) numbers a micro-batch; the
host waits once, for a pack's borders.

Where a row is cut over CP ranks as a whole (`mark_whole`), Megatron can shift only along the row. So tokens
that would pass a border are 0 before the shift, and logits whose target lies behind a border are 0: they get
no gradient, and their loss is log(entries), which is taken off what is logged.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    MultiTokenPredictionBlock,
    MultiTokenPredictionLayer,
)
from torch import Tensor

from megatron_nemotron3.layers import padding
from megatron_nemotron3.layers.context_parallel import TokenPlaces, cu_seqlens, is_cut_whole, on_host
from megatron_nemotron3.layers.registration import when_taken

#: Weight of one token on a rank whose tokens are all masked; see `_weights`. Lost when added to 1 in FP32.
_TRACE = 2.0**-30


@dataclass
class PhysicalBorders(PackedSeqParams):
    """Packed documents with `cu_seqlens_q` where they lie in memory, as Megatron's shift takes it.

    Attention must not see it: `max_seqlen_q` is that of the caller's borders.
    """

    caller: PackedSeqParams | None = None
    #: Whether Megatron may shift each token of this rank, [s / cp]: no padding, and into no other document.
    shiftable: Tensor | None = None

    @classmethod
    def of(cls, packed: PackedSeqParams, total: int, shiftable: Tensor | None = None) -> PhysicalBorders:
        """`packed`, of `total` tokens, with padded borders, or those of the row if it is cut whole.

        Does not repeat `__post_init__`, which waits for the device.
        """
        borders = object.__new__(cls)
        # Megatron cuts the tensors at these borders on the host, several times a depth.
        whole = is_cut_whole(packed)
        physical = torch.tensor([0, total]) if whole else on_host(cu_seqlens(packed))
        new = {"caller": packed, "shiftable": shiftable}
        borders.__dict__.update(vars(packed), **new, cu_seqlens_q=physical, cu_seqlens_q_padded=physical)
        return borders


def _count_losses_once(router: Any, depths: int) -> None:
    """Let a repeated block divide the losses of its router by the depths, which its config may not have."""
    config = router.config = copy(router.config)
    config.mtp_num_layers = depths
    if config.moe_z_loss_coeff is not None and config.mtp_use_repeated_layer:
        config.moe_z_loss_coeff /= depths


class MTPLayer(MultiTokenPredictionLayer):
    """One depth of multi-token prediction (MTP), whose routers are marked as those of MTP.

        h_{k-1} [s, b, d] --hnorm--+
                                   +--cat--> eh_proj --> pattern's layers ("*E") --> final_layernorm --> h_k
        emb(token t+k)    --enorm--+

    With `--mtp-use-repeated-layer` one block's experts run once per depth, and upstream divides their
    load-balancing loss by the depths if `is_mtp_layer` is set. The hybrid stack of 0.19 does not set it: the
    loss would count once per depth, under a decoder layer. main does (Megatron-LM #6748), but for the number.

    Args:
        when_built: called with the layer when it is built: emulation, monitors.
    """

    def __init__(
        self, *args: Any, when_built: Sequence[Callable[[MTPLayer], None]] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, BaseMoELayer):
                if not module.router.is_mtp_layer:
                    module.is_mtp_layer = module.router.is_mtp_layer = True
                # The metrics tracker has one slot per depth after the decoder's layers. The number
                # inside the block ("*E": 2) overruns it if there is one depth (Megatron-LM #7172).
                module.router.set_layer_number(self.layer_number)
                _count_losses_once(module.router, self.config.mtp_num_layers)
        for attach in when_built:
            attach(self)
        if self.layer_number == 1:
            when_taken(self, _is_block_of, LossHooks.install)

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """Upstream's forward, with the shift at the documents' physical borders.

        The shift brings token 0 to a document's end, as in one without padding: routers count that position.
        """
        if isinstance(packed_seq_params, PhysicalBorders):
            kwargs["input_ids"] = kwargs["input_ids"] * packed_seq_params.shiftable
            packed_seq_params = packed_seq_params.caller
        elif packed_seq_params is not None:
            refuse_padding(packed_seq_params)
        if kwargs.get("padding_mask") is None:
            kwargs["padding_mask"] = padding.of_decoder()
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)

    def _get_embeddings(
        self,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        padding_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Upstream's, which shifts tokens and positions by one, but the routers' mask stays."""
        if packed_seq_params is not None:
            total = kwargs["input_ids"].shape[1] * self.cp_group.size()
            packed_seq_params = PhysicalBorders.of(packed_seq_params, total)
        ids, positions, _, embedded, hidden = super()._get_embeddings(
            *args, packed_seq_params=packed_seq_params, **kwargs
        )
        return ids, positions, padding_mask, embedded, hidden


def refuse_padding(packed: PackedSeqParams) -> None:
    """Refuse padded documents in a model whose MTP loss is not corrected. Compares no values."""
    padded = packed.cu_seqlens_q_padded
    if is_cut_whole(packed) or (padded is not None and padded is not packed.cu_seqlens_q):
        raise ValueError(
            "packed documents have cu_seqlens_q_padded, or CP cuts their row as a whole, and this model is "
            "no HybridModel or was not called as a module. Megatron would take MTP's labels from neighboring "
            "documents (Megatron-LM #6205): call model(...), or pass the padded cu_seqlens as both and mask "
            "the padding in the loss"
        )


def _is_block_of(child: Any, layer: MTPLayer) -> bool:
    return isinstance(child, MultiTokenPredictionBlock) and layer in child.layers


class LossHooks:
    """Forward hooks that give Megatron's MTP loss the right borders, mask and weights."""

    def __init__(self) -> None:
        self._inner = False
        self._call = 0
        #: Of each depth: what the gradient and the logged loss of this micro-batch are multiplied by.
        self._gradient: Tensor | None = None
        self._logged: Tensor | None = None
        self._before: Tensor | None = None
        #: Of a row that is cut whole, of each depth: whether a target lies behind a border [depths, s / cp],
        #: the number of those that Megatron counts [depths], and their share of its mean [depths].
        self._beyond: tuple[Tensor, Tensor, Tensor] | None = None
        self._entries = 1

    @classmethod
    def install(cls, model: torch.nn.Module) -> None:
        if isinstance(model, HybridModel):
            hooks = cls()
            model.register_forward_pre_hook(hooks._begin, with_kwargs=True)
            model.register_forward_hook(hooks._end)

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the model: hand over borders and mask, and count tokens."""
        self._gradient, self._beyond, self._call = None, None, 0
        group, packed = model.pg_collection.cp, kwargs.get("packed_seq_params")
        if not _computes_loss(model, kwargs) or (packed is None and group.size() == 1):
            return None
        if not self._inner:  # the output layer did not exist yet when the model was hooked
            model.decoder.register_forward_pre_hook(_give_back_borders, with_kwargs=True)
            model.output_layer.register_forward_hook(self._weigh)
            self._inner = True
        arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        labels, mask = arguments.get("labels"), arguments.get("loss_mask")
        tokens = arguments["input_ids"] if labels is None else labels
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.float32)
        places = TokenPlaces.of(packed, tokens.shape[1], group.size(), group.rank(), tokens.device)
        if packed is not None:
            mask, shiftable = mask * places.real, places.real
            if is_cut_whole(packed):
                shiftable = shiftable & (places.offset > 0)
            physical = PhysicalBorders.of(packed, tokens.shape[1] * group.size(), shiftable)
            kwargs = {**kwargs, "packed_seq_params": physical}
        if group.size() > 1:
            # Without labels Megatron makes them from the tokens, and shifts the mask once more.
            mask = self._weights(model.config, mask.float(), places, group, int(labels is None))
            self._before = _logged_losses()
        return args, {**kwargs, "loss_mask": mask}

    def _weights(self, config: Any, mask: Tensor, places: TokenPlaces, group: Any, first: int) -> Tensor:
        """Set the factors that turn each rank's weights into those of one process."""
        size, rank = group.size(), group.rank()
        shift = torch.arange(first, first + config.mtp_num_layers + 1, device=mask.device)
        # Within documents, and as Megatron shifts: the same but in a row that is cut whole.
        inside, owner = places.owner(shift), places.owner(shift, in_document=False)  # [depths + 1, s / cp]
        ranks = torch.arange(size, device=mask.device)[:, None, None]
        every = torch.stack([((to == ranks) * mask.sum(0)).sum(-1) for to in (inside, owner)])
        torch.distributed.all_reduce(every, group=group)  # [2, cp, depths + 1]
        own, whole = every[1, rank], every[0].sum(0)
        left, whole_left = own[1:].clamp(min=1), whole[1:].clamp(min=1)
        # Ranks' losses are averaged in the log, and so are gradients unless the loss is per token.
        self._logged = size * left / whole_left
        if places.cut_whole:
            number = (own - every[0, rank])[1:]
            self._beyond = places.following < shift[1:, None], number, number / left
        self._gradient = self._logged
        if config.calculate_per_token_loss:
            lost = (own[0] == 0) & (own[1:] > 0).any()
            here = (owner[0] == rank).float().argmax() == torch.arange(mask.shape[1], device=mask.device)
            trace = (here & lost) * _TRACE
            mask, counted = mask + trace, own[0] + trace.sum() * mask.shape[0]
            self._gradient = whole[0] / whole_left * left / torch.where(counted > 0, counted, 1)
        return mask

    def _weigh(self, layer: Any, _inputs: Any, output: Any) -> None:
        """After the output layer, which Megatron calls for every depth, then for the decoder."""
        if self._beyond is not None and self._call < len(self._beyond[0]):
            beyond, self._entries = self._beyond[0][self._call], layer.output_size
            output[0].masked_fill_(beyond[:, None, None], 0)  # [s / cp, b, v / tp]
        if self._gradient is not None and self._call < len(self._gradient) and output[0].requires_grad:
            output[0].register_hook(partial(torch.mul, other=self._gradient[self._call]))
        self._call += 1

    def _end(self, model: Any, _inputs: Any, _output: Any) -> None:
        """After the model: correct what it added to the logged losses."""
        if self._gradient is None or not model.training:
            return
        values = _logged_losses()
        if values is not None and self._logged is not None:
            added = values if self._before is None else values - self._before
            right = added
            if self._beyond is not None:
                _, number, share = self._beyond
                right = added - share * math.log(self._entries)
                MTPLossLoggingHelper.tracker["total_values"] -= number  # of the acceptance rate
            MTPLossLoggingHelper.tracker["loss_values"] += right * self._logged - added
        self._gradient = self._before = None


def _computes_loss(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this call computes the loss of MTP; `compute_mtp_loss` is an argument of newer versions."""
    wanted = model.mtp_process and model.post_process and kwargs.get("compute_mtp_loss", True)
    return bool(wanted and not InferenceMode.is_active())


def _give_back_borders(_decoder: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Let the decoder see the borders that the caller gave."""
    packed = kwargs.get("packed_seq_params")
    if not isinstance(packed, PhysicalBorders):
        return None
    return args, {**kwargs, "packed_seq_params": packed.caller}


def _logged_losses() -> Tensor | None:
    """A copy of the losses that Megatron has added up since the last report, [depths]."""
    values = MTPLossLoggingHelper.tracker.get("loss_values")
    return None if values is None else values.clone()
