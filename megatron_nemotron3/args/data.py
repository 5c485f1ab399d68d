"""Where tokens come from and checkpoints go. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_nemotron3.models import Nemotron3Config


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Paths of a run. None or empty: not emitted, and Megatron's default holds."""

    #: `--data-path`: one prefix, or weights and prefixes in turn.
    data_path: tuple[str, ...] = ()
    #: `--split`, for example "99,1,0".
    split: str | None = None
    data_cache_path: str | None = None
    #: Random tokens instead of a data set.
    mock_data: bool = False
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    #: Only for tokenizers that do not know their own (NullTokenizer).
    vocab_size: int | None = None
    save: str | None = None
    load: str | None = None
    tensorboard_dir: str | None = None


def mock_data(config: Nemotron3Config, *, save: str | None = None) -> TrainingData:
    """Random tokens over the model's vocabulary: no files needed. For smoke runs and benchmarks."""
    return TrainingData(
        mock_data=True, tokenizer_type="NullTokenizer", vocab_size=config.vocab_size, save=save, load=save
    )
