"""The task, the rewards and the start of `sort.toml`: put four letters in order.

    python recipes/sort/sorting.py runs/sort-data       # a fresh model, and examples to warm it up on

A model of 0.1 million parameters, made here, with a letter per token: small enough that every algorithm can be seen to
learn on two CPU cores within minutes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

LETTERS = "abcdefgh"
LENGTH = 4
END = "."
EXAMPLES = 2000


def rows(index: int, seed: int) -> dict[str, str]:
    """Problem number `index`: letters, repetition allowed, and the same in order."""
    letters = random.Random(f"{seed}/{index}").choices(LETTERS, k=LENGTH)
    return {"prompt": "".join(letters) + ">", "answer": "".join(sorted(letters))}


def in_order(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """The share of places that hold the right letter; 0 for an answer of another length."""
    return [_right(c, row["answer"]) for c, row in zip(completions, rows, strict=True)]


def _right(completion: str, answer: str) -> float:
    if len(completion) != len(answer):
        return 0.0
    return sum(a == b for a, b in zip(completion, answer, strict=True)) / len(answer)


_numbers = random.Random(0)


def at_random(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """A reward that has nothing to do with the answer: whatever learns from it learns from a mistake of ours."""
    return [_numbers.random() for _ in completions]


def examples(seed: int = 1) -> Iterator[dict[str, str]]:
    """For the warm-up: answers in the right form, a quarter of them in order. The rest is for RL to find."""
    for index in range(EXAMPLES):
        row = rows(index, seed)
        answer = row["answer"]
        if index % 4:
            answer = "".join(random.Random(index).sample(answer, len(answer)))
        yield {"prompt": row["prompt"], "completion": answer}


def write_model(folder: Path, seed: int = 0) -> None:
    """A fresh Llama of two layers as a Hugging Face folder, its tokenizer one token per letter."""
    import tempfile

    import tokenizers

    from lockstep.models.hf import save_folder
    from lockstep.models.init import init_params
    from lockstep.models.spec import LayerKind, ModelSpec, Rope

    symbols = [*LETTERS, ">"]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({s: i for i, s in enumerate([*symbols, END, "?"])}, unk_token="?")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(END, special=True, normalized=False)])
    vocabulary = 32  # a multiple of what devices like; what has no letter is never asked for
    layers = (LayerKind(Rope(10_000.0)),) * 2
    spec = ModelSpec("llama", vocabulary, 64, 4, 4, 16, 192, layers, 1e-5, 16**-0.5, 64, tied_head=False)
    with tempfile.TemporaryDirectory() as files:
        backend.save(str(Path(files, "tokenizer.json")))
        Path(files, "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
        Path(files, "config.json").write_text(json.dumps({"eos_token_id": backend.token_to_id(END)}))
        save_folder(folder, spec, init_params(spec, seed), tokenizer_files_from=files)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    lines = [json.dumps(example) for example in examples()]
    (folder / "examples.jsonl").write_text("\n".join(lines) + "\n")
    print(f"{folder}: a fresh model and {len(lines)} examples")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
