"""`nemotron3 chat`: states are kept from turn to turn, and answers are those of a model that reads it all."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from megatron_nemotron3 import cli
from megatron_nemotron3.inference.generate import chat as chat_module
from megatron_nemotron3.inference.generate.chat import Chat, Template
from megatron_nemotron3.inference.generate.checkpoint_folder import find_checkpoint
from megatron_nemotron3.inference.generate.decode import read_weights
from megatron_nemotron3.inference.generate.engine import Engine
from megatron_nemotron3.inference.generate.prompts import GenerationOptions, generate
from megatron_nemotron3.inference.generate.text import OutputText, Tokenizer
from tests.support.engines import agreeing_tensors
from tests.support.generation_folders import small_config
from tests.support.hf_folders import write_hf
from tests.train.data.test_conversations import THINKING, TURNS, write_tokenizer

QUESTIONS = ("2 apples and pears", "3 pears", "and 7 apples?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights whose context holds several turns."""
    path = tmp_path_factory.mktemp("chat") / "hf"
    config = small_config().but(max_position_embeddings=512)
    write_hf(path, config, values=agreeing_tensors(config, 0.05, seed=4), dtype="float32")
    return path


def opened(folder: Path, tokenizer: Path, template: bool = True, draft: int = 0, new: int = 12) -> Chat:
    found = find_checkpoint(folder).open(None)
    engine = Engine(read_weights(found.hf_view(), found.config, mtp=draft > 0))
    words = Tokenizer(tokenizer)
    how = GenerationOptions(new, draft=draft)
    return Chat(engine, words, how, Template(tokenizer) if template else None)


def ignore(_: OutputText) -> None:
    pass


def read_at_once(chat: Chat) -> list[int]:
    """The answer after the same tokens by a model that has not seen any of them before."""
    how = GenerationOptions(chat.options.max_new_tokens, stop=chat.tokenizer.stop)
    return generate(chat.engine, [chat.context], how).rows[0].tokens


@pytest.mark.parametrize("draft", [0, 2])
@pytest.mark.parametrize("template", [True, False])
def test_turns_read_only_what_is_new(folder: Path, tmp_path: Path, template: bool, draft: int) -> None:
    chat = opened(folder, write_tokenizer(tmp_path, TURNS if template else None), template, draft)
    reads = []
    for question in QUESTIONS:
        answer = chat.say(question, ignore).rows[0].tokens
        reads.append(chat.read)
        assert answer == read_at_once(chat)[: len(answer)]
        assert question in chat.tokenizer.decode(chat.context[-chat.read :])
    # Answers are in the context, but they were not read again.
    assert len(chat.context) > sum(reads)
    chat.reset()
    assert chat.messages == [] and chat._seen == []


def test_a_template_that_rewrites_history_is_read_again(folder: Path, tmp_path: Path) -> None:
    """A template that drops thoughts: the kept states would be those of another text."""
    chat = opened(folder, write_tokenizer(tmp_path, THINKING))
    for question in QUESTIONS[:2]:
        answer = chat.say(question, ignore).rows[0].tokens
        assert answer == read_at_once(chat)[: len(answer)]
    assert chat.read == len(chat.context)  # all of it


def test_an_interrupted_answer_counts_as_far_as_it_goes(folder: Path, tmp_path: Path) -> None:
    chat = opened(folder, write_tokenizer(tmp_path), new=40)
    tokens = []

    def stop(answer: OutputText) -> None:
        tokens.append(answer.take())
        if len(tokens) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        chat.say(QUESTIONS[0], stop)
    assert len(chat.messages) == 2 and chat.messages[1]["content"].startswith("".join(tokens))
    answer = chat.say(QUESTIONS[1], ignore).rows[0].tokens
    assert chat.read == len(chat.context)  # a pass may have been cut in two
    assert answer == read_at_once(chat)[: len(answer)]


def test_a_full_context_is_said_and_the_conversation_stays(folder: Path, tmp_path: Path) -> None:
    chat = opened(folder, write_tokenizer(tmp_path), new=300)
    chat.say(QUESTIONS[0], ignore)
    before = list(chat.messages)
    with pytest.raises(ValueError, match="tokens, and the model's context 512"):
        chat.say("apples " * 500, ignore)
    assert chat.messages == before
    answer = chat.say(QUESTIONS[1], ignore).rows[0]  # what is left
    assert len(chat.context) + len(answer.tokens) == 512


def run(monkeypatch: pytest.MonkeyPatch, lines: str, *words: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    return cli.main(["chat", *words, "--max-new-tokens", "8", "--temperature", "0"])


def test_a_pipe(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One answer a line, the same again after /reset, and nothing after /exit."""
    words = (str(folder), "--tokenizer", str(write_tokenizer(tmp_path)))
    assert run(monkeypatch, "2 apples\n/reset\n\n2 apples\n/exit\n3 pears\n", *words) == 0
    out = capsys.readouterr().out
    half = len(out) // 2
    assert out[:half] == out[half:] and out.endswith("\n")
    assert run(monkeypatch, "2 apples\n", *words, "--draft", "2") == 0
    assert capsys.readouterr().out == out[:half]


def test_variables_of_the_template(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chat` and `generate --chat` read the same text with them."""
    tokenizer = write_tokenizer(tmp_path, "{% if fruit %}only {{ fruit }}: {% endif %}" + TURNS)
    given = ["--tokenizer", str(tokenizer), "--chat-template-kwargs", '{"fruit": "pears"}']
    chats: list[Chat] = []
    monkeypatch.setattr(chat_module, "_loop", chats.append)
    assert cli.main(["chat", str(folder), *given]) == 0
    chats[0].say("2 apples", ignore)
    assert chats[0].tokenizer.decode(chats[0].context).startswith("only pears: ")
    words = ["generate", str(folder), *given, "--prompt", "2 apples", "--json"]
    assert cli.main([*words, "--chat"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["texts"]
    assert row["prompt_tokens"] == len(chats[0].context)
    assert cli.main(words) == 2
    assert "--chat-template-kwargs goes with --chat: drop it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--system", "x", "--tokenizer", "{plain}"], "no chat template"),
        (["--chat-template-kwargs", '{{"fruit": 1}}'], "does not use fruit: leave it out"),
        (["--chat-template-kwargs", "fruit"], "--chat-template-kwargs fruit: not JSON"),
        (["--tokenizer", "{missing}"], "missing"),
    ],
)
def test_wrong_words(
    words: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = write_tokenizer(tmp_path / "plain", None)
    given = [word.format(plain=plain, missing=tmp_path / "none") for word in words]
    if "--tokenizer" not in given:
        given += ["--tokenizer", str(plain)]
    monkeypatch.setattr(chat_module, "_loop", lambda chat: pytest.fail("it began"))
    assert cli.main(["chat", str(folder), *given]) == 2
    assert message in capsys.readouterr().err
