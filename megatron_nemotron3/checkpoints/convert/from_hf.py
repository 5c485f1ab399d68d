"""Hugging Face -> Megatron: plan the files of a torch_dist folder.

It is a release: Megatron starts at iteration 0 with a new optimizer. Each module of TransformerEngine loads
an `_extra_state` object, its FP8 scaling state, and without one a load fails at the default strictness. Here
each is None: modules then keep their initial state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron_nemotron3.checkpoints.convert.job import Places
from megatron_nemotron3.checkpoints.convert.job_options import SHARD_BYTES
from megatron_nemotron3.checkpoints.convert.megatron_args import args_of, common_state
from megatron_nemotron3.checkpoints.convert.omni_inventory import LANGUAGE
from megatron_nemotron3.checkpoints.convert.plan import Slices, band, extent, whole
from megatron_nemotron3.checkpoints.convert.sources import SourceTensor, TensorSource
from megatron_nemotron3.checkpoints.convert.streams import FilePlan, Part, grouped
from megatron_nemotron3.checkpoints.folders import RELEASE, TRACKER
from megatron_nemotron3.checkpoints.metadata import COMMON, INDEX, StoredObject, TensorChunk
from megatron_nemotron3.checkpoints.structure import CONFIG
from megatron_nemotron3.checkpoints.write import COMMON_OBJECT, CONFIG_TEXT, index_bytes, object_archive
from megatron_nemotron3.models import Nemotron3Config
from megatron_nemotron3.models.omni import ARGUMENT as ENCODERS
from megatron_nemotron3.models.parameters import prefixes
from megatron_nemotron3.models.tensors import Row

#: Large column-parallel tensors are stored in several chunks, so that a rank reads little beyond its shard.
_PARTS = 8
#: Size in bytes from which a tensor is large.
_LARGE = 16 << 20


@dataclass
class FolderPlan:
    """The plan of a torch_dist folder: its data files, and the small files in the order of writing."""

    tensors: Mapping[str, SourceTensor]
    files: list[FilePlan]
    small: dict[str, bytes]

    def index(self, places: Mapping[str, Places]) -> dict[str, bytes]:
        """Return the index of a folder whose parts are at `places`."""
        stored: list[tuple[str, StoredObject]] = []
        for plan in self.files:
            file = plan.name.rpartition("/")[2]
            for part, (offset, length) in zip(plan.parts, places[plan.name], strict=True):
                if part.tensor:
                    starts = tuple(start for start, _ in part.slices)
                    chunk = TensorChunk(file, offset, length, starts, extent(part.slices))
                    stored.append((part.tensor, chunk))
                else:
                    stored.append((part.key, StoredObject(file, offset, length)))
        described = {key: (tensor.dtype, tensor.shape) for key, tensor in self.tensors.items()}
        return {f"{RELEASE}/{INDEX}": index_bytes(stored, described)}


def plan(
    view: TensorSource,
    config: Nemotron3Config,
    *,
    padded_vocab_size: int,
    dtype: str,
    limit: int = SHARD_BYTES,
    arguments: Mapping[str, str] | None = None,
) -> FolderPlan:
    """Plan a folder with these weights and more `arguments` in its state."""
    parts = [
        Part(tensor=name, slices=one, dtype=tensor.dtype)
        for name, tensor in view.tensors.items()
        for one in _chunk_slices(view.rows.get(name), tensor)
    ]
    root = LANGUAGE if ENCODERS in (arguments or {}) else ""
    parts += [Part(EXTRA_STATE, key=root + key) for key in extra_state_keys(config)]
    args = args_of(config, padded_vocab_size=padded_vocab_size, dtype=dtype)
    vars(args).update(arguments or {})
    state = common_state(args)
    parts.append(Part(object_archive([state]), key=COMMON_OBJECT))
    files = [
        FilePlan(f"{RELEASE}/__0_{number}.distcp", group, archives=True)
        for number, group in enumerate(grouped(parts, limit, lambda part: part.length))
    ]
    small = {
        f"{RELEASE}/{COMMON}": object_archive(state),
        f"{RELEASE}/{CONFIG}": CONFIG_TEXT.encode(),
        TRACKER: RELEASE.encode(),
    }
    return FolderPlan(view.tensors, files, small)


def _chunk_slices(row: Row | None, tensor: SourceTensor) -> Iterator[Slices]:
    shape = tensor.shape
    if row is None:
        yield whole(shape)
    elif row.routed and len(shape) == 3:
        for expert in range(shape[0]):
            yield band(shape, expert, expert + 1)
    elif row.tp in ("column", "parts") and tensor.nbytes > _LARGE and shape[0] % _PARTS == 0:
        rows = shape[0] // _PARTS
        for part in range(_PARTS):
            yield band(shape, part * rows, (part + 1) * rows)
    else:
        yield whole(shape)


def pad_vocab_size(vocab_size: int, divisible_by: int) -> int:
    """Return the number of rows of Megatron's embedding: a multiple of `divisible_by`."""
    return -(-vocab_size // divisible_by) * divisible_by


#: Part of the table of tensors -> its TE modules. A norm that TE fuses into the next linear is not one.
MODULES: dict[str, tuple[str, ...]] = {
    "model": ("decoder.final_norm", "output_layer"),
    "M": ("mixer.in_proj", "mixer.out_proj"),
    "*": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "E": (
        "pre_mlp_layernorm",
        "mlp.fc1_latent_proj",
        "mlp.fc2_norm",
        "mlp.fc2_latent_proj",
        "mlp.experts.experts.linear_fc1",
        "mlp.experts.experts.linear_fc2",
        "mlp.shared_experts.linear_fc1",
        "mlp.shared_experts.linear_fc2",
    ),
    "-": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "mtp_in": ("enorm", "hnorm", "eh_proj"),
    "mtp_out": ("final_layernorm",),
}
#: Content of each `_extra_state` object: torch.save([None]), because Megatron stores lists.
EXTRA_STATE = object_archive([None])
_ROUTED = ".experts.experts."
#: End of a module's name -> field of the config without which it is not built.
_NEEDS = {"_latent_proj": "moe_latent_size", ".fc2_norm": "moe_use_norm_before_up_proj"}


def extra_state_keys(config: Nemotron3Config) -> Iterator[str]:
    """Yield the keys of the objects, one for each expert, for experts that are stored as one stack."""
    for prefix in prefixes(config):
        for module in MODULES[prefix.part]:
            if any(module.endswith(end) and not getattr(config, field) for end, field in _NEEDS.items()):
                continue
            shards = config.num_moe_experts if _ROUTED in module else 1
            for shard in range(shards or 0):
                yield f"{prefix.megatron}{module}._extra_state/shard_{shard}_{shards}"
