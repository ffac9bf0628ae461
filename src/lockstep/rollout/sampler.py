"""Tokens and their records from the hidden rows of a pass: the part of a step after the layers.

Rows that ask for nothing but a temperature are drawn and scored by one program (`Programs.sample`). Rows that change
the distribution, or want the likeliest ids, are drawn by another (`models.sampling`) and scored by the trainer's own
(`Programs.logprobs`), as are the likeliest ids. So no row's bits depend on what other rows ask for, and every
log-probability is what the trainer computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as List
from dataclasses import dataclass

import jax
import numpy as np

from lockstep.cluster.changed_sampling import ChangedSampling
from lockstep.cluster.programs import Programs, SplitWeights, numpy_rows, padded_pages
from lockstep.cluster.shared import shared
from lockstep.models.decoder import Rows
from lockstep.models.sampling import Changes
from lockstep.rollout.work import Drawn, GroupWork, Pass, Sequence
from lockstep.types import SamplingParams

IDS = 16  # ids named for a row are padded to a power of two of this many


@dataclass(eq=False, slots=True)
class Want:
    """A token to draw: from which row of the device's share, for which sequence, after which drafts."""

    row: int
    sequence: Sequence
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The completion before it, drafts included."""
        return [*self.sequence.tokens, *self.drafts]

    @property
    def index(self) -> int:
        return self.sequence.group.request.first + len(self.sequence.tokens) + len(self.drafts)

    @property
    def params(self) -> SamplingParams:
        return self.sequence.group.request.params


@dataclass(frozen=True)
class Batch:
    """Wants of one kind, laid out over the devices. places: where on the flat axis each lies."""

    places: list[tuple[int, Want]]
    at: np.ndarray
    temperature: np.ndarray
    seed: np.ndarray
    index: np.ndarray


def lay_out_rows(work: List[Pass], n: int, width: int, trash: int) -> Rows:
    """Rows of a pass on the host. work: per device; n: rows of each, padding included; width: of their index; trash:
    the pool row that padding names."""
    host = numpy_rows(len(work), n, width, trash)
    for d, rows in enumerate(work):
        for i, r in enumerate(rows, d * n):
            host.tokens[i], host.pos[i], host.length[i] = r.token, r.pos, r.pos + 1
            host.write[i] = trash if r.write is None else r.write
            host.read[i, : min(width, len(r.read))] = r.read[:width]
    return host


def lay_out(wanted: List[List[Want]], programs: Programs, least: int = 0) -> Batch:
    """wanted: per device. least: places per device at least."""
    m = programs.head_rows_for(max(least, *map(len, wanted)))
    total = m * len(wanted)
    at, index = np.zeros(total, np.int32), np.full(total, -1, np.int32)
    temperature, seed = np.ones(total, np.float32), np.zeros((total, 2), np.uint32)
    places = [(j, want) for d, own in enumerate(wanted) for j, want in enumerate(own, d * m)]
    for j, want in places:
        at[j], index[j], temperature[j] = want.row, want.index, want.params.temperature
        s = want.sequence.group.request.seeds[want.sequence.index]
        seed[j] = (s & 0xFFFFFFFF, s >> 32)
    return Batch(places, at, temperature, seed, index)


def _named(want: Want) -> tuple[dict[int, float], set[int], Counter[int]]:
    """(what is added to the logits of named ids, ids seen, how often the completion holds an id)."""
    p = want.params
    bias = dict.fromkeys(p.allowed_ids or (), 0.0)
    bias |= dict(p.logit_bias)
    ruled_out = set(p.forbidden_ids)
    if p.allowed_ids is not None:
        ruled_out |= bias.keys() - p.allowed_ids
    if len(want.tokens) + 1 < p.min_new_tokens:
        ruled_out |= p.stop_ids
    bias |= dict.fromkeys(ruled_out, -np.inf)
    seen = {*want.sequence.group.request.prompt.ids, *want.tokens} if p.repetition_penalty != 1 else set()
    counted = p.presence_penalty != 0 or p.frequency_penalty != 0
    return bias, seen, Counter(want.tokens) if counted else Counter()


def changes(batch: Batch, vocab_size: int) -> Changes:
    """What each row of a batch asks for; padding asks for nothing."""
    n = len(batch.at)
    named = {j: _named(want) for j, want in batch.places}
    lists = {j: sorted(bias.keys() | seen | count.keys()) for j, (bias, seen, count) in named.items()}
    width = padded_pages(max(map(len, lists.values()), default=0), IDS)
    c = Changes(
        top_k=np.full(n, vocab_size, np.int32),
        top_p=np.ones(n, np.float32),
        min_p=np.zeros(n, np.float32),
        repetition=np.ones(n, np.float32),
        presence=np.zeros(n, np.float32),
        frequency=np.zeros(n, np.float32),
        only_listed=np.zeros(n, bool),
        ids=np.full((n, width), vocab_size, np.int32),
        bias=np.zeros((n, width), np.float32),
        seen=np.zeros((n, width), bool),
        count=np.zeros((n, width), np.float32),
    )
    for j, want in batch.places:
        p, ids, (bias, seen, count) = want.params, lists[j], named[j]
        c.top_k[j], c.top_p[j], c.min_p[j] = min(p.top_k or vocab_size, vocab_size), p.top_p, p.min_p
        c.repetition[j], c.presence[j], c.frequency[j] = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
        c.only_listed[j] = p.allowed_ids is not None
        c.ids[j, : len(ids)] = ids
        c.bias[j, : len(ids)] = [bias.get(i, -np.inf if p.allowed_ids is not None else 0.0) for i in ids]
        c.seen[j, : len(ids)] = [i in seen for i in ids]
        c.count[j, : len(ids)] = [count[i] for i in ids]
    return c


class Sampler:
    """Draws for the engine of `programs`."""

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self._changed = shared(ChangedSampling, programs)

    def draw(self, weights: SplitWeights, x: jax.Array, wanted: List[List[Want]]) -> list[list[Drawn]]:
        """One token for every want, in order. wanted: per device; x: output of the last layer, all devices' rows."""
        plain = self._plain(weights, x, [[w for w in own if w.params.plain] for own in wanted])
        changed = self._draw_changed(weights, x, [[w for w in own if not w.params.plain] for own in wanted])
        drawn = plain | changed
        return [[drawn[id(w)] for w in own] for own in wanted]

    def _plain(self, weights: SplitWeights, x: jax.Array, wanted: List[List[Want]]) -> dict[int, Drawn]:
        if not any(wanted):
            return {}
        p, b = self.programs, lay_out(wanted, self.programs)
        at, *rest = p.put_rows((b.at, b.temperature, b.seed, b.index))
        drawn = p.sample(weights, p.pick(x, at), *rest)
        tokens, logprobs = (np.asarray(a) for a in drawn)
        return {id(w): Drawn(w.sequence, int(tokens[j]), float(logprobs[j]), drafts=w.drafts) for j, w in b.places}

    def _likeliest(self, most: int) -> int:
        return min(padded_pages(most, 1), self.programs.spec.vocab_size) if most else 0

    def run_blank(self, program: str, weights: SplitWeights, x: jax.Array, m: int, params: SamplingParams) -> None:
        """Run `sample`, `choose` or `logprobs` on m picked rows a device that ask for what `params` does. Of
        ids that requests name (biases, penalties, stop ids that may not come yet) only the shortest list."""
        p, b = self.programs, lay_out([[] for _ in range(self.programs.row_shards)], self.programs, m)
        if program == "sample":
            p.sample(weights, x, *p.put_rows((b.temperature, b.seed, b.index)))
        elif program == "choose":
            named = changes(b, p.spec.vocab_size)
            temperature, seed, index, named = p.put_rows((b.temperature, b.seed, b.index, named))
            self._changed.choose(weights, x, temperature, seed, index, named, self._likeliest(params.top_logprobs))
        else:
            p.logprobs(weights, x, *p.put_rows((b.index, b.temperature)))

    def _draw_changed(self, weights: SplitWeights, x: jax.Array, wanted: List[List[Want]]) -> dict[int, Drawn]:
        if not any(wanted):
            return {}
        p, b = self.programs, lay_out(wanted, self.programs)
        likeliest = self._likeliest(max(w.params.top_logprobs for _, w in b.places))
        put = p.put_rows((b.at, b.temperature, b.seed, b.index, changes(b, p.spec.vocab_size)))
        at, temperature, seed, index, changed = put
        picked = p.pick(x, at)
        choice = self._changed.choose(weights, picked, temperature, seed, index, changed, likeliest)
        target = np.where(b.index >= 0, np.asarray(choice.token), -1)
        logprobs = np.asarray(p.logprobs(weights, picked, p.put_rows(target), temperature))
        kept, top_ids = (np.asarray(a) for a in choice[1:])
        likely = {id(w): top_ids[j, : w.params.top_logprobs] for j, w in b.places}
        listed = self._score(
            weights, x, [[(w.row, int(i), w.params.temperature) for w in own for i in likely[id(w)]] for own in wanted]
        )
        of_each = {}
        for own, found in zip(wanted, listed, strict=True):
            for w in own:
                of_each[id(w)], found = np.split(found, [len(likely[id(w)])])
        return {
            id(w): Drawn(
                w.sequence,
                int(target[j]),
                float(logprobs[j]),
                float(kept[j]),
                (likely[id(w)], of_each[id(w)]),
                w.drafts,
            )
            for j, w in b.places
        }

    def _score(
        self, weights: SplitWeights, x: jax.Array, wanted: List[List[tuple[int, int, float]]]
    ) -> list[np.ndarray]:
        """Log-probabilities of given ids by the trainer's program, per device. wanted: per device, (row of its share,
        id, temperature); a row may come several times."""
        if not any(wanted):
            return [np.zeros(0, np.float32) for _ in wanted]
        p = self.programs
        m = p.head_rows_for(max(map(len, wanted)))
        at, target = np.zeros(m * len(wanted), np.int32), np.full(m * len(wanted), -1, np.int32)
        temperature = np.ones(m * len(wanted), np.float32)
        for d, own in enumerate(wanted):
            for j, (row, token, heat) in enumerate(own, d * m):
                at[j], target[j], temperature[j] = row, token, heat
        picked, *rest = p.put_rows((at, target, temperature))
        found = np.asarray(p.logprobs(weights, p.pick(x, picked), *rest))
        return [found[d * m : d * m + len(own)] for d, own in enumerate(wanted)]

    def score_prompts(
        self, weights: SplitWeights, x: jax.Array, wanted: List[List[tuple[int, GroupWork, int]]]
    ) -> None:
        """Fill in the log-probability of a prompt's id that comes after each of the rows. wanted: per device, (row of
        its share, group, position of the row)."""
        ids = [
            [(row, group.request.prompt.ids[pos + 1], group.request.params.temperature) for row, group, pos in own]
            for own in wanted
        ]
        for own, found in zip(wanted, self._score(weights, x, ids), strict=True):
            for (_, group, pos), value in zip(own, found, strict=True):
                if group.scores is None:
                    group.scores = np.full(group.prompt_length, np.nan, np.float32)
                group.scores[pos + 1] = value
