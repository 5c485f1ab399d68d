"""A pytest plugin: our converter in place of Bridge's own, before Bridge's test modules are imported."""

from __future__ import annotations

from megatron.bridge.models.nemotronh import nemotron_h_bridge

from megatron_nemotron3.bridge import Nemotron3Bridge

nemotron_h_bridge.NemotronHBridge = Nemotron3Bridge
