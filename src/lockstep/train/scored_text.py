"""A prompt and a completion as the token ids that a reward model reads; in training and in scoring the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lockstep.errors import ConfigError, DataError, TokenizerError
from lockstep.models.tokenizer import Tokenizer

Template = Literal["plain", "chat"]


@dataclass(frozen=True)
class ScoredText:
    """How text becomes a sequence whose last token is scored.

    tokenizer: the reward model's own. template: plain puts the two texts one after the other, behind the model's
    beginning-of-sequence token where it expects one; chat makes them a user's and an assistant's turn. end: text at the
    end, special tokens allowed. max_tokens: of a sequence at most.
    Raises ConfigError for a chat template that the model lacks.
    """

    tokenizer: Tokenizer
    template: Template
    end: str
    max_tokens: int

    def __post_init__(self) -> None:
        if self.template == "chat" and not self.tokenizer.has_template:
            raise ConfigError(
                f'template = "chat", but the reward model {self.tokenizer.source} has no chat template; use '
                'template = "plain"'
            )

    def ids(self, prompt: str | Sequence[Mapping[str, Any]], completion: str, where: str) -> np.ndarray:
        """[S] int32. prompt: text, or (chat only) messages. Raises DataError, naming `where`, for text that is refused
        and a sequence that is empty or too long: none is ever cut."""
        try:
            if self.template == "chat":
                turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
                answer = {"role": "assistant", "content": completion}
                ids = self.tokenizer.apply_template([*turns, answer], add_generation_prompt=False)
            elif isinstance(prompt, str):
                ids = self.tokenizer.encode_prompt(prompt) + self.tokenizer.encode(completion)
            else:
                raise DataError(f'{where}: the prompt is a list of messages; template = "plain" takes text')
        except TokenizerError as error:
            raise DataError(f"{where}: {error}") from error
        return self._checked(ids, where)

    def continued(self, prompt_ids: Sequence[int], completion: str, where: str) -> np.ndarray:
        """[S] int32: the same behind a prompt that already is ids of this tokenizer."""
        return self._checked([*prompt_ids, *self.tokenizer.encode(completion)], where)

    def _checked(self, ids: list[int], where: str) -> np.ndarray:
        ids = ids + self.tokenizer.encode(self.end, allow_special=True)
        if not 0 < len(ids) <= self.max_tokens:
            raise DataError(
                f"{where}: prompt and completion are {len(ids)} tokens of the reward model's tokenizer; expected 1 to "
                f"{self.max_tokens} (max_tokens). A sequence is never cut: raise the limit, or shorten the texts"
            )
        return np.array(ids, np.int32)
