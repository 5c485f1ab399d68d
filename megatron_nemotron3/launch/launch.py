"""Everything that a training run is made of, in one frozen dataclass.

launch = Launch.of("super", tp=2, ep=64, dp=64, backend="te")
flags(launch)                        # what to tell Megatron
check(launch)                        # which rules it violates
explain(launch)                      # where every value comes from
build(launch)                        # the model (needs torch and megatron-core)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from megatron_nemotron3.launch.flag import parse
from megatron_nemotron3.launch.layout import ParallelLayout
from megatron_nemotron3.launch.performance import HARDWARE, Tuned, gpu_named, tuned
from megatron_nemotron3.launch.schedule import TrainingSchedule
from megatron_nemotron3.launch.versions import chosen
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.models import tiny as make_tiny
from megatron_nemotron3.precision.formats import EMULATED, FORMATS, NVFP4
from megatron_nemotron3.precision.settings import Emulation, parse_emulation
from megatron_nemotron3.precision.table import bf16_layers

PRECISIONS = ("bf16", "fp32", *FORMATS)
BACKENDS = ("auto", "te", "torch")


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Paths of a run. No flag is emitted for None and empty values; then Megatron's default applies."""

    #: `--data-path`: one prefix, or weights and prefixes alternately.
    data_path: tuple[str, ...] = ()
    #: `--split`, for example "99,1,0".
    split: str | None = None
    data_cache_path: str | None = None
    #: Random tokens instead of a data set.
    mock_data: bool = False
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    #: Only for tokenizers that have no vocabulary of their own (NullTokenizer).
    vocab_size: int | None = None
    save: str | None = None
    load: str | None = None
    tensorboard_dir: str | None = None


def mock_data(config: Nemotron3Config, *, save: str | None = None) -> TrainingData:
    """Random tokens over the model's vocabulary, for smoke runs and benchmarks: no files are needed."""
    return TrainingData(
        mock_data=True, tokenizer_type="NullTokenizer", vocab_size=config.vocab_size, save=save, load=save
    )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One training run: model, layout, number formats, implementation, schedule, data, and more options.

    Raises:
        ValueError: unknown precision or backend, an unsupported megatron-core, or `extra` starts with a
        value.
    """

    config: Nemotron3Config
    layout: ParallelLayout = ParallelLayout()
    #: One of `PRECISIONS`.
    precision: str = "bf16"
    #: "auto": a GPU with or without Transformer Engine. "te": every fused path of Transformer Engine.
    #: "torch": neither Transformer Engine nor Apex, any device. `flags.py` lists what each needs.
    backend: str = "auto"
    #: None: the caller passes batch, length and learning rate; only `--micro-batch-size 1` is emitted, and
    #: the rules on them do not apply.
    schedule: TrainingSchedule | None = None
    #: None: no data flags.
    data: TrainingData | None = None
    #: More arguments for Megatron. An option given here replaces the one emitted.
    extra: Sequence[str] = ()
    #: Path of the per-module precision file, which nvfp4 requires.
    te_precision_config_file: str | None = None
    #: Accept nvfp4 without that file, which quantizes more than the published recipe.
    allow_plain_nvfp4: bool = False
    #: Compute nvfp4 or mxfp8 in the torch backend's linears on any device, instead of on its hardware.
    emulate: Emulation | None = None
    #: Type of the GPU that will train, such as "gb200": its published performance options are emitted, which
    #: need backend "te". None: only the options that every GPU needs.
    gpu: str | None = None
    #: Published performance options to leave out, such as "moe-router-fusion".
    without: Sequence[str] = ()
    #: Compute capability of the GPU that will train, (10, 0) for a B200; None: as `capability` says.
    compute_capability: tuple[int, int] | None = None
    #: On by default also at dp=1, as in NVIDIA's launches: its checkpoints do not load into the plain
    #: optimizer, so a run that started without it could not grow later.
    distributed_optimizer: bool = True
    #: Whether `train/pretrain_script.py` will run, which does some things that the stock scripts cannot.
    own_script: bool = False
    #: Version of megatron-core that the flags are for, such as "0.19" or "main"; None: the installed one.
    megatron_core: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "extra", tuple(self.extra))
        object.__setattr__(self, "without", tuple(self.without))
        known = (("precision", self.precision, PRECISIONS), ("backend", self.backend, BACKENDS))
        for what, value, values in known:
            if value not in values:
                raise ValueError(f"unknown {what} {value!r}: use one of {', '.join(values)}")
        chosen(self.megatron_core)
        parse(self.extra)
        self._check_gpu()

    def _check_gpu(self) -> None:
        """Bring `gpu` into the form of the table, and check what it needs."""
        if self.gpu is None:
            if self.without:
                raise ValueError(f"without={self.without} leaves out options of a GPU: give gpu=, too")
            return
        object.__setattr__(self, "gpu", gpu_named(self.gpu))
        if self.backend != "te":
            raise ValueError(
                f"gpu {self.gpu}: its published options are for Transformer Engine's modules, and backend "
                f"{self.backend} has others: use backend te, or leave gpu out"
            )
        _ = self.tuned  # names in `without` that do not exist

    @classmethod
    def of(
        cls,
        model: str | Nemotron3Config,
        layout: ParallelLayout | None = None,
        *,
        tiny: bool = False,
        emulate: bool | str | Emulation | None = None,
        **settings: Any,
    ) -> Launch:
        """Describe a launch in few words: `Launch.of("super", tiny=True, tp=2, precision="fp32")`.

        Args:
            model: a catalog name ("super") or a config of your own.
            layout: None: from the sizes among `settings` (`tp=2`, `dp=4`), by default one rank.
            tiny: take the small form of the model.
            emulate: True: the published recipe; text: a value of NEMOTRON3_EMULATE, such as "nvfp4,sr=0".
            settings: sizes of `ParallelLayout`, and other fields of `Launch`.

        Raises:
            TypeError: unknown names in `settings`, or `layout` and sizes of one.
            ValueError: unknown model, a size that is not positive, or as `Launch`.
        """
        names = [field.name for field in fields(ParallelLayout)]
        sizes = {name: settings.pop(name) for name in names if name in settings}
        if layout is not None and sizes:
            raise TypeError(f"give either layout= or its sizes ({', '.join(sizes)})")
        config = get(model) if isinstance(model, str) else model
        return cls(
            config=make_tiny(config) if tiny else config,
            layout=layout or ParallelLayout(**sizes),
            emulate=_meant_emulation(emulate, settings.get("precision", NVFP4)),
            **settings,
        )

    @property
    def version(self) -> str:
        """Minor version of megatron-core that the flags are for."""
        return chosen(self.megatron_core)

    @property
    def capability(self) -> tuple[int, int] | None:
        """`compute_capability`, else that of `gpu`; None if neither is known."""
        if self.compute_capability is not None or self.gpu is None:
            return self.compute_capability
        return HARDWARE[self.gpu].capability

    @cached_property
    def tuned(self) -> Tuned | None:
        """What is published for the model on `gpu`; None without one."""
        if self.gpu is None:
            return None
        return tuned(self.config, self.gpu, self.precision, self.layout, self.version, self.without)

    @cached_property
    def options(self) -> Mapping[str, tuple[str, ...]]:
        """Options of `extra`, and those of `gpu` that `extra` does not replace: name to values."""
        published = self.tuned.options if self.tuned else {}
        return {**published, **{flag.name: flag.values for flag in parse(self.extra)}}

    @property
    def kinds(self) -> frozenset[str]:
        """Layer kinds of decoder and MTP."""
        return frozenset(self.config.pattern + (self.config.mtp_pattern or ""))

    @property
    def seq_length(self) -> int:
        """Tokens per sequence."""
        return (self.schedule.seq_length if self.schedule else None) or self.config.seq_length

    @property
    def micro_batch_size(self) -> int:
        """Sequences per rank and microbatch."""
        return self.schedule.micro_batch_size if self.schedule else 1

    @property
    def microbatches(self) -> int:
        """Microbatches of a step on each data-parallel rank; 1 without a global batch size."""
        sequences = (self.schedule.global_batch_size if self.schedule else None) or 1
        return max(1, sequences // self.layout.dp // self.micro_batch_size)

    @property
    def quantized(self) -> bool:
        """Whether GEMMs run below BF16."""
        return self.precision in FORMATS

    @property
    def bf16_at_end(self) -> int:
        """Layers at the end that stay in BF16, with `extra` taken into account."""
        kept = bf16_layers(self.config, self.precision).end
        return int(self.option("--num-layers-at-end-in-bf16", str(kept)))

    @property
    def bf16_at_start(self) -> int:
        """Layers at the start that stay in BF16, with `extra` taken into account."""
        kept = bf16_layers(self.config, self.precision).start
        return int(self.option("--num-layers-at-start-in-bf16", str(kept)))

    @property
    def precision_file(self) -> str | None:
        """Path of the precision file, with `extra` taken into account; None without one."""
        return (self.options.get("--te-precision-config-file") or (self.te_precision_config_file,))[0]

    def option(self, name: str, default: str) -> str:
        """Return the first value of an option of `options`, or `default` if it is not there or has none."""
        return (self.options.get(name) or (default,))[0]

    def first_of(self, *names: str) -> str | None:
        """Return the first of these options that is in `options`, or None."""
        return next((name for name in names if name in self.options), None)


def _meant_emulation(emulate: bool | str | Emulation | None, precision: str) -> Emulation | None:
    if isinstance(emulate, str):
        return parse_emulation(emulate)
    if emulate is True:
        return Emulation(format=precision if precision in EMULATED else NVFP4)
    return emulate or None
