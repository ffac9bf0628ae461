"""Rows laid out from trajectories: nothing lost, nothing twice, and every row reads exactly its own sequence."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lockstep.cluster.programs import backward_tile, padded_pages, padded_rows
from lockstep.errors import ConfigError
from lockstep.train.batching import Geometry, MicroBatch, make_micro_batches
from lockstep.types import Fingerprint, Trajectory

FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")


@dataclass
class Case:
    """Trajectories in any order, and the geometry to lay them out in. advantages [B]."""

    trajectories: list[Trajectory]
    advantages: np.ndarray
    geometry: Geometry
    temperature: float = 1.3


def make_case(groups: list[tuple[int, list[int]]], geometry: Geometry, order: list[int] | None = None) -> Case:
    """groups: (prompt length, completion lengths) of each. Every token id, log-probability and advantage in the batch
    is used once, so that whatever turns up can be traced."""
    ids = iter(range(1, 10_000))
    trajectories = []
    for g, (prompt_length, lengths) in enumerate(groups):
        prompt = np.array([next(ids) for _ in range(prompt_length)], np.int32)
        for i, length in enumerate(lengths):
            completion = np.array([next(ids) for _ in range(length)], np.int32)
            trajectories.append(
                Trajectory(
                    prompt, completion, (completion / -7).astype(np.float32), np.zeros(length, np.int32),
                    "stop" if length else "abort", 0, f"group/{g}", i, FINGERPRINT,
                    reference_logprobs=(completion / -11).astype(np.float32) if g % 2 else None,
                )
            )  # fmt: skip
    if order is not None:
        trajectories = [trajectories[i] for i in order]
    return Case(trajectories, np.arange(1, len(trajectories) + 1) / 3, geometry)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    lengths = st.lists(st.integers(0, 6), min_size=1, max_size=5)
    groups = draw(st.lists(st.tuples(st.integers(1, 7), lengths), min_size=1, max_size=5))
    longest = max(p + max(ts) - 1 for p, ts in groups)
    geometry = Geometry(
        row_shards=draw(st.sampled_from([1, 2, 4])),
        max_rows=draw(st.integers(max(longest, 1), 40)),
        tile_rows=draw(st.sampled_from([0, 1, 4, 6])),
        page_size=draw(st.sampled_from([1, 4, 5])),
    )
    return make_case(groups, geometry, draw(st.permutations(range(sum(len(ts) for _, ts in groups)))))


def make(case: Case) -> list[MicroBatch]:
    return make_micro_batches(case.trajectories, case.advantages, case.temperature, case.geometry)


def what_a_row_reads(batch: MicroBatch, device: int, rows_per_device: int, row: int) -> list[int]:
    """Token ids at positions 0..length-1 of the sequence that a row sees, by walking `read` as attention does: the
    pool row named for a position is the row of this device that wrote it."""
    rows, base = batch.rows, device * rows_per_device
    wrote = {int(w): base + r for r, w in enumerate(rows.write[base : base + rows_per_device]) if w != rows_per_device}
    found = []
    for position in range(rows.length[base + row]):
        source = wrote[int(rows.read[base + row, position])]
        assert rows.pos[source] == position
        found.append(int(rows.tokens[source]))
    return found


@given(cases())
@settings(max_examples=150)
@example(make_case([(3, [6, 6, 6, 6])], Geometry(4, 8, 4, 5)))
@example(make_case([(1, [1] * 5)] * 4, Geometry(1, 6, 4, 4)))
def test_every_completion_token_once_with_everything_that_belongs_to_it(case: Case) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    for batch in make(case):
        devices = case.geometry.row_shards
        n, m = len(batch.rows.tokens) // devices, len(batch.at) // devices
        covered = np.zeros(len(batch.at), bool)
        for number, (sample, start, stop) in enumerate(batch.spans):
            t = case.trajectories[sample]
            assert stop - start == len(t.completion_ids) and not covered[start:stop].any()
            covered[start:stop] = True
            assert start // m == (stop - 1) // m, "a sample's tokens lie on one device"
            whole = [*t.prompt_ids.tolist(), *t.completion_ids.tolist()]
            for i, slot in enumerate(range(start, stop)):
                seen[sample, i] += 1
                assert batch.target[slot] == t.completion_ids[i]
                assert batch.tokens.old_logp[slot] == t.logprobs[i]
                assert batch.tokens.ref_logp[slot] == (0 if t.reference_logprobs is None else t.reference_logprobs[i])
                assert batch.tokens.advantage[slot] == np.float32(case.advantages[sample])
                assert batch.tokens.sequence[slot] == number
                # The row that predicts token i sees the prompt and the i tokens before it, each at its position.
                before = whole[: len(t.prompt_ids) + i]
                assert what_a_row_reads(batch, slot // m, n, batch.at[slot]) == before
        np.testing.assert_array_equal(batch.tokens.mask, covered)
        assert (batch.temperature == np.float32(case.temperature)).all()
    assert seen == Counter({(s, i): 1 for s, t in enumerate(case.trajectories) for i in range(len(t.completion_ids))})


@given(cases())
def test_rows_are_within_capacity_and_padding_touches_nothing(case: Case) -> None:
    geometry = case.geometry
    for batch in make(case):
        rows = batch.rows
        n, m = len(rows.tokens) // geometry.row_shards, len(batch.at) // geometry.row_shards
        assert ((rows.pos >= 0) == (rows.write != n)).all() and ((batch.target >= 0) == batch.tokens.mask).all()
        used = (rows.write != n).reshape(geometry.row_shards, n).sum(1)
        assert used.sum() == batch.num_rows and used.max() <= geometry.max_rows
        assert batch.tokens.mask.reshape(geometry.row_shards, m).sum(1).max() <= geometry.max_rows
        assert n == padded_rows(used.max(), geometry.tile_rows)
        if geometry.tile_rows:
            assert n % geometry.tile_rows == m % geometry.tile_rows == 0
        assert rows.read.shape[1] % geometry.page_size == 0
        assert rows.length.max() <= rows.read.shape[1] and (rows.length == np.maximum(rows.pos, 0) + 1).all()
        for d in range(geometry.row_shards):
            share = slice(d * n, (d + 1) * n)
            real = rows.write[share] != n
            # A device's real rows come first, and each has a pool row of its own.
            np.testing.assert_array_equal(rows.write[share][real], np.arange(used[d]))
            assert (rows.read[share][~real] == n).all() and (rows.pos[share][~real] == -1).all()
        assert (batch.at[~batch.tokens.mask] == 0).all() and (batch.at < n).all()


@given(cases())
def test_a_prompt_is_laid_out_once_per_piece(case: Case) -> None:
    """A group that fits is one piece; a larger one is cut between samples and only then is its prompt repeated."""
    geometry = case.geometry
    copies: Counter[int] = Counter()
    rows = 0
    for batch in make(case):
        n = len(batch.rows.tokens) // geometry.row_shards
        first = (batch.rows.pos == 0) & (batch.rows.write != n)
        copies.update(batch.rows.tokens[first].tolist())
        rows += batch.num_rows
    expected_rows = 0
    for group in {t.group_id for t in case.trajectories}:
        members = [t for t in case.trajectories if t.group_id == group and len(t.completion_ids)]
        if not members:
            continue
        prompt = members[0].prompt_ids
        own, tokens = (sum(len(t.completion_ids) - k for t in members) for k in (1, 0))
        pieces = copies.pop(int(prompt[0]))
        fits = len(prompt) + own <= geometry.max_rows and tokens <= geometry.max_rows
        assert pieces == 1 if fits else 2 <= pieces <= len(members)
        expected_rows += pieces * len(prompt) + own
    assert not copies, "prompts of groups without a token"
    assert rows == expected_rows


@given(cases())
def test_scatter_gives_each_sample_its_own_tokens(case: Case) -> None:
    found: list[np.ndarray | None] = [None] * len(case.trajectories)
    for batch in make(case):
        batch.scatter(batch.tokens.old_logp, found)
    for t, values in zip(case.trajectories, found, strict=True):
        assert (values is None) == (len(t.completion_ids) == 0)
        if values is not None:
            np.testing.assert_array_equal(values, t.logprobs)


@given(cases())
@settings(max_examples=30)
def test_the_same_batch_is_laid_out_the_same_way(case: Case) -> None:
    """The trunk is computed for one layout and used with another, made later."""
    for a, b in zip(make(case), make(case), strict=True):
        assert a.spans == b.spans
        for x, y in zip((*a.rows, a.at, a.target), (*b.rows, b.at, b.target), strict=True):
            np.testing.assert_array_equal(x, y)


def test_rows_saved_by_sharing_the_prompt() -> None:
    """P + sum(T - 1) rows instead of sum(P + T - 1): 50 + 8 * 4 against 8 * 54."""
    case = make_case([(50, [5] * 8)], Geometry(1, 1024, 32, 16))
    alone = replace_groups(case)
    assert [sum(b.num_rows for b in make(c)) for c in (case, alone)] == [82, 432]


def replace_groups(case: Case) -> Case:
    """Every sample a group of its own."""
    own = [replace(t, group_id=f"{t.group_id}/{t.index}") for t in case.trajectories]
    return Case(own, case.advantages, case.geometry)


def test_bins_are_filled_evenly() -> None:
    """Twelve equal groups over four devices: one pass, three groups each."""
    case = make_case([(10, [3, 3])] * 12, Geometry(4, 1024, 1, 4))
    (batch,) = make(case)
    n = len(batch.rows.tokens) // 4
    assert (batch.rows.write != n).reshape(4, n).sum(1).tolist() == [42] * 4


def test_pieces_over_half_a_bin_take_a_bin_each() -> None:
    """300 groups of 6 rows, two devices, at most 10 rows on each: 150 passes, though the rows would fill 90."""
    case = make_case([(5, [2])] * 300, Geometry(2, 10, 1, 2))
    batches = make(case)
    assert [b.num_rows for b in batches] == [12] * 150


def test_fewer_passes_are_found_than_by_levelling_alone() -> None:
    """Rows 4, 4, 3, 3, 3, 3 fit in two bins of 10 (4 + 3 + 3), and levelled they do; 6, 5, 4, 3, 2 do too, but levelled
    they would make 11 and 9."""
    for sizes in ((4, 4, 3, 3, 3, 3), (6, 5, 4, 3, 2)):
        batches = make(make_case([(rows, [1]) for rows in sizes], Geometry(1, 10, 1, 2)))
        assert [b.num_rows for b in batches] == [10, 10]


def test_many_one_token_completions_are_bounded_too() -> None:
    """64 completions of one token after a prompt of two: two rows, but 64 rows of logits."""
    case = make_case([(2, [1] * 64)], Geometry(1, 16, 4, 4))
    batches = make(case)
    assert [int(b.tokens.mask.sum()) for b in batches] == [16] * 4
    assert [len(b.at) for b in batches] == [16] * 4


def test_a_sequence_beyond_capacity_is_refused_by_name() -> None:
    case = make_case([(3, [2]), (9, [4, 1])], Geometry(1, 11, 4, 4))
    with pytest.raises(ConfigError, match=r"'group/1': a sequence of 12 rows .* train\.micro_batch_rows = 11; raise"):
        make(case)
    assert make(Case(case.trajectories, case.advantages, replace(case.geometry, max_rows=12)))


def test_aborted_samples_take_no_part() -> None:
    with_empty = make_case([(3, [2, 0, 3]), (4, [0])], Geometry(1, 32, 4, 4))
    (batch,) = make(with_empty)
    assert {sample for sample, _, _ in batch.spans} == {0, 2}
    assert batch.num_rows == 3 + 1 + 2
    assert make(make_case([(3, [0, 0])], Geometry(2, 32, 4, 4))) == []


def test_a_group_with_two_prompts_or_none_is_our_own_mistake() -> None:
    case = make_case([(3, [2, 2])], Geometry(1, 32, 4, 4))
    other = replace(case.trajectories[1], prompt_ids=np.array([7, 7, 7], np.int32))
    with pytest.raises(AssertionError, match="'group/0' has two prompts"):
        make_micro_batches([case.trajectories[0], other], case.advantages, 1.0, case.geometry)
    empty = [replace(t, prompt_ids=np.zeros(0, np.int32)) for t in case.trajectories]
    with pytest.raises(AssertionError, match="'group/0' has an empty prompt"):
        make_micro_batches(empty, case.advantages, 1.0, case.geometry)


@given(st.integers(1, 5000), st.integers(0, 200))
def test_tiles_divide_their_rows(count: int, tile_rows: int) -> None:
    rows = padded_rows(count, tile_rows)
    assert rows >= count and rows % (tile_rows or 32) == 0
    backward = backward_tile(rows)
    assert rows % backward == 0 and backward <= max(128, tile_rows)
    assert backward > 64 or backward == rows


@given(st.integers(1, 5000), st.integers(1, 64))
def test_pages_hold_their_positions(positions: int, page_size: int) -> None:
    width = padded_pages(positions, page_size)
    assert positions <= width < 2 * max(positions, page_size) and width % page_size == 0


def test_tokens_of_a_cut_distribution_weigh_the_mass_that_was_kept() -> None:
    case = make_case([(3, [4, 2])], Geometry(1, 64, 4, 4))
    kept = np.log(np.float32([0.5, 1.0, 0.25, 0.8]))
    first = replace(case.trajectories[0], kept_logmass=kept)
    made = [make_micro_batches(ts, case.advantages, 1.0, case.geometry)[0]
            for ts in (case.trajectories, [first, case.trajectories[1]])]  # fmt: skip
    (_, start, stop), (_, other, end) = made[0].spans
    plain, cut = (m.tokens.advantage for m in made)
    np.testing.assert_array_equal(cut[start:stop], np.float32(case.advantages[0] * np.exp(kept)))
    np.testing.assert_array_equal(made[1].tokens.weight[start:stop], np.exp(kept))
    assert (made[0].tokens.weight == made[0].tokens.mask).all(), "1 for every token, 0 for padding"
    np.testing.assert_array_equal(cut[other:end], plain[other:end])
    np.testing.assert_array_equal(made[1].tokens.old_logp, made[0].tokens.old_logp)
