"""The smallest tokenizer.json that the library reads."""

SMALLEST = '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
