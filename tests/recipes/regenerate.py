"""Write tests/golden/recipes anew: python -m tests.recipes.regenerate (from the repository's folder)."""

from __future__ import annotations

from tests.recipes.cases import CASES, GOLDEN, commands, golden_text


def main() -> None:
    """One file for each case; what no case writes is removed."""
    GOLDEN.mkdir(exist_ok=True)
    texts = {f"{name}.txt": golden_text(words) for name, words in commands(CASES).items()}
    for file in GOLDEN.glob("*.txt"):
        if file.name not in texts:
            file.unlink()
    for name, text in texts.items():
        (GOLDEN / name).write_text(text)
    print(f"{len(texts)} files in {GOLDEN}")


if __name__ == "__main__":
    main()
