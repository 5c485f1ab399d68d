"""Upstream's `MimoModel` for any layouts and ragged or absent modalities, with this package's communicators.

The modules, their names and so the checkpoints are upstream's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.models.mimo.config import MimoModelConfig
from megatron.core.models.mimo.config.role import MIMO_LANGUAGE_MODULE_KEY, ModuleStageInfo
from megatron.core.models.mimo.model.base import MimoModel
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1

from megatron_nemotron3.boundary.colocated import ColocatedBridge, ModalityRows, communicate
from megatron_nemotron3.boundary.decoder_input import RankShard, build_decoder_input, place_rows
from megatron_nemotron3.boundary.feed import Microbatch, RowFeed
from megatron_nemotron3.boundary.groups import CURE, BoundaryError, Failure
from megatron_nemotron3.boundary.layout import Layout
from megatron_nemotron3.boundary.multimodule import BoundaryCommunicator

Rows = dict[str, Tensor]


class BoundaryMimoModel(MimoModel):
    """Encoders and a language model, on shared or on disjoint ranks.

    Args:
        mimo_config, cp_group, tp_group: as upstream. Modules that share ranks may differ in TP and DP, and
            the language model may have CP and PP (`training.py`).
        feed: the schedule's data iterator, if it is a `RowFeed`. Then row counts need not be exchanged, the
            host never waits for the device, and each rank receives only the rows of its positions. The
            encoders of its descriptions have the names of the modalities; runs are given for all or none of
            them. Without grids it describes only this rank's samples.
        sequence_parallel: encoders on the language model's ranks whose output rows are split over their TP.
        share: encoder on these ranks with CP above 1 -> how its context ranks share its rows
            (`Layout.share`).
        timeout: of exchanges between modules that share ranks; None: that of the default group.

    Raises:
        ValueError: as `ColocatedBridge`; or an encoder and the language model share some of their ranks.
    """

    def __init__(
        self,
        mimo_config: MimoModelConfig,
        cp_group: Any = None,
        tp_group: Any = None,
        *,
        feed: RowFeed | None = None,
        sequence_parallel: Collection[str] = (),
        share: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        grids = mimo_config.module_to_grid_map or {}
        ranks = {name: range(g.rank_offset, g.rank_offset + g.size) for name, g in grids.items()}
        language = ranks.get(MIMO_LANGUAGE_MODULE_KEY, range(0))
        for name, own in ranks.items():
            if own != language and set(own) & set(language):
                raise ValueError(
                    f"{name} is on ranks {own.start}-{own.stop - 1}, the language model on {language.start}-"
                    f"{language.stop - 1}: give them the same ranks or none in common"
                )
        self._timeout, self._split, self._share = timeout, frozenset(sequence_parallel), dict(share or {})
        super().__init__(mimo_config, cp_group=cp_group, tp_group=tp_group)
        self.feed = feed
        self._microbatch: Microbatch | None = None
        #: The communicator of encoders on other ranks: an error of this rank's input is then raised on all of
        #: their ranks, too. Without it they only see that this rank has ended.
        self.communicator: BoundaryCommunicator | None = None
        self._checked = False
        #: Microbatches whose rows were exchanged before their forward step (`training.py`).
        self.exchanged: deque[tuple[Microbatch | None, Rows]] = deque()
        config = mimo_config.language_model_spec.params["config"]
        partition = self.partition_adapter.cfg if self.partition_adapter is not None else None
        grid = grids.get(MIMO_LANGUAGE_MODULE_KEY)
        layout = Layout.from_grid(grid, config.sequence_parallel) if grid is not None else None
        self._shard = RankShard.of(partition, layout)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Describe this rank's tensors; arguments as upstream.

        Upstream has every tensor rank of an encoder without tensor parallelism of its own store the whole of
        it, and then refuses to save what is stored twice: only the first stores it here.
        """
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        for name, wrapped in self.modality_submodules.items():
            tp = getattr(unwrap_model(wrapped).pg_collection, "tp", None)
            rank = 0 if tp is None else tp.rank()
            for key, tensor in state.items():
                if f"modality_submodules.{name}." not in key or not isinstance(tensor, ShardedTensor):
                    continue
                stage, number, copy = tensor.replica_id
                if number == 0 and tensor.local_shape == tensor.global_shape:
                    tensor.replica_id = (stage, rank, copy)
        return state

    def _build_colocated_communicators(self) -> None:
        grids = self.mimo_config.module_to_grid_map
        if any({"tp", "dp"} - set(grid.dim_names) for grid in grids.values()):
            return  # as upstream: every module has the layout of the language model
        language = grids[MIMO_LANGUAGE_MODULE_KEY]
        config = self.mimo_config.language_model_spec.params["config"]
        first: ColocatedBridge | None = None
        for name in self.mimo_config.modality_submodules_spec:
            comm = ColocatedBridge(
                grids[name],
                language,
                name,
                MIMO_LANGUAGE_MODULE_KEY,
                {"b": 0, "h": 1},
                sequence_parallel=config.sequence_parallel,
                source_sequence_parallel=name in self._split,
                source_share=self._share.get(name, ""),
                groups_from=first,
                timeout=self._timeout,
            )
            first = first or comm
            self.colocated_comms[name, MIMO_LANGUAGE_MODULE_KEY] = comm
        if first is not None:
            layout, rank = first.destination, dist.get_rank()
            stage = layout.coordinates(rank).get("pp", 0) if rank in layout.ranks else 0
            # Upstream assumes a single stage where modules share ranks.
            self.role.modules[MIMO_LANGUAGE_MODULE_KEY] = ModuleStageInfo(stage == 0, stage == layout.pp - 1)

    def forward(self, *args: Any, microbatch: Microbatch | None = None, **kwargs: Any) -> Any:
        """Run the model as upstream does.

        microbatch: its description; None: that of the batch that the feed returned last.

        Raises:
            BoundaryError: rows are not as agreed, positions and rows do not match, or a module is in FSDP; on
                every rank.
            ValueError: the same without communicators.
        """
        with self._raised_everywhere():
            self._refuse_fsdp()
        self._microbatch = microbatch
        if microbatch is None and self.exchanged:
            self._microbatch = self.exchanged[0][0]
        elif microbatch is None and self.feed is not None:
            self._microbatch = self.feed.current
        try:
            return super().forward(*args, **kwargs)
        except RuntimeError as error:  # a collective of the language model whose peer failed at the boundary
            if self._failures() and not isinstance(error, BoundaryError):
                error.add_note(CURE)
            raise

    def _failures(self) -> list[Failure]:
        shared = {id(comm.failure): comm.failure for comm in self.colocated_comms.values()}
        return [*shared.values(), *([self.communicator.failure] if self.communicator is not None else [])]

    def exchange_rows(
        self,
        modality_inputs: Mapping[str, Any] | None,
        microbatch: Microbatch | None,
        input_ids: Tensor | None = None,
    ) -> Rows:
        """Encode and exchange: modality -> rows [n, h] of this rank's positions or lane; n may be 0."""
        with self._raised_everywhere():
            self._refuse_fsdp()
        rows: Rows = {}
        for name, submodule in self.modality_submodules.items():
            inputs = (modality_inputs or {}).get(name)
            with self._raised_everywhere():
                output = submodule.forward(encoder_inputs=inputs) if inputs is not None else None
            rows[name] = self._empty_encoder_output(name) if output is None else output
        if not self.colocated_comms:
            return rows
        parts = []
        for name, tensor in rows.items():
            comm = self.colocated_comms[name, MIMO_LANGUAGE_MODULE_KEY]
            trained = any(p.requires_grad for p in self.modality_submodules[name].parameters())
            marked = None
            if microbatch is None and input_ids is not None and name in self.special_token_ids:
                marked = (input_ids == self.special_token_ids[name]).sum(1).tolist()
            # The same on all ranks, so a rank without input takes part in backward, too.
            parts.append(ModalityRows(comm, tensor, trained and torch.is_grad_enabled(), marked))
        return dict(zip(rows, communicate(parts, microbatch), strict=True))

    def decoder_input(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        rows: Rows,
        documents: Sequence[tuple[int, ...]] = (),
    ) -> Tensor:
        """This rank's part of the decoder input, [s_local, b, h], s_local = s / (cp * tp).

        input_ids: [b, s], the whole sequences of this rank's lane.
        rows: modality -> rows of this rank's positions if the feed has runs, else of the lane.
        documents: for each sample of the lane, `cu_seqlens_padded` if it is packed, else (); empty: that of
            the feed, or no sample is packed.

        Raises:
            ValueError: positions and rows do not match.
        """
        embedding = unwrap_model(self.language_model).embedding
        described = self._shard.of_lane(self._microbatch)
        with self._raised_everywhere():  # other lanes raise it in the next exchange
            placement = place_rows(self._shard, self.special_token_ids, input_ids, described, documents)
            return build_decoder_input(embedding, self._shard, placement, input_ids, position_ids, rows)

    @contextmanager
    def _raised_everywhere(self) -> Iterator[None]:
        """Make other ranks raise an error in this rank's input, too."""
        try:
            yield
        except ValueError as error:
            for failure in self._failures():
                failure.fail(str(error), error)
            raise

    def _forward_encoders(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with self._raised_everywhere():
            outputs: dict[str, Any] = super()._forward_encoders(*args, **kwargs)
        return outputs

    def _refuse_fsdp(self) -> None:
        """Check once, before the first rows, that no module's parameters are sharded over its ranks."""
        if self._checked:
            return
        modules = {MIMO_LANGUAGE_MODULE_KEY: self.language_model, **self.modality_submodules}
        for name, module in modules.items():
            parts = module.modules() if module is not None else ()
            if kinds := {type(part).__name__ for part in parts if _shards_parameters(part)}:
                raise ValueError(
                    f"module {name!r} is in {', '.join(sorted(kinds))}: a rank without input would not take "
                    "part in its parameter gathers; use megatron.core's DistributedDataParallel, with the "
                    "distributed optimizer to shard optimizer states"
                )
        self._checked = True

    def _forward_all_modules(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        loss_mask: Tensor | None,
        labels: Tensor | None,
        modality_inputs: Mapping[str, Any] | None,
        packing_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, Tensor | None]:
        if self.exchanged:
            _, rows = self.exchanged.popleft()
        else:
            rows = self.exchange_rows(modality_inputs, self._microbatch, input_ids)
        if not self.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY):
            rows = {MIMO_LANGUAGE_MODULE_KEY: self.input_tensors}
        output, loss_mask = self._forward_language_module(
            input_ids, position_ids, None, loss_mask, labels, rows, packing_kwargs
        )
        if not self.role.is_last_stage(MIMO_LANGUAGE_MODULE_KEY):
            output = output[MIMO_LANGUAGE_MODULE_KEY]  # the schedule of one module sends a tensor
        return output, loss_mask

    def _forward_language_module(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        loss_mask: Tensor | None,
        labels: Tensor | None,
        input_tensors: Rows | None,
        packing_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Any, Tensor | None]:
        if self._shard.cp > 1 and attention_mask is not None:
            raise RuntimeError(
                "context parallelism needs attention_mask=None: the mask is causal, or of packed documents"
            )
        packed = self._build_packed_seq_params(packing_kwargs)
        described = self._shard.of_lane(self._microbatch)
        cuts = described.documents if described is not None else ()
        batch = next((t for t in (input_ids, labels, loss_mask) if t is not None), None)
        if not cuts and batch is not None:  # document borders may be on a GPU
            cuts = (self._shard.documents(packed, batch.shape[1]),) * len(batch)
        decoder_input = None
        if self.role.is_first_stage(MIMO_LANGUAGE_MODULE_KEY):
            rows = {name: t for name, t in (input_tensors or {}).items() if name != MIMO_LANGUAGE_MODULE_KEY}
            decoder_input = self.decoder_input(input_ids, position_ids, rows, cuts)
        elif input_tensors and MIMO_LANGUAGE_MODULE_KEY in input_tensors:
            unwrap_model(self.language_model).set_input_tensor(input_tensors[MIMO_LANGUAGE_MODULE_KEY])
        labels, loss_mask = (
            self._shard.of_context(t, cuts) if t is not None else None for t in (labels, loss_mask)
        )
        output = self.language_model(
            input_ids=None,
            position_ids=position_ids,
            decoder_input=decoder_input,
            labels=labels,
            loss_mask=loss_mask,
            attention_mask=attention_mask,
            packed_seq_params=packed,
        )
        if not self.role.is_last_stage(MIMO_LANGUAGE_MODULE_KEY):
            return {MIMO_LANGUAGE_MODULE_KEY: output}, loss_mask
        return output, loss_mask

    def _has_encoder_tokens(self, input_ids: Tensor | None, encoder_name: str) -> bool:
        """Upstream would raise for missing input on one rank; the exchange does on all ranks."""
        return False

    def _attach_modality_split_sizes(
        self, output: Tensor, input_ids: Tensor | None, encoder_name: str
    ) -> None:
        """Attach the rows of each sample for the communicator's header, unless a feed has them."""
        token = self.special_token_ids.get(encoder_name)
        if self._microbatch is not None or token is None or input_ids is None or output.ndim != 2:
            return
        sizes = (input_ids == token).sum(dim=1).tolist()
        if sum(sizes) == output.shape[0]:
            output._mimo_bridge_split_sizes = sizes  # type: ignore[attr-defined]

    def _empty_encoder_output(self, encoder_name: str) -> Tensor:
        """An output of no rows in the graph: the encoder's parameters get zero gradients, and hooks run."""
        config = self.mimo_config.language_model_spec.params["config"]
        hidden, dtype = config.hidden_size, config.params_dtype or torch.float32
        parameters = list(self.modality_submodules[encoder_name].parameters())
        if not parameters:
            return torch.empty(0, hidden, dtype=dtype, device=torch.get_default_device(), requires_grad=True)
        out: Tensor = _EmptyOutput.apply(hidden, dtype, *parameters)
        return out


class _EmptyOutput(torch.autograd.Function):
    """Rows [0, hidden] whose backward gives every trained parameter a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, hidden: int, dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        # No parameter is read: slices of TransformerEngine's quantized ones raise, or dequantize all of it.
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return torch.empty(0, hidden, dtype=dtype, device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                torch.zeros((), dtype=dtype, device=device).expand(shape) if need else None
                for (shape, dtype, device), need in zip(ctx.like, needed, strict=True)
            ),
        )


def _shards_parameters(module: torch.nn.Module) -> bool:
    megatron = isinstance(module, _BaseDataParallel) and not isinstance(module, DistributedDataParallel)
    return megatron or isinstance(module, (FSDPModule, TorchFSDP1))
