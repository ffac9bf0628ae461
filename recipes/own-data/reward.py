"""The reward of `own-data.toml`: an ordinary Python module next to the recipe; it may import its neighbours.

The recipe names a function of it as `module:function`, here `reward:one_word`.
"""


def one_word(prompts: list[str], completions: list[str], rows: list[dict]) -> list[float]:
    """1.0 for the answer and nothing else; 0.3 for the answer with more around it; 0.0 otherwise.

    All three lists have one entry per completion:
      prompts      what the model saw, its chat template included
      completions  what it wrote, special tokens left out
      rows         the line of data.jsonl that the prompt came from, every column of it

    Returns one finite number per completion, in the same order. A function that raises, or returns anything else, stops
    the run with its name (or takes the completion out of training, counted, with `on_error = "drop"`).
    """
    return [_score(completion, row["answer"]) for completion, row in zip(completions, rows, strict=True)]


def _score(completion: str, answer: str) -> float:
    words = completion.lower().replace(".", " ").replace(",", " ").split()
    if words == [answer.lower()]:
        return 1.0
    return 0.3 if answer.lower() in words else 0.0
