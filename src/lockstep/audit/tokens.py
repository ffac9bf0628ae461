"""Checks of tokens: ids in and out, the chat template, end-of-sequence ids, seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.audit.check import Finding, failed, passed
from lockstep.audit.subject import Subject, same_bits
from lockstep.errors import TokenizerError
from lockstep.types import Prompt, Trajectory

FORCED = 3  # tokens of a completion whose ids are given
HOT = 2.0  # a temperature at which samples differ
ENDS = 4  # stop ids that are tried, at most


def _forced(subject: Subject, token: int, count: int, stop_ids: frozenset[int]) -> Trajectory:
    """A completion in which only `token` can be drawn."""
    count = min(count, subject.config.rollout.max_new_tokens)
    (made,) = subject.generate(
        prompts=subject.prompts[:1], samples=1, allowed_ids=frozenset({token}), max_new_tokens=count, stop_ids=stop_ids
    )
    return made


def tokenizer_identity(subject: Subject) -> Finding:
    """Ids that go into the pipeline come out of it: no text in between."""
    vocabulary = min(subject.cluster.tokenizer.vocab_size, subject.cluster.spec.vocab_size)
    rng = np.random.default_rng(1)
    length = min(8, subject.config.task.max_prompt_tokens)
    given = [Prompt(f"audit/ids/{i}", "", tuple(int(t) for t in rng.integers(0, vocabulary, length))) for i in range(4)]
    back = subject.generate(prompts=given, samples=1)
    for prompt, trajectory in zip(given, back, strict=True):
        if tuple(trajectory.prompt_ids.tolist()) != prompt.ids:
            return _changed("prompt", prompt.ids, trajectory.prompt_ids.tolist())
    drawn = sorted({int(t) for t in rng.integers(0, vocabulary, 4)} - subject.cluster.sampling.stop_ids)
    for token in drawn:
        made = _forced(subject, token, FORCED, subject.cluster.sampling.stop_ids)
        wanted = (token,) * min(FORCED, subject.config.rollout.max_new_tokens)
        if tuple(made.completion_ids.tolist()) != wanted:
            return _changed("completion", wanted, made.completion_ids.tolist())
    sampled = subject.generate()
    decode, encode = subject.cluster.tokenizer.decode, subject.cluster.tokenizer.encode
    back_again = sum(
        encode(decode(t.completion_ids.tolist(), skip_special=False), allow_special=True) == t.completion_ids.tolist()
        for t in sampled
    )
    return passed(
        f"ids of {len(given)} prompts and {len(drawn)} completions come back as they went in; {back_again} of "
        f"{len(sampled)} samples would survive decode and encode, which nothing relies on"
    )


def _changed(what: str, wanted: Sequence[int], got: Sequence[int]) -> Finding:
    return failed(
        f"a {what} of ids {list(wanted)} came back as {list(got)}",
        f"the ids of a {what} are made anew from text somewhere between engine and trainer: decode then encode does "
        "not give the same ids",
        "carry the ids that were sampled; text is for people and rewards",
    )


def template_identity(subject: Subject) -> Finding:
    """The prompt's ids are those of its template, with one beginning-of-sequence token at most."""
    tokenizer, task = subject.cluster.tokenizer, subject.config.task
    said = []
    for prompt in subject.prompts:
        if (bos := tokenizer.bos_id) is None:
            said = ["no beginning-of-sequence token"]
            continue
        leading = next((i for i, token in enumerate(prompt.ids) if token != bos), len(prompt.ids))
        if leading > 1:
            return failed(
                f"prompt {prompt.id} begins with {leading} beginning-of-sequence ids ({bos})",
                "the template writes the token, and the tokenizer adds it again",
                "let one of the two write it: `encode` adds nothing, a chat template brings its own",
            )
        if not leading and tokenizer.adds_bos and task.template == "plain":
            return failed(
                f"prompt {prompt.id} begins without the beginning-of-sequence id {bos}, which this model expects",
                "the plain prompt does not add it",
                "write it into task.prompt, or let the task add it",
            )
        said = [f"{leading or 'no'} beginning-of-sequence token at the start, as the model expects"]
    whole = sum(tokenizer.decode(p.ids, skip_special=False) == p.text for p in subject.prompts)
    said.append(f"{whole} of {len(subject.prompts)} prompts decode to their text")
    if tokenizer.has_template:
        first = [{"role": "user", "content": "1 + 1 ="}]
        if tokenizer.apply_template(first) != tokenizer.encode(tokenizer.render(first), allow_special=True):
            return failed(
                "the ids of a rendered conversation are not those of its text",
                "the template is applied in one way for text and in another for ids",
                "make ids from the template's own text, once",
            )
        said.append(f"{_prefix(tokenizer.render)} ({'used' if task.template == 'chat' else 'not used'} by this recipe)")
    return passed("; ".join(said))


def _prefix(render: Any) -> str:
    """Whether earlier turns stay what they were when a conversation goes on."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    more = [*turns, {"role": "user", "content": "d"}]
    try:
        before, after = render(turns[:1]) + turns[1]["content"], render(more)
    except TokenizerError:
        return "the template takes no several turns"
    return "the template keeps earlier turns as they were" if after.startswith(before) else (
        "the template rewrites earlier turns: train each turn on the ids it was sampled after"
    )  # fmt: skip


def declared_eos(model: str, token_id: Any) -> set[int]:
    """End-of-sequence ids that the files of a model folder declare, read anew. token_id: text -> id, or None."""
    found: set[int] = set()
    if "/" not in model:  # a known name
        return found
    folder = Path(model)
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        content: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        for scope in (content, content.get("text_config") or {}):
            value = scope.get("eos_token_id")
            found |= set(value) if isinstance(value, list) else set() if value is None else {value}
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text()).get("eos_token") if path.is_file() else None
    text = token.get("content") if isinstance(token, dict) else token
    own = token_id(text) if text is not None else None
    return found | ({own} if own is not None else set())


def eos_ids(subject: Subject) -> Finding:
    """Every end-of-sequence id stops a sample, is kept as its last token, and is trained on."""
    tokenizer, stops = subject.cluster.tokenizer, subject.cluster.sampling.stop_ids

    def token_id(text: str) -> int | None:
        ids = tokenizer.encode(text, allow_special=True)
        return ids[0] if len(ids) == 1 else None

    ends = tokenizer.eos_ids | declared_eos(subject.config.model.name, token_id)
    names = {i: tokenizer.decode([i], skip_special=False) for i in ends | stops}
    missing = sorted(ends - stops)
    if missing:
        return failed(
            f"{len(ends) - len(missing)} of {len(ends)} end-of-sequence ids stop a sample; "
            f"{', '.join(f'{i} {names[i]!r}' for i in missing)} do not",
            "only some of the ids that the model's files declare (generation_config.json, config.json, "
            "tokenizer_config.json) are honoured: samples run on to max_new_tokens",
            "stop at the union of all of them",
        )
    tried = sorted(ends)[:ENDS] + sorted(stops - ends)[:1]
    for token in tried:
        made = _forced(subject, token, 2, stops)
        if made.completion_ids.tolist() != [token] or made.finish_reason != "stop":
            return failed(
                f"a sample that draws {token} {names[token]!r} becomes {made.completion_ids.tolist()} and finishes by "
                f"{made.finish_reason!r}",
                "the sampler does not stop at this id, or drops it",
                "a stop id ends the sample and stays its last token: the policy has to learn to end",
            )
    untrained = [token for token in sorted(ends)[:ENDS] if not _trains(subject, token, stops)]
    if untrained:
        return failed(
            f"the end-of-sequence id {untrained[0]} {names[untrained[0]]!r} has no gradient",
            "it is masked, as padding is: the padding id is the end-of-sequence id, and masks come from token values",
            "make masks from lengths; the last token of a sample that stopped is trained on",
        )
    return passed(
        f"{', '.join(f'{i} {names[i]!r}' for i in sorted(ends))} stop a sample, are kept and trained on; "
        f"{len(stops - ends)} more by recipe"
    )


def _trains(subject: Subject, token: int, stops: frozenset[int]) -> bool:
    """Whether a sample that is nothing but this token, and good, has a gradient."""
    made = [_forced(subject, token, 1, stops)]
    if subject.cluster.trainer.algorithm.kl_in_loss:
        made = [replace(t, reference_logprobs=t.logprobs) for t in made]
    result, _ = subject.step(subject.micro_batches(made, np.ones(1)), made)
    return result.metrics["grad_norm"] > 0


def seeds(subject: Subject) -> Finding:
    """A sample depends on its seed and its prompt alone; the samples of a group are not all the same."""
    temperature = max(HOT, subject.temperature)
    together = subject.generate(temperature=temperature)
    again = subject.generate(temperature=temperature)
    if not same_bits([t.completion_ids for t in together], [t.completion_ids for t in again]):
        return failed(
            "the same seeds gave other completions",
            "the seed of a request is not what its tokens are drawn with",
            "derive every draw from (seed of the request, position)",
        )
    alone = subject.generate(prompts=subject.prompts[-1:], temperature=temperature)
    own = [t for t in together if t.group_id == subject.prompts[-1].id]
    same_ids = same_bits([t.completion_ids for t in own], [t.completion_ids for t in alone])
    same_record = same_ids and same_bits([t.logprobs for t in own], [t.logprobs for t in alone])
    if subject.exact and not same_record:
        return failed(
            f"alone, a prompt's completions have other {'log-probabilities' if same_ids else 'tokens'} than in a batch",
            "draws depend on a sample's place in the batch, or the bits of a row on the other rows",
            "derive every draw from (seed of the request, position); exact mode promises the bits",
        )
    groups = {p.id: [tuple(t.completion_ids) for t in together if t.group_id == p.id] for p in subject.prompts}
    if all(len(set(made)) == 1 for made in groups.values()):
        return failed(
            f"in all {len(groups)} groups every sample is the same, at temperature {temperature:g}",
            "the samples of a group share one seed (or none is used), or the policy is certain of every token",
            "give each sample a seed of its own, made from (run seed, step, prompt, index)",
        )
    same = "the same bits" if same_record else "the same tokens" if same_ids else "other tokens, by rounding"
    distinct = sum(len(set(made)) for made in groups.values())
    return passed(f"alone and in a batch a seed gives {same}; {distinct} distinct of {len(together)} samples")
