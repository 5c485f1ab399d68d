"""Forward and backward of a whole model: our torch layers against transformers' NemotronHForCausalLM.

    OMP_NUM_THREADS=2 python benchmarks/train_step.py [--quick] [--packed]

Same weights, same tokens, FP32, batch 1, on the CPU; the logits must agree before anything is timed. Each
side runs in a process of its own; they take turns, and the medians are compared. Peak memory is the increase
of resident memory over the idle model during one step (activations and gradients, without weights).
transformers runs with SDPA attention and the fastest of its expert implementations at the first length. Our
side is Megatron's stock HybridModel in training mode, with the load-balancing loss that transformers lacks.
Where our layers compute dense products by oneDNN (`cpu/products.py`), transformers takes torch's library.

`--packed` times our model with two MTP depths alone, on rows of four documents: borders as stock Megatron
takes them against the same tokens with padded borders, which our MTP layer handles. CPU seconds, alternately.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

from common import (
    MIB,
    Worker,
    available_memory,
    do_not_clamp_time_steps,
    in_turn,
    machine,
    model,
    parser,
    peak_memory,
    print_table,
    timed,
)

LENGTHS = (512, 2048, 8192)
#: Largest difference of logits.
LOGITS_ATOL = 1e-3
EXPERT_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
#: Share of the available memory that a step may use.
MEMORY_SHARE = 0.8


class Side:
    """A model with one random set of weights: `logits`, `step` and `peak` for the same tokens."""

    def __init__(self, dtype: str = "float32") -> None:
        import torch

        from tests.support.world import world_of_one

        self.config = model()
        self.dtype = getattr(torch, dtype)
        self._stack = ExitStack()
        self._stack.enter_context(world_of_one())
        self.module = self.build()
        for length in (64, 64):
            self.step(length)

    def weights(self) -> tuple[Any, dict[str, Any]]:
        """Our model, and its weights under transformers' names."""
        from tests.support.model_mapping import megatron_model, randomize, to_transformers

        ours = megatron_model(self.config, bf16=self.dtype.itemsize == 2, params_dtype=self.dtype)
        randomize(ours, seed=6)
        state = {n: t for n, t in ours.state_dict().items() if t is not None}
        return ours, to_transformers(state, self.config)

    def build(self) -> Any:
        raise NotImplementedError

    def loss(self, tokens: Any, labels: Any) -> Any:
        raise NotImplementedError

    def batch(self, length: int) -> tuple[Any, Any]:
        """Tokens and labels [1, length]."""
        import torch

        generator = torch.Generator().manual_seed(length)
        stream = torch.randint(self.config.vocab_size, (1, length + 1), generator=generator)
        return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()

    def step(self, length: int) -> float:
        """Seconds of one forward and backward."""
        tokens, labels = self.batch(length)
        self.module.zero_grad(set_to_none=True)
        return timed(lambda: self.loss(tokens, labels).backward())

    def peak(self, length: int) -> int:
        """Bytes that one forward and backward adds to the idle model."""
        self.module.zero_grad(set_to_none=True)
        return peak_memory(lambda: self.step(length))

    def logits(self, length: int) -> Any:
        """[1, length, vocabulary] as a NumPy array."""
        import torch

        with torch.no_grad():
            return self.forward(self.batch(length)[0]).float().numpy()

    def forward(self, tokens: Any) -> Any:
        raise NotImplementedError


class Ours(Side):
    """Megatron's HybridModel with our torch layers."""

    def build(self) -> Any:
        return self.weights()[0].to(self.dtype).train()

    def forward(self, tokens: Any, labels: Any = None) -> Any:
        import torch

        positions = torch.arange(tokens.shape[1]).unsqueeze(0)
        return self.module(tokens, positions, None, labels=labels)

    def loss(self, tokens: Any, labels: Any) -> Any:
        return self.forward(tokens, labels).mean()


class Theirs(Side):
    """transformers' NemotronHForCausalLM on its torch path."""

    def build(self) -> Any:
        import transformers

        from tests.support.model_mapping import transformers_config

        config = transformers_config(self.config)
        config._attn_implementation = "sdpa"
        result = transformers.NemotronHForCausalLM(config).to(self.dtype).train()
        result.load_state_dict(self.weights()[1], strict=True)
        do_not_clamp_time_steps(result)
        return result

    def forward(self, tokens: Any) -> Any:
        return self.module(tokens).logits

    def loss(self, tokens: Any, labels: Any) -> Any:
        import torch.nn.functional as F

        return F.cross_entropy(self.forward(tokens).flatten(0, 1).float(), labels.flatten())

    def fastest_experts(self, length: int) -> str:
        """Choose the fastest expert implementation, and return its name."""
        seconds = {}
        for name in EXPERT_IMPLEMENTATIONS:
            self.module.config._experts_implementation = name
            seconds[name] = min(self.step(length) for _ in range(3))
        best = min(seconds, key=lambda name: seconds[name])
        self.module.config._experts_implementation = best
        return best


class Packed(Ours):
    """Our model with MTP on a row of four documents, each with padding behind it or none."""

    DEPTHS, DOCUMENTS, PADDING = 2, 4, 3

    def __init__(self) -> None:
        super().__init__()
        for padded in (False, True):
            self.packed_step(64, padded)

    def build(self) -> Any:
        self.config = self.config.but(mtp_pattern="*E", mtp_num_layers=self.DEPTHS)
        return super().build()

    def weights(self) -> tuple[Any, dict[str, Any]]:
        """Our model; transformers has no MTP to compare with."""
        from tests.support.model_mapping import megatron_model, randomize

        ours = megatron_model(
            self.config, mtp_num_layers=self.DEPTHS, mtp_use_repeated_layer=True, mtp_loss_scaling_factor=0.1
        )
        randomize(ours, seed=6)
        return ours, {}

    def packed_step(self, length: int, padded: bool) -> float:
        """CPU seconds of one forward and backward."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        tokens, labels = self.batch(length)
        each = length // self.DOCUMENTS
        borders = torch.arange(self.DOCUMENTS + 1, dtype=torch.int32) * each
        logical = torch.arange(self.DOCUMENTS + 1, dtype=torch.int32) * (each - self.PADDING)
        own = logical if padded else borders
        mask = (torch.arange(length) % each < each - self.PADDING).float().unsqueeze(0)
        self.module.zero_grad(set_to_none=True)
        start = time.process_time()
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=own,
            cu_seqlens_kv=own,
            cu_seqlens_q_padded=borders if padded else None,
            cu_seqlens_kv_padded=borders if padded else None,
            max_seqlen_q=each,
            max_seqlen_kv=each,
            total_tokens=length,
        )
        positions = (torch.arange(length) % each).unsqueeze(0)
        loss = self.module(
            tokens, positions, None, labels=labels, loss_mask=mask, packed_seq_params=params
        ).mean()
        loss.backward()
        return time.process_time() - start


def measure_packed(lengths: Any, repetitions: int) -> None:
    model, rows = Worker(Packed), []
    for length in lengths:
        calls = [lambda s=length, p=p: model.call("packed_step", s, p) for p in (False, True)]
        plain, padded = in_turn(calls, repetitions)
        rows.append([str(length), f"{plain:.3f}", f"{padded:.3f}", f"{padded / plain:.3f}"])
    print_table(["tokens", "no padding, CPU s", "padded borders, CPU s", "ratio"], rows)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="lengths 512 and 2048, three repetitions")
    arguments.add_argument("--lengths", type=int, nargs="+", default=None, help=f"default: {LENGTHS}")
    arguments.add_argument("--repetitions", type=int, default=None)
    arguments.add_argument("--ours-only", action="store_true", help="do not run transformers")
    arguments.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16: ours only"
    )
    arguments.add_argument("--packed", action="store_true", help="padded packs with MTP; ours only")
    args = arguments.parse_args()
    lengths = args.lengths or (LENGTHS[:2] if args.quick else LENGTHS)
    repetitions = args.repetitions or (3 if args.quick else 5)
    print(machine(), flush=True)
    if args.packed:
        measure_packed(lengths, repetitions)
        return
    ours = Worker(Ours, args.dtype)
    if args.ours_only or args.dtype != "float32":
        measure_ours(ours, lengths, repetitions)
        return
    theirs = Worker(Theirs)
    print("transformers' experts:", theirs.call("fastest_experts", lengths[0]), flush=True)
    compare(ours, theirs, lengths, repetitions)


def measure_ours(ours: Worker, lengths: Any, repetitions: int) -> None:
    rows = []
    for length in lengths:
        (seconds,) = in_turn([lambda s=length: ours.call("step", s)], repetitions)
        rows.append([str(length), f"{length / seconds:,.0f}", f"{ours.call('peak', length) / MIB:,.0f}"])
    print_table(["tokens", "ours tok/s", "ours peak MiB"], rows)


def compare(ours: Worker, theirs: Worker, lengths: Any, repetitions: int) -> None:
    import numpy as np

    rows: list[list[str]] = []
    per_token = 0.0  # of the other side's peak, to predict what does not fit
    for length in lengths:
        mine = ours.call("peak", length)
        if per_token * length > MEMORY_SHARE * available_memory():
            need = f"needs about {per_token * length / MIB:,.0f} MiB"
            (seconds,) = in_turn([lambda s=length: ours.call("step", s)], repetitions)
            rows.append([str(length), f"{length / seconds:,.0f}", need, "", f"{mine / MIB:,.0f}", "", "", ""])
            continue
        # Before timing, both sides must give the same logits.
        difference = float(np.abs(ours.call("logits", length) - theirs.call("logits", length)).max())
        if difference > LOGITS_ATOL:
            print(f"logits differ by {difference:.2g} at {length} tokens: limit {LOGITS_ATOL}", flush=True)
            if length == lengths[0]:
                raise SystemExit(1)
        other = theirs.call("peak", length)
        per_token = other / length
        a, b = in_turn([lambda s=length, w=w: w.call("step", s) for w in (ours, theirs)], repetitions)
        rows.append(
            [
                str(length),
                f"{length / a:,.0f}",
                f"{length / b:,.0f}",
                f"{b / a:.2f}",
                f"{mine / MIB:,.0f}",
                f"{other / MIB:,.0f}",
                f"{mine / other:.2f}",
                f"{difference:.1e}",
            ]
        )
        print(f"  {length} tokens done", flush=True)
    print_table(
        ["tokens", "ours tok/s", "HF tok/s", "ratio", "ours peak MiB", "HF peak MiB", "ratio", "logits diff"],
        rows,
    )


if __name__ == "__main__":
    main()
