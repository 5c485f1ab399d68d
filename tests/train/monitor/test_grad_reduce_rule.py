"""The rule on gradients accumulated in BF16, and what counts as that."""

from __future__ import annotations

import pytest

from megatron_nemotron3.launch import Launch, check

LOCAL = "--ddp-param-name-patterns-for-fp32-local-accumulation"
FSDP = "--megatron-fsdp-main-grads-dtype"


def warned(extra: tuple[str, ...], name: str = "super") -> list[str]:
    violations = check(Launch.of(name, extra=extra))
    return [str(v) for v in violations if v.rule == "grad-reduce-in-bf16"]


@pytest.mark.parametrize(
    ("extra", "option"),
    [
        (("--grad-reduce-in-bf16",), "--grad-reduce-in-bf16"),
        (("--main-grads-dtype", "bf16"), "--main-grads-dtype bf16"),
        ((FSDP, "bf16"), f"{FSDP} bf16"),
        (("--grad-reduce-in-bf16", LOCAL, "*router*"), "--grad-reduce-in-bf16"),
        (("--main-grads-dtype", "fp32"), None),
        (("--grad-reduce-in-bf16", LOCAL, "all"), None),
        (("--grad-reduce-in-bf16", LOCAL, "*norm*", "*output_layer.weight"), None),
    ],
)
def test_bf16_gradients_with_mtp(extra: tuple[str, ...], option: str | None) -> None:
    found = warned(extra)
    assert bool(found) == bool(option)
    for message in found:
        assert message.startswith(f"warning: {option} accumulates ")
        assert "until reduction was in FP32" in message and "2606.15007" in message


def test_a_model_without_mtp() -> None:
    assert warned(("--grad-reduce-in-bf16",), "nano") == []
