"""The `_extra_state` entry that TransformerEngine's modules keep in a checkpoint, here always empty.

TE stores its FP8 scaling state there and asks for it when it loads; without an entry a strict load fails.
Megatron's own linears write None for the same reason.
"""

from __future__ import annotations

from typing import Any

import torch


class EmptyExtraState(torch.nn.Module):
    """A module whose checkpoints have the `_extra_state` its counterpart in TE has; loading ignores it."""

    def get_extra_state(self) -> None:
        """Nothing to keep."""

    def set_extra_state(self, state: Any) -> None:
        """Nothing to restore: FP8 scaling state of a TE run has no meaning here."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Plain state dicts may lack it; grouped linears of TE write one more for every further expert.
        name = f"{prefix}_extra_state"
        state_dict.setdefault(name, None)
        for key in [key for key in state_dict if key.startswith(name) and key != name]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *args)
