"""Several decode steps for one look of the host: when that is possible, and what must be held for it.

Nobody has to look between two steps while every row is a sample's newest token, drawn from the whole softmax, no text
and no draft decides how it goes on, and nobody waits for a slot. What each step drew is then recorded as if the steps
had been taken one by one.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np

from lockstep.cluster.decoding import Decoding
from lockstep.cluster.programs import Programs, padded_pages
from lockstep.models.decoder import Rows
from lockstep.rollout.sampler import Want, lay_out
from lockstep.rollout.scheduler import Scheduler
from lockstep.rollout.work import Drawn, Pass, Sequence

STEPS = 8  # at once, at most: so many rows a sample that is over may waste, and so long may an abort wait


def steps_ahead(scheduler: Scheduler, work: Pass, most: int) -> int:
    """How many steps, at most `most`, can be taken from `work` without looking: 1 where somebody has to look."""
    if scheduler.queue or scheduler.preempted or scheduler.drafts or work.save or work.load:
        return 1
    left = [0]
    for row in work:
        if row.kind != "decode":
            return 1
        params = row.samples[0].group.request.params
        if not params.plain or params.stop_strings:
            return 1
        left.append(params.max_new_tokens - len(row.samples[0].tokens))
    steps = min(most, max(left)) if len(work) else most
    # A power of two, so that samples of like length end on the same steps.
    steps = 1 << (steps.bit_length() - 1)
    available = scheduler.memory.pages.num_available
    while steps > 1 and sum(_missing(scheduler, row.samples[0], steps) for row in work) > available:
        steps //= 2
    return steps


def _missing(scheduler: Scheduler, seq: Sequence, steps: int) -> int:
    """Pages that a sequence lacks for the rows of so many steps, this one's included."""
    rows = min(len(seq.tokens) + steps - 1, seq.group.request.params.max_new_tokens - 1)
    return max(scheduler.memory.own_pages(seq.group.prompt_length, rows) - len(seq.own), 0)


def hold(scheduler: Scheduler, work: Pass, steps: int) -> None:
    """Take the pages that `steps` steps write to, and name their rows in what `work` reads."""
    for row in work:
        seq = row.samples[0]
        if missing := _missing(scheduler, seq, steps):
            scheduler.memory.extend(seq, missing)
            row.read = seq.rows


def record(scheduler: Scheduler, sequences: List[Sequence], drawn: List[tuple[np.ndarray, ...]]) -> list[Sequence]:
    """Take in what the steps drew; returns the sequences that this finishes. drawn: by step, (tokens, logprobs, index
    of the token) of the device's rows."""
    finished = []
    for step, (tokens, logprobs, index) in enumerate(drawn):
        alive = [i for i, s in enumerate(sequences) if s.finish is None]
        if step:
            scheduler.go_on([sequences[i] for i in alive])
        for i in alive:
            seq = sequences[i]
            wanted = seq.group.request.first + len(seq.tokens)
            assert index[i] == wanted, f"row {i} drew token {index[i]} of its completion, {wanted} was next"
        finished += scheduler.record([Drawn(sequences[i], int(tokens[i]), float(logprobs[i])) for i in alive])
    for seq in sequences:
        if seq.finish is None:
            scheduler.memory.trim(seq)
    return finished


def decoding(programs: Programs, rows: Rows, work: List[Pass]) -> Decoding:
    """The first state of the steps from `work`, on the host. rows: as laid out for this pass."""
    devices = len(work)
    n = len(rows.tokens) // devices
    batch = lay_out([[Want(i, r.samples[0]) for i, r in enumerate(w)] for w in work], programs, n)
    samples = [(j, want.sequence.group.request) for j, want in batch.places]
    width = padded_pages(max((len(r.params.stop_ids) for _, r in samples), default=1), 1)
    end, stops = np.zeros(len(batch.at), np.int32), np.full((len(batch.at), width), -1, np.int32)
    for j, request in samples:
        end[j] = request.first + request.params.max_new_tokens
        ids = sorted(request.params.stop_ids)
        stops[j, : len(ids)] = ids
    return Decoding(rows, batch.at, batch.temperature, batch.seed, batch.index, end, stops)
