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
    "extra",
    [
        ("--grad-reduce-in-bf16",),
        ("--main-grads-dtype", "bf16"),
        (FSDP, "bf16"),
        ("--grad-reduce-in-bf16", LOCAL, "*router*"),
    ],
)
def test_bf16_gradients_with_mtp(extra: tuple[str, ...]) -> None:
    (message,) = warned(extra)
    option = " ".join(extra[:2]) if "dtype" in extra[0] else extra[0]
    assert message.startswith(f"warning: {option} accumulates ")
    assert "until reduction was in FP32" in message and "2606.15007" in message


@pytest.mark.parametrize(
    ("extra", "name"),
    [
        ((), "super"),
        (("--main-grads-dtype", "fp32"), "super"),
        (("--grad-reduce-in-bf16", LOCAL, "all"), "super"),
        (("--grad-reduce-in-bf16", LOCAL, "*norm*", "*output_layer.weight"), "super"),
        (("--grad-reduce-in-bf16",), "nano"),  # no MTP
    ],
)
def test_harmless(extra: tuple[str, ...], name: str) -> None:
    assert warned(extra, name) == []
