"""Conversations as tokens and marks, and rows of them: against transformers and against their definition."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron_nemotron3.train.data import train_tokenizer
from megatron_nemotron3.train.data.conversations import Encoder, read_conversations
from megatron_nemotron3.train.data.packing import PackedConversations, first_fit

TURNS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: The same, with the marks of transformers.
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>\n{% endgeneration %}{% else %}{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
#: Prompts begin a thought; turns hold an empty one, and history none, as in templates of reasoning models.
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think>\n{% endif %}"
)


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_tokenizer(folder: Path, template: str | None = TURNS) -> Path:
    """A small tokenizer with a chat template."""
    words = " ".join(f"<|user|> <|assistant|> <|system|> <|end|> {i} apples and pears" for i in range(40))
    train_tokenizer([words], 320, folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config if template is None else {**config, "chat_template": template}))
    return folder


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


CHAT = [
    say("user", "2 apples?"),
    say("assistant", "yes, 2"),
    say("user", "and pears"),
    say("assistant", "3 pears"),
]


@pytest.mark.parametrize("template", [TURNS, MARKED])
def test_the_assistants_tokens_are_trained(tmp_path: Path, template: str) -> None:
    encoder = Encoder(write_tokenizer(tmp_path / "t", template))
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]))
    found = encoder.encode(chat)
    assert found.ids == encoder.tokenizer.apply_chat_template(CHAT)["input_ids"]
    said = [i for i, mine in zip(found.ids, found.trained, strict=True) if mine]
    assert encoder.tokenizer.decode(said) == "yes, 2<|end|>\n3 pears<|end|>\n"


def test_the_prompt_of_a_thought(tmp_path: Path) -> None:
    """The prompt ends in `<think>` and a new line, the turn has `<think></think>`."""
    encoder = Encoder(write_tokenizer(tmp_path / "t", THINKING))
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT[:2]}]))
    found = encoder.encode(chat)
    said = encoder.tokenizer.decode([i for i, mine in zip(found.ids, found.trained) if mine])
    assert said in ("</think>yes, 2<|end|>\n", "/think>yes, 2<|end|>\n")
    (chat,) = read_conversations(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]))
    with pytest.raises(ValueError, match=r"c.jsonl:1: message 2 reads differently once others follow it"):
        encoder.encode(chat)
    with pytest.raises(ValueError, match="has no chat template"):
        Encoder(write_tokenizer(tmp_path / "none", None))


def test_system_messages_begin_conversations(tmp_path: Path) -> None:
    lines = [{"messages": [say("system", "a"), *CHAT, say("system", "b"), *CHAT]}, {"messages": CHAT}]
    found = list(read_conversations(write_lines(tmp_path / "c.jsonl", lines)))
    assert [len(one.messages) for one in found] == [5, 5, 4]
    assert [one.place[-2:] for one in found] == [":1", ":1", ":2"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "c.jsonl:2: not JSON"),
        ("[]", 'c.jsonl:2: give an object with a list "messages"'),
        ('{"messages": []}', 'c.jsonl:2: give an object with a list "messages"'),
        ('{"messages": [{"content": "x"}]}', 'c.jsonl:2: every message is an object with "role"'),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + line + "\n")
    with pytest.raises(ValueError) as raised:
        list(read_conversations(path))
    assert message in str(raised.value)


def test_first_fit() -> None:
    """Against a search through all bins."""
    generator = random.Random(1)
    for n in (0, 1, 2, 3, 50, 300):
        lengths = [generator.randint(1, 40) for _ in range(n)]
        expected: list[list[int]] = []
        for index, length in enumerate(lengths):
            fitting = (b for b in expected if sum(lengths[i] for i in b) + length <= 64)
            if (found := next(fitting, None)) is None:
                expected.append(found := [])
            found.append(index)
        assert first_fit(lengths, 64) == expected
    with pytest.raises(ValueError, match="a length of 65 does not fit 64"):
        first_fit([3, 65], 64)


def test_rows(tmp_path: Path) -> None:
    """Every conversation is whole and in one row; labels stay inside it; only the assistant counts."""
    generator = random.Random(2)
    chats = []
    for i in range(40):
        asked, answered = generator.randint(1, 9), generator.randint(1, 9)
        chats.append([say("user", "apples " * asked), say("assistant", f"{i} pears " * answered)])
    chats.append([say("user", "only a question")])
    chats.append([say("user", "long"), say("assistant", "apples and pears " * 99)])
    path = write_lines(tmp_path / "c.jsonl", [{"messages": chat} for chat in chats])
    folder = str(write_tokenizer(tmp_path / "t"))
    packed = PackedConversations(str(path), folder, 256, 4)
    assert (packed.conversations, packed.too_long, packed.untrained) == (40, 1, 1)
    encoder = Encoder(folder)
    expected = {}
    for chat in list(read_conversations(path))[:40]:
        encoded = encoder.encode(chat)
        expected[tuple(encoded.ids)] = encoded.trained
    for index in range(len(packed)):
        row = packed.row(index)
        assert row.borders[0] == 0 and row.borders[-1] == 256
        for start, end in zip(row.borders[:-1], row.borders[1:]):
            real = ~row.padding[start:end]
            assert real.tolist() == sorted(real.tolist(), reverse=True), "padding only at the end"
            ids = tuple(row.tokens[start:end][real].tolist())
            assert (row.tokens[start:end][~real] == 0).all()
            assert row.positions[start:end].tolist() == list(range(end - start))
            counted = row.loss_mask[start:end].tolist()
            if not ids:
                assert end == 256 and not any(counted)
                continue
            assert (end - start) % 4 == 0
            trained = expected.pop(ids)
            assert counted == [*map(float, trained[1:]), *[0.0] * (end - start - len(ids) + 1)]
            assert row.labels[start:end].tolist() == [*ids[1:], *[0] * (end - start - len(ids) + 1)]
    assert not expected, "every conversation once"


def test_arrays_are_kept_until_file_or_tokenizer_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}])
    folder = write_tokenizer(tmp_path / "t")

    def tokens() -> int:
        return PackedConversations(str(path), str(folder), 256, cache=str(tmp_path / "k")).tokens

    first = tokens()
    with monkeypatch.context() as patch:
        patch.setattr("megatron_nemotron3.train.data.packing.Encoder", None)
        assert tokens() == first
    write_lines(path, [{"messages": CHAT}, {"messages": CHAT}])
    assert tokens() == 2 * first
    write_tokenizer(folder, TURNS.replace("<|end|>", ""))
    assert tokens() < 2 * first


def test_nothing_to_train_on_is_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}, {"messages": CHAT[:1]}])
    folder = str(write_tokenizer(tmp_path / "t"))
    with pytest.raises(ValueError, match="none of 2 conversations .* 1 are longer than 16 tokens, 1 have no"):
        PackedConversations(str(path), folder, 16)
