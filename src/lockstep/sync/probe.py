"""The probe: fixed token sequences, scored by what would be served, must come out as the trainer scores them.

    probe = make_probe(trainer_score, probe_sequences(spec.vocab_size, 4, 16, seed=0), exact=True, bound=0.0)
    check_probe(probe, replica_score, "rollout")

Digests say that the parameters are right. They cannot say that the outputs come from those parameters: an engine may
serve from something derived from them - a tied head packed for its kernel, a fused or quantised copy, captured
buffers - that was not refreshed. The probe asks for the outputs.

A score function takes token sequences, each [T >= 2], and returns for each the float32 log-probabilities [T-1] of
tokens 1.. given those before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from lockstep.errors import SyncError
from lockstep.sync.publish import Probe

Score = Callable[[Sequence[Sequence[int]]], list[np.ndarray]]

_BYTES = np.dtype("<f4")
_ROUNDING = 1e-4  # nats; float32 and bfloat16 paths that differ in rounding only are rarely farther apart than this


def probe_sequences(vocab_size: int, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """`count` sequences of `length` token ids, the same for the same arguments.

    Their ids are strides through the vocabulary, shuffled: as many different rows of embedding and head as there are
    tokens (while there are so many ids), spread evenly. The first and the last id are both predicted and, from three
    tokens on, read.
    """
    if vocab_size < 1 or count < 1 or length < 2:
        raise SyncError(f"probe: {count} sequences of {length} tokens of {vocab_size} ids; expected at least 1, 2, 1")
    total = count * length
    spread = np.arange(total) * vocab_size // total if total < vocab_size else np.arange(total) % vocab_size
    ids = np.random.default_rng(seed).permutation(spread).reshape(count, length)
    edges = (vocab_size - 1, 0, vocab_size - 1, 0)[:length]
    ids[0, : len(edges)] = edges
    if length == 2:
        ids[-1] = edges[::-1] if count > 1 else edges
    return [tuple(map(int, row)) for row in ids]


def make_probe(score: Score, sequences: Sequence[Sequence[int]], exact: bool, bound: float = 0.0) -> Probe:
    """What the trainer makes of `sequences`. exact: the replica must return the same bits; else stay within `bound`
    nats per token.

    Raises SyncError if a log-probability is not finite, and on a bound that checks nothing.
    """
    if not exact and not 0 < bound < float("inf"):
        raise SyncError(f"probe: outside exact numerics the bound must be above 0 nats and finite; got {bound!r}")
    if not sequences or any(len(tokens) < 2 for tokens in sequences):
        raise SyncError("probe: it needs sequences, each of at least 2 tokens; the first token has no log-probability")
    fixed = tuple(tuple(map(int, tokens)) for tokens in sequences)
    values = _scored(score, fixed, "the trainer")
    return Probe(fixed, tuple(v.astype(_BYTES).tobytes().hex() for v in values), exact, 0.0 if exact else bound)


def check_probe(probe: Probe, score: Score, who: str = "the replica") -> int:
    """Hold `who` to the probe; the number of sequences checked.

    Raises SyncError naming the sequence, the position, both values and what usually causes it; also for values that
    are not finite, and for a probe or a reply of the wrong shape.
    """
    if not len(probe.sequences) == len(probe.logprobs) > 0:
        raise SyncError(f"probe: {len(probe.sequences)} sequences with {len(probe.logprobs)} results; nothing to check")
    wanted = [_parsed(probe, i) for i in range(len(probe.sequences))]
    got = _scored(score, probe.sequences, who)
    off = [_differs(a, b, probe) for a, b in zip(wanted, got, strict=True)]
    wrong = [i for i, found in enumerate(off) if found.any()]
    if not wrong:
        return len(wanted)
    first, at = wrong[0], int(np.flatnonzero(off[wrong[0]])[0])
    was, now = float(wanted[first][at]), float(got[first][at])
    count, total = sum(int(found.sum()) for found in off), sum(len(found) for found in off)
    limit = "bit for bit" if probe.exact else f"within {probe.bound:g} nats"
    worst = max(float(np.abs(a.astype(np.float64) - b).max()) for a, b in zip(wanted, got, strict=True))
    raise SyncError(
        f"probe: {who} gives token {at + 1} (id {probe.sequences[first][at + 1]}) of sequence {first} the "
        f"log-probability {now:.9g}, the trainer {was:.9g}; they must agree {limit}, and {count} of {total} tokens do "
        f"not. {_cause(worst, probe)}. Nothing was published"
    )


def _cause(worst: float, probe: Probe) -> str:
    """What usually makes outputs differ by `worst` nats at most, while the parameters have the right digests."""
    if probe.exact and worst < _ROUNDING:
        return (
            f"The largest difference is {worst:.3g} nats, which is rounding: another numerical path computes them; use "
            f"the same numerics on both sides, or a probe with a bound"
        )
    return (
        f"The largest difference is {worst:.3g} nats. Where the digests were right, the outputs come from a stale copy "
        f"of the weights: a tied head, a fused or packed matrix, a quantised or captured buffer that is derived from "
        f"them and was not refreshed"
    )


def _differs(wanted: np.ndarray, got: np.ndarray, probe: Probe) -> np.ndarray:
    """[T-1] bool. Both are finite."""
    if probe.exact:
        differs: np.ndarray = wanted.view(np.uint32) != got.view(np.uint32)
        return differs
    return np.abs(wanted.astype(np.float64) - got.astype(np.float64)) > probe.bound


def _scored(score: Score, sequences: Sequence[Sequence[int]], who: str) -> list[np.ndarray]:
    """What `who` makes of the sequences, each [T-1] float32 and finite."""
    values = [np.asarray(value) for value in score(sequences)]
    if len(values) != len(sequences):
        raise SyncError(f"probe: {who} scored {len(values)} of {len(sequences)} sequences. Nothing was published")
    for i, (tokens, value) in enumerate(zip(sequences, values, strict=True)):
        if value.dtype != np.float32 or value.shape != (len(tokens) - 1,):
            raise SyncError(
                f"probe: {who} returned {value.dtype}{list(value.shape)} for sequence {i}; expected "
                f"float32[{len(tokens) - 1}], one log-probability per token but the first. Nothing was published"
            )
        _require_finite(value, tokens, i, who)
    return [np.ascontiguousarray(value) for value in values]


def _require_finite(values: np.ndarray, tokens: Sequence[int], sequence: int, who: str) -> None:
    """Also where both sides agree: a policy that scores NaN must not be served."""
    if not np.isfinite(values).all():
        at = int(np.flatnonzero(~np.isfinite(values))[0])
        raise SyncError(
            f"probe: {who} gives token {at + 1} (id {tokens[at + 1]}) of sequence {sequence} the log-probability "
            f"{values[at]}; the weights hold NaN or infinity, or overflow. Nothing was published"
        )


def _parsed(probe: Probe, sequence: int) -> np.ndarray:
    """The trainer's log-probabilities of one sequence, as they came."""
    tokens, text = probe.sequences[sequence], probe.logprobs[sequence]
    try:
        raw = bytes.fromhex(text)
    except ValueError as error:
        raise SyncError(f"probe: the trainer's results for sequence {sequence} are no hex digits: {error}") from error
    if len(tokens) < 2 or len(raw) != _BYTES.itemsize * (len(tokens) - 1):
        raise SyncError(
            f"probe: sequence {sequence} has {len(tokens)} tokens and {len(raw)} bytes of log-probabilities; expected "
            f"at least 2 tokens and 4 bytes for each but the first"
        )
    values = np.frombuffer(raw, _BYTES).astype(np.float32)
    _require_finite(values, tokens, sequence, "the trainer")
    return values
