import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lockstep.errors import SyncError
from lockstep.sync.probe import check_probe, make_probe, probe_sequences
from lockstep.sync.publish import Probe
from lockstep.sync.verify import check_same, leaf_digests

SEQUENCES = [(0, 9, 4), (7, 2), (3, 3, 3, 8)]


class Engine:
    """The least that can go wrong: a tied language model that serves from a packed copy of its head."""

    def __init__(self, params) -> None:
        self.install(params)

    def install(self, params, refresh: bool = True) -> None:
        self.params = params
        if refresh:
            self.packed_head = jnp.asarray(np.ascontiguousarray(np.asarray(params["embed"]).T))

    def score(self, sequences):
        return [
            np.asarray(jax.nn.log_softmax(self.params["embed"][np.array(s[:-1])] @ self.packed_head))[
                np.arange(len(s) - 1), s[1:]
            ]
            for s in sequences
        ]


def params(seed: int):
    return {"embed": jnp.asarray(np.random.default_rng(seed).standard_normal((10, 4), np.float32))}


def lookup(values):
    """A score function that returns what it is given."""
    return lambda sequences: [np.array(v, np.float32) for v in values]


VALUES = [[-1.5, -0.25], [-3.0], [-1.0, -2.0, -0.5]]


def test_probe_sees_the_stale_tied_head_that_digests_cannot():
    trainer, replica = Engine(params(1)), Engine(params(0))
    probe = make_probe(trainer.score, SEQUENCES, exact=True)
    replica.install(params(1), refresh=False)
    check_same(leaf_digests(trainer.params), leaf_digests(replica.params), "actor", "rollout")  # says nothing is wrong
    with pytest.raises(SyncError, match=r"rollout gives token 1 \(id 9\) of sequence 0 .* stale copy .* a tied head"):
        check_probe(probe, replica.score, "rollout")
    replica.install(params(1))
    assert check_probe(probe, replica.score, "rollout") == 3


def test_exact_means_every_bit():
    probe = make_probe(lookup(VALUES), SEQUENCES, exact=True)
    assert check_probe(probe, lookup(VALUES)) == 3
    off = [v.copy() for v in map(np.float32, VALUES)]
    off[2][1] = np.nextafter(off[2][1], np.float32(0))
    with pytest.raises(SyncError, match=r"token 2 \(id 3\) of sequence 2 .* -1\.99999988, the trainer -2; they must "
                       r"agree bit for bit, and 1 of 6 tokens do not.*rounding"):  # fmt: skip
        check_probe(probe, lookup(off))
    zero = make_probe(lookup([[0.0]]), [(1, 2)], exact=True)
    with pytest.raises(SyncError, match="-0, the trainer 0"):
        check_probe(zero, lookup([[-0.0]]))


def test_bound_is_a_bound():
    probe = make_probe(lookup(VALUES), SEQUENCES, exact=False, bound=0.01)
    near = [[v + 0.009 for v in row] for row in VALUES]
    assert check_probe(probe, lookup(near)) == 3
    far = [VALUES[0], [-3.02], VALUES[2]]
    with pytest.raises(SyncError, match=r"sequence 1 .* within 0\.01 nats, and 1 of 6 tokens do not"):
        check_probe(probe, lookup(far))
    for bound in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(SyncError, match="bound must be above 0"):
            make_probe(lookup(VALUES), SEQUENCES, exact=False, bound=bound)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_even_where_both_agree(value):
    with pytest.raises(SyncError, match=r"the trainer gives token 1 \(id 2\) of sequence 1"):
        make_probe(lookup([VALUES[0], [value], VALUES[2]]), SEQUENCES, exact=True)
    probe = make_probe(lookup(VALUES), SEQUENCES, exact=True)
    with pytest.raises(SyncError, match=r"rollout gives token 2 \(id 4\) of sequence 0"):
        check_probe(probe, lookup([[-1.5, value], *VALUES[1:]]), "rollout")
    agreed = Probe([(1, 2)], [np.float32(value).tobytes().hex()], True)
    with pytest.raises(SyncError, match="the trainer gives token 1"):
        check_probe(agreed, lookup([[value]]))


@pytest.mark.parametrize(
    "reply, said",
    [
        (VALUES[:2], "scored 2 of 3"),
        ([VALUES[0], [-3.0, -1.0], VALUES[2]], r"float32\[2\] for sequence 1; expected float32\[1\]"),
    ],
)
def test_replies_of_the_wrong_shape(reply, said):
    probe = make_probe(lookup(VALUES), SEQUENCES, exact=True)
    with pytest.raises(SyncError, match=said):
        check_probe(probe, lookup(reply))


def test_replies_of_the_wrong_type():
    probe = make_probe(lookup(VALUES), SEQUENCES, exact=True)
    with pytest.raises(SyncError, match=r"returned float64\[2\] for sequence 0"):
        check_probe(probe, lambda sequences: [np.array(v) for v in VALUES])


@pytest.mark.parametrize(
    "probe",
    [
        Probe([], [], True),
        Probe([(1, 2)], [], True),
        Probe([(1, 2)], ["zz"], True),
        Probe([(1, 2)], ["0000"], True),
        Probe([(1,)], [""], True),
    ],
)
def test_probes_that_check_nothing(probe):
    with pytest.raises(SyncError, match="probe"):
        check_probe(probe, lookup([[-1.0]] * len(probe.sequences)))


def test_probes_need_something_to_predict():
    for sequences in ([], [(1,)], [(1, 2), ()]):
        with pytest.raises(SyncError, match="at least 2 tokens"):
            make_probe(lookup([]), sequences, exact=True)


def test_sequences_are_fixed_and_touch_many_rows():
    rows = probe_sequences(1000, 8, 16, 0)
    assert rows == probe_sequences(1000, 8, 16, 0) != probe_sequences(1000, 8, 16, 1)
    assert [len(row) for row in rows] == [16] * 8
    read, predicted = {t for row in rows for t in row[:-1]}, {t for row in rows for t in row[1:]}
    assert {0, 999} <= read & predicted and len(read | predicted) >= 8 * 16 - 4
    assert max(np.diff(sorted(read | predicted))) < 40  # spread over all of the vocabulary
    assert all(isinstance(t, int) for row in rows for t in row)


@pytest.mark.parametrize("vocab, count, length", [(1, 1, 2), (2, 3, 2), (5, 1, 2), (7, 2, 3), (3, 4, 50)])
def test_small_vocabularies_and_probes(vocab, count, length):
    rows = probe_sequences(vocab, count, length, 3)
    assert len(rows) == count and all(len(row) == length and 0 <= min(row) <= max(row) < vocab for row in rows)
    used = {t for row in rows for t in row}
    assert {0, vocab - 1} <= used


def test_no_sequences_of_nothing():
    for arguments in ((0, 1, 2), (5, 0, 2), (5, 1, 1)):
        with pytest.raises(SyncError, match="expected at least"):
            probe_sequences(*arguments, 0)
