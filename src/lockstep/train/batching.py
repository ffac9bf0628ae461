"""From trajectories to micro-batches of rows. No loss and no metric can see how the rows were packed.

A group's prompt is laid out once and all its samples read it: P + sum(T_i - 1) rows where padding each sample by itself
would take sum(P + T_i - 1). (A completion's last token is only predicted, never read, so it has no row.) Groups are cut
between samples when they exceed a micro-batch, the prompt then being repeated.

What an environment said between two turns has rows, which later ones read; nothing predicts it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.algorithms.losses import Tokens
from lockstep.cluster.programs import numpy_rows, padded_pages, padded_rows
from lockstep.errors import ConfigError
from lockstep.models.decoder import Rows
from lockstep.types import Trajectory


@dataclass(frozen=True)
class Geometry:
    """How rows are laid out: into how many shards (`Programs.row_shards`); rows, and completion tokens, per shard and
    micro-batch at most (before padding); tile and page."""

    row_shards: int
    max_rows: int
    tile_rows: int
    page_size: int


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. rows: [row shards * N] work; at, target, temperature [row shards * M]: the row that predicts
    each sampled token (within its shard), the token (-1: padding), its temperature. tokens: the loss's fields.
    spans: (sample, start, stop): where sample's sampled tokens lie on the flat M axis. num_rows: real rows."""

    rows: Rows
    at: np.ndarray
    target: np.ndarray
    temperature: np.ndarray
    tokens: Tokens
    spans: tuple[tuple[int, int, int], ...]
    num_rows: int

    def scatter(self, flat: np.ndarray, into: list[np.ndarray | None]) -> None:
        """Hand each sample its own tokens' values of `flat` [row shards * M]."""
        for sample, start, stop in self.spans:
            into[sample] = flat[start:stop]

    def flat(self, per_sample: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
        """[row shards * M] float32: each sample's own number, or [T], where its tokens lie; 0 elsewhere."""
        found = np.zeros(self.target.shape, np.float32)
        for sample, start, stop in self.spans:
            found[start:stop] = per_sample[sample]
        return found


@dataclass
class _Piece:
    """Samples of one group that are laid out together. length: tokens of their completions; tokens: those sampled."""

    prompt: np.ndarray
    samples: list[int]
    length: int = 0
    tokens: int = 0

    @property
    def rows(self) -> int:
        return len(self.prompt) + self.length - len(self.samples)

    @property
    def size(self) -> int:
        """What it takes of a micro-batch: rows, or tokens to predict where those are more (many short completions)."""
        return max(self.rows, self.tokens)


def _pieces(trajectories: Sequence[Trajectory], max_rows: int) -> list[_Piece]:
    groups: dict[str, list[int]] = {}
    for i, t in enumerate(trajectories):
        if t.num_sampled:
            groups.setdefault(t.group_id, []).append(i)
    pieces = []
    for group, members in groups.items():
        prompt = trajectories[members[0]].prompt_ids
        assert len(prompt), f"group {group!r} has an empty prompt: nothing predicts the first token"
        piece: _Piece | None = None
        for i in members:
            assert np.array_equal(trajectories[i].prompt_ids, prompt), f"group {group!r} has two prompts"
            count = len(trajectories[i].completion_ids)
            if len(prompt) + count - 1 > max_rows:
                raise ConfigError(
                    f"prompt {group!r}: a sequence of {len(prompt) + count - 1} rows does not fit in "
                    f"train.micro_batch_rows = {max_rows}; raise it to at least the longest prompt plus completion"
                )
            drawn = trajectories[i].num_sampled
            if piece is None or max(piece.rows + count - 1, piece.tokens + drawn) > max_rows:
                piece = _Piece(prompt, [])
                pieces.append(piece)
            piece.samples.append(i)
            piece.length += count
            piece.tokens += drawn
    return pieces


def _bins(pieces: list[_Piece], geometry: Geometry) -> list[list[_Piece]]:
    """Pieces into as few bins as are found, a multiple of row_shards of them, equally filled where that fits."""
    d, most = geometry.row_shards, geometry.max_rows
    longest_first = sorted(range(len(pieces)), key=lambda i: (-pieces[i].size, i))
    packed = _first_fit(pieces, longest_first, most)
    fewest = -(-sum(p.size for p in pieces) // (most * d)) * d
    found = [packed] + [_level(pieces, longest_first, n) for n in (-(-len(packed) // d) * d, fewest)]
    fits = [bins for bins in found if max(sum(pieces[i].size for i in b) for b in bins) <= most]
    bins = fits[-1] + [[] for _ in range(-len(fits[-1]) % d)]
    return [[pieces[i] for i in sorted(b)] for b in bins]


def _first_fit(pieces: list[_Piece], order: list[int], most: int) -> list[list[int]]:
    """Each piece into the first bin with room: the fewest bins, near enough, the last ones less full."""
    bins: list[list[int]] = []
    fill: list[int] = []
    for i in order:
        size = pieces[i].size
        b = next((b for b, used in enumerate(fill) if used + size <= most), len(bins))
        if b == len(bins):
            bins.append([])
            fill.append(0)
        bins[b].append(i)
        fill[b] += size
    return bins


def _level(pieces: list[_Piece], order: list[int], count: int) -> list[list[int]]:
    """Each piece into the emptiest of `count` bins, however full that gets."""
    bins: list[list[int]] = [[] for _ in range(count)]
    emptiest = [(0, b) for b in range(count)]
    for i in order:
        fill, b = heapq.heappop(emptiest)
        bins[b].append(i)
        heapq.heappush(emptiest, (fill + pieces[i].size, b))
    return bins


@dataclass(frozen=True)
class Weighed:
    """What the loss reads of a trajectory besides its tokens. advantage: of all tokens, or [T]. old_logp [T] float32:
    what its ratio is to; None: the record. correction [T]: what else a token's `weight` is multiplied with."""

    advantage: np.ndarray | float
    old_logp: np.ndarray | None = None
    correction: np.ndarray | None = None


def make_micro_batches(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray | Sequence[Weighed],
    temperature: float,
    geometry: Geometry,
) -> list[MicroBatch]:
    """All sampled tokens of `trajectories`, each exactly once. advantages [B], one per trajectory.

    Where ids were cut off when sampling (`kept_logmass`), each token's advantage is weighted with the mass that was
    kept, which is `Tokens.weight`. Reference log-probabilities are taken from the trajectories (zeros where they have
    none). Raises ConfigError where a single sequence exceeds a micro-batch. Trajectories without tokens (aborted early)
    take no part.
    """
    pieces = _pieces(trajectories, geometry.max_rows)
    if not pieces:
        return []
    bins = _bins(pieces, geometry)
    d = geometry.row_shards
    weighed = [a if isinstance(a, Weighed) else Weighed(a) for a in advantages]
    return [_lay_out(bins[i : i + d], trajectories, weighed, temperature, geometry) for i in range(0, len(bins), d)]


def _lay_out(
    bins: list[list[_Piece]],
    trajectories: Sequence[Trajectory],
    weighed: Sequence[Weighed],
    temperature: float,
    geometry: Geometry,
) -> MicroBatch:
    chosen = [[trajectories[i] for piece in b for i in piece.samples] for b in bins]
    n = padded_rows(max(sum(p.rows for p in b) for b in bins), geometry.tile_rows)
    m = padded_rows(max(sum(t.num_sampled for t in ts) for ts in chosen), geometry.tile_rows)
    longest = max(len(t.prompt_ids) + len(t.completion_ids) - 1 for ts in chosen for t in ts)
    rows = numpy_rows(len(bins), n, padded_pages(longest, geometry.page_size), n)
    size = len(bins) * m
    at, sequence = (np.zeros(size, np.int32) for _ in range(2))
    target = np.full(size, -1, np.int32)
    mask = np.zeros(size, bool)
    old, ref, adv, weight = (np.zeros(size, np.float32) for _ in range(4))
    spans: list[tuple[int, int, int]] = []
    for d, pieces in enumerate(bins):
        row, out = 0, d * m
        for piece in pieces:
            first = row
            row = _fill(rows, d * n, row, piece.prompt, 0, np.zeros(0, np.int32))
            prompt_rows = np.arange(first, row, dtype=np.int32)
            for i in piece.samples:
                t, start = trajectories[i], row
                row = _fill(rows, d * n, row, t.completion_ids[:-1], len(piece.prompt), prompt_rows)
                span = slice(out, out + t.num_sampled)
                before = np.concatenate([prompt_rows[-1:], np.arange(start, row, dtype=np.int32)])
                at[span] = before if t.sampled is None else before[t.sampled]
                w = weighed[i]
                each = kept_mass(t) if w.correction is None else kept_mass(t) * w.correction
                target[span], weight[span] = t.sampled_ids, each
                old[span] = t.logprobs if w.old_logp is None else w.old_logp
                adv[span], sequence[span], mask[span] = w.advantage * each, len(spans), True
                if t.reference_logprobs is not None:
                    ref[span] = t.reference_logprobs
                spans.append((i, span.start, span.stop))
                out = span.stop
    return MicroBatch(
        rows, at, target, np.full(size, temperature, np.float32), Tokens(mask, old, ref, adv, sequence, weight),
        tuple(spans), sum(p.rows for b in bins for p in b),
    )  # fmt: skip


def kept_mass(t: Trajectory) -> np.ndarray | float:
    """[T] a token's probability under the policy over that under the distribution that it was drawn from: the mass that
    was kept where ids were cut off, so that E_drawn[weight * f] is the policy's sum of p * f over the ids kept."""
    return 1.0 if t.kept_logmass is None else np.exp(t.kept_logmass)


def _fill(rows: Rows, base: int, row: int, ids: np.ndarray, pos: int, before: np.ndarray) -> int:
    """Lay `ids` at positions pos.. onto rows base+row.., reading `before` and themselves. Returns the next free row."""
    count = len(ids)
    own = np.arange(row, row + count, dtype=np.int32)
    at = slice(base + row, base + row + count)
    rows.tokens[at], rows.write[at] = ids, own
    rows.pos[at] = np.arange(pos, pos + count)
    rows.length[at] = rows.pos[at] + 1
    # Every row of the run names all of its positions; `length` hides those that lie ahead of it.
    rows.read[at, :pos] = before
    rows.read[at, pos : pos + count] = own
    return row + count
