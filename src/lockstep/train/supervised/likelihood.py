"""Warming a policy up: supervised fine-tuning and direct preference optimization. A sequence's score is the
log-probability of its completion, summed over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from lockstep.algorithms.dpo import dpo
from lockstep.algorithms.sft import sft
from lockstep.errors import ConfigError, DataError, TokenizerError
from lockstep.models.catalog import LoadedModel, load_model
from lockstep.models.fetch import Say
from lockstep.models.spec import ModelSpec, require_policy
from lockstep.models.tokenizer import Tokenizer
from lockstep.supervised_recipe import DpoRecipe, SftRecipe
from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.train.scored_text import Template
from lockstep.train.sequences import unscored
from lockstep.train.supervised.examples import Columns, Examples, Row, require_different
from lockstep.train.supervised.objective import Objective, SupervisedTrainer
from lockstep.train.supervised.reward import by_pair


@dataclass(frozen=True)
class Continuations:
    """A prompt [P] int32 and its completions, each [T] int32: one, or chosen and rejected. reference: log-probability
    of each completion [1 or 2] float64 under the start weights, where the loss wants it."""

    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    reference: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.completions))


@dataclass(frozen=True)
class PromptedText:
    """How text becomes ids that a policy is trained to continue with, the ones that it would have sampled.

    template: plain: the prompt's text behind the beginning-of-sequence token, where the model expects one; chat: the
    prompt as a user's turn, or the messages as they are, up to where the assistant begins. end: text behind every
    completion, special tokens allowed. Raises ConfigError for a chat template that the model lacks.
    """

    tokenizer: Tokenizer
    template: Template
    end: str
    max_tokens: int

    @staticmethod
    def of(recipe: SftRecipe | DpoRecipe, tokenizer: Tokenizer) -> PromptedText:
        table, wanted = recipe.TABLE, recipe.sft if isinstance(recipe, SftRecipe) else recipe.dpo
        if wanted.template == "chat" and not tokenizer.has_template:
            raise ConfigError(
                f'{table}.template = "chat", but {tokenizer.source} has no chat template; use template = "plain"'
            )
        end = wanted.end
        if end is None:
            end = tokenizer.names.get("eos_token")
        if end is None:
            raise ConfigError(
                f"{tokenizer.source} does not say which of its end-of-sequence tokens ends a completion; name its text "
                f"in {table}.end"
            )
        return PromptedText(tokenizer, wanted.template, end, wanted.max_tokens)

    def ids(self, prompt: str | list[Any], completions: Sequence[str], where: str) -> Continuations:
        """Raises DataError, naming `where`, for a prompt or completion that is refused, without tokens or too long:
        none is ever cut."""
        try:
            made = np.array(self._prompt(prompt, where), np.int32)
            if not len(made):
                raise DataError(f"{where}: the prompt is empty (no token); a policy needs at least one to go on from")
            return Continuations(made, tuple(self._completion(text, len(made), where) for text in completions))
        except TokenizerError as error:
            raise DataError(f"{where}: {error}") from error

    def _prompt(self, prompt: str | list[Any], where: str) -> list[int]:
        tokenizer = self.tokenizer
        if self.template == "chat":
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return tokenizer.apply_template(turns)
        if not isinstance(prompt, str):
            raise DataError(f'{where}: the prompt is a list of messages; template = "plain" takes text')
        return tokenizer.encode_prompt(prompt)

    def _completion(self, text: str, before: int, where: str) -> np.ndarray:
        ids = self.tokenizer.encode(text) + self.tokenizer.encode(self.end, allow_special=True)
        if not ids:
            raise DataError(f"{where}: a completion is empty (no token): there is nothing to train on")
        if before + len(ids) > self.max_tokens:
            raise DataError(
                f"{where}: prompt and completion are {before + len(ids)} tokens; expected at most {self.max_tokens} "
                "(max_tokens). A sequence is never cut: raise the limit, or shorten the texts"
            )
        return np.array(ids, np.int32)


class LikelihoodObjective(Objective[Continuations]):
    """What the two have in common: the score is the completion's log-probability."""

    @classmethod
    def spec(cls, found: ModelSpec, name: str) -> ModelSpec:
        require_policy(found, name)
        return found

    @classmethod
    def load(cls, recipe: SftRecipe | DpoRecipe, say: Say | None) -> LoadedModel:
        return load_model(recipe.model.name, recipe.model.dtype, say=say)

    def lay_out(self, items: Sequence[Continuations], geometry: Geometry) -> list[MicroBatch]:
        laid = [
            unscored(item.prompt, completion, f"example/{i}", side)
            for i, item in enumerate(items)
            for side, completion in enumerate(item.completions)
        ]
        return make_micro_batches(laid, np.zeros(len(laid)), 1.0, geometry)

    def collect(self, batch: MicroBatch, flat: np.ndarray, into: np.ndarray) -> None:
        for i, start, stop in batch.spans:
            into[i] = flat[start:stop].sum(dtype=np.float64)

    def spread(self, batch: MicroBatch, slopes: np.ndarray) -> np.ndarray:
        return batch.flat(slopes)

    def num_sequences(self, items: Sequence[Continuations]) -> int:
        return sum(len(item.completions) for item in items)


class SftObjective(LikelihoodObjective):
    NAME: ClassVar[str] = "policy"
    LINEAR: ClassVar[bool] = True

    def __init__(self, recipe: SftRecipe, model: LoadedModel) -> None:
        self._wanted, self._seed, self._columns = recipe.sft, recipe.run.seed, Columns(recipe.TABLE)
        self._text = PromptedText.of(recipe, model.tokenizer)
        self._loss = jax.jit(jax.value_and_grad(sft, has_aux=True))

    def example(self, row: Row, where: str) -> Continuations:
        prompt = self._columns.prompt(row, self._wanted.prompt_column, where)
        text = self._columns.text(row, "completion_column", self._wanted.completion_column, where)
        return self._text.ids(prompt, [text], where)

    def judge(self, items: Sequence[Continuations], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        sums = np.zeros(self._wanted.batch, np.float32)
        sums[: len(scores)] = scores
        (_, found), slopes = self._loss(sums, np.float32(self.counts(items)["tokens"]))
        return {k: float(v) for k, v in found.items()}, np.asarray(slopes)[: len(scores)]

    def counts(self, items: Sequence[Continuations]) -> dict[str, int]:
        return {"examples": len(items), "tokens": sum(item.num_tokens for item in items)}


class DpoObjective(LikelihoodObjective):
    NAME: ClassVar[str] = "policy"

    def __init__(self, recipe: DpoRecipe, model: LoadedModel) -> None:
        self._wanted, self._seed, self._columns = recipe.dpo, recipe.run.seed, Columns(recipe.TABLE)
        self._text = PromptedText.of(recipe, model.tokenizer)
        self._loss = jax.jit(jax.value_and_grad(partial(dpo, beta=recipe.dpo.beta), has_aux=True))

    def prepared(
        self, examples: Examples[Continuations], trainer: SupervisedTrainer[Continuations], say: Say | None
    ) -> Examples[Continuations]:
        """With the reference's log-probabilities: those of the start weights, which then need not be kept."""
        if say is not None:
            say(f"reference log-probabilities of {len(examples.train) + len(examples.held_out)} pairs")

        def change(items: Sequence[Continuations]) -> list[Continuations]:
            found = trainer.scores(items).reshape(-1, 2)
            return [replace(item, reference=row) for item, row in zip(items, found, strict=True)]

        return examples.mapped(change)

    def example(self, row: Row, where: str) -> Continuations:
        wanted = self._wanted
        prompt = self._columns.prompt(row, wanted.prompt_column, where)
        texts = self._columns.pair(row, wanted.chosen_column, wanted.rejected_column, where)
        found = self._text.ids(prompt, texts, where)
        chosen, rejected = found.completions
        require_different(chosen, rejected, where)
        return found

    def judge(self, items: Sequence[Continuations], scores: np.ndarray) -> tuple[dict[str, float], np.ndarray]:
        reference = [item.reference for item in items]
        # In float64, before the rounding to float32: sums over long completions are large, their differences small.
        ratios, mask = by_pair(scores - np.concatenate([r for r in reference if r is not None]), self._wanted.batch)
        (_, found), slopes = self._loss(ratios, mask=mask)
        return {k: float(v) for k, v in found.items()}, np.asarray(slopes).reshape(-1)[: len(scores)]

    def counts(self, items: Sequence[Continuations]) -> dict[str, int]:
        return {"pairs": len(items)}
