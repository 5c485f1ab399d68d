"""A small model with a tokenizer, in every kind of folder that `nemotron3 generate` reads."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_nemotron3.checkpoints.convert import from_hf
from megatron_nemotron3.cli import main
from megatron_nemotron3.inference.generate.text import Tokenizer
from megatron_nemotron3.models import Nemotron3Config, get
from megatron_nemotron3.train.data import prepare
from tests.support.engines import agreeing_tensors
from tests.support.hf_folders import write_hf

#: Contains characters of two, three and four bytes.
TEXT = "".join(f"line {i}: the naïve café costs {i * 7 % 23} € – good, 𝄞 or not\n" for i in range(1500))
VOCABULARY, TOKENS = 512, 320


@dataclass(frozen=True)
class Folders:
    config: Nemotron3Config
    hf: Path
    run: Path
    tokenizer: Path

    @property
    def megatron(self) -> Path:
        return self.run / "checkpoints"


def small_config(mtp: bool = True) -> Nemotron3Config:
    """Three layers, and an embedding with more rows than the tokenizer has tokens."""
    config = get("super-tiny").but(pattern="M*E", hidden_size=64, vocab_size=VOCABULARY, num_moe_experts=8)
    return config if mtp else config.but(mtp_pattern=None, mtp_num_layers=0)


def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    """A Hugging Face folder, and a run as `nemotron3 train` leaves it: arguments name its data."""
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    run, hf = folder / "run", folder / "hf"
    prepared = prepare(text, run / "data", vocab_size=TOKENS)
    config = small_config()
    write_hf(hf, config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    plain = from_hf.common_state

    def as_trained(args: object) -> object:
        vars(args).update(
            vocab_size=None,
            # Hugging Face states the number of blocks, a run the number of depths.
            hybrid_layer_pattern=config.full_pattern,
            mtp_num_layers=config.mtp_num_layers,
            tokenizer_model=prepared.tokenizer.tokenizer_model,
            data_path=[prepared.prefix],
            split=prepared.split,
        )
        return plain(args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(from_hf, "common_state", as_trained)
        words = ["convert", "from-hf", str(hf), str(run / "checkpoints"), "--workers", "1"]
        assert main([*words, "--dtype", "float32"]) == 0
    tokenizer = Path(prepared.folder) / "tokenizer"
    assert Tokenizer(tokenizer).vocab_size == TOKENS
    for file in tokenizer.iterdir():
        shutil.copy(file, hf)
    return Folders(config, hf, run, tokenizer)
