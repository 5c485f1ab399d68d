"""Megatron's hybrid model straight from its arguments, for versions without a builder that can do it.

megatron-core 0.17 has no model builder, and the one of 0.18 asserts that there are no virtual stages. Both
stand-ins answer to what `build.py` asks of Megatron's own.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import import_module

from megatron_nemotron3.layers.upstream import HybridModel, find, has


@dataclass(frozen=True)
class DirectConfig:
    """In place of `HybridModelConfig`."""

    #: Megatron's TransformerConfig.
    transformer: Any
    #: Megatron's parsed and validated arguments.
    args: Namespace

    def get_builder_cls(self) -> type[DirectBuilder]:
        """In place of `HybridModelBuilder`."""
        return DirectBuilder

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of the divisor times TP."""
        if getattr(self.args, "padded_vocab_size", None) is not None:
            return int(self.args.padded_vocab_size)
        multiple = self.args.make_vocab_size_divisible_by * self.args.tensor_model_parallel_size
        return -(-int(self.args.vocab_size) // multiple) * int(multiple)


class DirectBuilder:
    """Builds one stage, as `HybridModelBuilder.build_model` does."""

    def __init__(self, config: DirectConfig) -> None:
        self.config = config

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """The model of this rank's stage; `pre_process` and `post_process` follow from it if None."""
        args, transformer = self.config.args, self.config.transformer
        pp, chunks = pg_collection.pp, transformer.virtual_pipeline_model_parallel_size or 1
        if pre_process is None:
            pre_process = pp.rank() == 0 and vp_stage in (None, 0)
        if post_process is None:
            post_process = pp.rank() == pp.size() - 1 and vp_stage in (None, chunks - 1)
        return HybridModel(
            transformer,
            import_module(args.spec),  # a parameter of two names: by its place
            self.config.padded_vocab_size,
            args.max_position_embeddings,
            hybrid_layer_pattern=args.hybrid_layer_pattern,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )


def hybrid_config(args: Namespace, transformer: Any = None) -> Any:
    """Megatron's `HybridModelConfig` for its arguments, or what stands in for it.

    Args:
        args: parsed and validated arguments.
        transformer: a TransformerConfig; None: from `args`.
    """
    if has("model-builder"):
        return find("megatron.training.argument_utils:hybrid_config_from_args")(args, transformer)
    if transformer is None:
        make = find("megatron.training.argument_utils:core_transformer_config_from_args")
        transformer = make(args)
    return DirectConfig(transformer, args)
