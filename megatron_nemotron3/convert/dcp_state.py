"""Arguments and iteration of checkpoints in torch's own format (fsdp_dtensor, torch_dcp).

They have neither common.pt nor `common_state`: each entry of the state is an object of its own in the index,
`args`, `iteration`, `checkpoint_version`, …, pickled by torch.save.
"""

from __future__ import annotations

from typing import Any

from megatron_nemotron3.checkpoint import describe
from megatron_nemotron3.checkpoint.archive import ArchiveError, crc_problem, read_at, records
from megatron_nemotron3.checkpoint.metadata import CheckpointIndex
from megatron_nemotron3.checkpoint.read import opened
from megatron_nemotron3.checkpoint.unpickle import loads

_NAMES = ("args", "iteration", "checkpoint_version")
#: Larger entries are not read.
_LIMIT = 64 << 20


def dcp_state(index: CheckpointIndex) -> dict[str, Any]:
    """What `describe.common_state` gives for torch_dist folders: classes as `Inert`; entries may lack.

    Raises:
        CheckpointError: an entry is damaged or names something that is not data.
    """
    state: dict[str, Any] = {}
    for name in _NAMES:
        if (place := index.objects.get(name)) is None:
            continue
        with opened(index.folder / place.file) as descriptor:
            found = {record.name: record for record in records(descriptor, place.offset, place.length)}
            record = found.get("data.pkl")
            if record is None or record.size > _LIMIT:
                raise ArchiveError(f"{name} at byte {place.offset:,} has no data.pkl of usual size")
            if record.crc and (problem := crc_problem(descriptor, record)):
                raise ArchiveError(problem)
            data = bytes(read_at(descriptor, record.offset, record.size))
            state[name] = loads(data, describe._TABLE, stubs=describe._STUBS, persistent=describe._nothing)
    return state
