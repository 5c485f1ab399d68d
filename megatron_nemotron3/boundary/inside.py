"""Between the pipeline stages of one module: upstream's own communicator."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel import multimodule_communicator as stock


def between_stages(stages: Any, sends: str, receives: str, tensor: Any, shape: Any) -> Any:
    """One call of upstream's `P2PCommunicator`.

    Args:
        sends, receives: "forward", "backward" or "" for nothing.
        tensor: [rows, hidden] or 3-D, to send.
        shape: as the schedule gives it; not used with variable_seq_lengths.

    Returns: what was received.
    """
    method = "_".join(f"{verb}_{way}" for verb, way in (("send", sends), ("recv", receives)) if way)
    arguments: dict[str, Any] = {"tensor_shapes": shape} if receives else {}
    # Upstream asks whether this is the end of the pipeline that such a call has no partner at; it is not.
    ahead = method in ("send_forward", "recv_backward", "send_forward_recv_backward")
    arguments["is_last_stage" if ahead else "is_first_stage"] = False
    tensors = (stock._prepare_tensor_for_comm(tensor),) if sends else ()
    received = getattr(stages, method)(*tensors, **arguments)
    return stock._restore_tensor_from_comm(received) if receives else None
