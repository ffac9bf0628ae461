"""After a warm-up nothing is compiled any more, whatever the work; and it compiles what the sizes say, no more."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, padded_pages, padded_rows
from lockstep.cluster.sharding import place
from lockstep.models.decoder import Numerics
from lockstep.models.lora import LoraSpec, adapter_table
from lockstep.models.quantise import Storage
from lockstep.models.spec import leaf_table
from lockstep.rollout.draft_model import ModelDrafts
from lockstep.rollout.drafts import Payoff, SeenDrafts
from lockstep.rollout.engine import Engine
from lockstep.rollout.swap import PoolRows, SwapCosts
from lockstep.rollout.warm_up import counted, needed, needed_by, sizes
from lockstep.rollout.work import Swap
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams

FINGERPRINT = Fingerprint("tokenizer", "template", "decoding", "numerics")
SCORED = SamplingParams(1.0, 16, frozenset({1, 2, 3}), prompt_logprobs=True)
CUT = SamplingParams(0.8, 16, frozenset({1}), top_k=20, top_p=0.9)


class Any(Payoff):
    """Sometimes none, sometimes as many as fit."""

    turn = 0

    def best(self, sequences: int, rows: int, room: int) -> int:
        self.turn += 1
        return min(self.turn % (self.most + 1), room // sequences) if sequences else 0


def fresh(tiny_programs, devices: int = 1, **num) -> Programs:
    """The programs of `tiny_programs` with nothing compiled."""
    p = tiny_programs(devices)
    return Programs(p.spec, replace(p.num, **num), p.mesh, p.leaves)


def engine_of(programs: Programs, params, **options) -> Engine:
    sizes = {"slots": 32, "max_positions": 48, "num_pages": 12, "prefill_rows": 64, "fingerprint": FINGERPRINT}
    engine = Engine(programs, **(sizes | options))
    engine.install(PolicyVersion(4, "four"), params)
    return engine


def total(shapes: dict[str, list[tuple[int, ...]]]) -> int:
    return sum(map(len, shapes.values()))


def work(engine: Engine, seed: int, params: SamplingParams) -> None:
    """Requests of any length and number, some at once, some later, some cancelled."""
    rng = np.random.default_rng(seed)
    for number in range(int(rng.integers(1, 7))):
        length = int(rng.integers(1, 40))
        ids = rng.integers(0, 262, length) if rng.integers(0, 2) else np.arange(length)
        asked = replace(
            params, max_new_tokens=int(rng.integers(1, min(9, 49 - length))),
            prompt_logprobs=params.prompt_logprobs and bool(rng.integers(0, 2)),
        )  # fmt: skip
        engine.submit(Prompt(f"w{number}", "", tuple(ids.tolist())), range(int(rng.integers(1, 20))), asked)
        for _ in range(int(rng.integers(0, 5))):
            engine.step()
    if rng.integers(0, 2):
        engine.abort("w0")
    while engine.busy:
        engine.step()


CASES = {
    "scored, swapped, drafted": (SCORED, {"swap": "always", "drafts": SeenDrafts, "make_payoff": Any}, {}),
    "cut, computed again": (CUT, {"swap": "never"}, {}),
    "eight bits": (
        SCORED,
        {"swap": "always", "storage": Storage("int8", "int8"), "prefill_rows": 32},
        {"tile_rows": 0},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_more_is_compiled_after_a_warm_up(tiny_programs, tiny_params, name: str) -> None:
    params, options, num = CASES[name]
    made = {k: v() if k == "drafts" else v for k, v in options.items()}
    engine = engine_of(fresh(tiny_programs, **num), tiny_params(), **made)
    wanted = total(needed_by(engine, params))
    with counted() as compiled:
        done = engine.warm_up(params)
    assert len(compiled) == done.programs == wanted
    assert engine.check_integrity()[0][0] == 12, "nothing is held"
    with counted() as compiled:
        assert engine.warm_up(params).programs == 0

    @settings(max_examples=10)
    @given(st.integers(0, 2**32))
    def nothing(seed: int) -> None:
        work(engine, seed, params)
        assert compiled == [], f"{len(compiled)} programs were compiled late"

    with counted() as compiled:
        nothing()
    stats = engine.stats
    assert stats.preemptions > 0 and (stats.swaps > 0) == (options["swap"] == "always")
    assert (stats.accepted > 0) == ("drafts" in options)


def test_a_warm_up_changes_no_completion(make_engine, tiny_programs, tiny_params) -> None:
    p = Prompt("p", "", tuple(range(20)))
    cold, warm = make_engine(), make_engine()
    assert warm.warm_up(SCORED).seconds > 0
    for _ in range(2):
        a, b = (e.generate([p], {p.id: [1, 2, 3]}, SCORED) for e in (cold, warm))
        assert [(t.completion_ids.tolist(), t.logprobs.tobytes()) for t in a] == [
            (t.completion_ids.tolist(), t.logprobs.tobytes()) for t in b
        ]


@pytest.mark.slow
def test_what_is_left_out_is_compiled_late(tiny_programs, tiny_params) -> None:
    """The count can fail: an engine that was warmed up for less."""
    engine = engine_of(fresh(tiny_programs), tiny_params())
    engine.warm_up(SamplingParams(1.0, 8, frozenset()))
    with counted() as compiled:
        p = Prompt("p", "", tuple(range(20)))
        engine.generate([p], {p.id: [1]}, SCORED)
    assert compiled, "log-probabilities of the prompt, and steps with three stop ids"


@pytest.mark.slow
def test_layers_with_and_without_an_adapter_are_two_kinds_and_a_draft_model_has_programs(
    tiny_programs, tiny_params
) -> None:
    base = tiny_programs(1)
    adapter = adapter_table(base.spec, LoraSpec(2, 4.0, last_layers=1))
    programs = Programs(base.spec, replace(base.num, lora_scale=2.0), base.mesh, {**base.leaves, **adapter})
    blank = {path: np.zeros(leaf.shape, np.float32) for path, leaf in adapter.items()}
    draft = engine_of(fresh(tiny_programs), tiny_params())
    engine = engine_of(
        programs, place({**tiny_params(), **blank}, programs.leaves, base.mesh), drafts=ModelDrafts(draft),
        make_payoff=Any,
    )  # fmt: skip
    plain = SamplingParams(1.0, 8, frozenset())
    assert {shape[0] for shape in needed_by(engine, plain)["layer"]} == {0, 1}
    wanted = total(needed_by(engine, plain)) + total(needed_by(draft, plain))
    assert engine.warm_up(plain).programs == wanted
    with counted() as compiled:
        for seed in range(3):
            work(engine, seed, plain)
    assert compiled == [] and engine.stats.accepted > 0


@given(
    st.integers(1, 300), st.integers(1, 700), st.integers(1, 600), st.sampled_from([0, 8, 32]),
    st.sampled_from([1, 4, 16]), st.booleans(),
)  # fmt: skip
def test_every_padded_size_is_among_them(
    slots: int, prefill: int, positions: int, tile: int, page: int, drafts: bool
) -> None:
    rows = max(slots, prefill)

    def heads(count: int) -> int:
        return padded_rows(count, 16)

    def passes(count: int) -> int:
        return 8 if count <= 8 and tile != 8 else padded_rows(count, tile)

    found = needed(
        slots=slots, max_rows=rows, max_positions=positions, page_size=page, rows_for=passes, head_rows_for=heads,
        params=SCORED, drafts=drafts, ahead=not drafts, swap_rows=positions,
    )  # fmt: skip
    assert all(len(set(shapes)) == len(shapes) for shapes in found.values())
    n = {passes(count) for count in range(1, rows + 1)}
    widths = {padded_pages(count, page) for count in range(1, positions + 1)}
    drawn = {heads(count) for count in range(1, slots + (rows if drafts else 0) + 1)}
    steps = set() if drafts else {passes(count) for count in range(1, slots + 1)}
    assert {s[0] for s in found["embed"]} == n
    assert {s[1:] for s in found["layer"]} == {(a, b) for a in n for b in widths}
    assert {m for (m,) in found["sample"]} == drawn | {heads(a) for a in steps}
    assert {(a, b) for a in n for b in drawn} <= set(found["pick"])
    assert {(a, heads(a)) for a in n} | {(a, heads(1)) for a in n} <= set(found["pick"]), "prompts that are scored"
    assert {m for _, m in found["pick"]} == {m for (m,) in found["sample"] + found["logprobs"]}
    assert set(found.get("advance", [])) == {(a, b) for a in steps for b in widths}
    assert {s[0] for s in found["save"]} == widths
    assert "choose" not in found and "save" not in needed(
        slots=slots, max_rows=rows, max_positions=positions, page_size=page, rows_for=passes, head_rows_for=heads,
        params=SCORED,
    )  # fmt: skip


def test_sizes_double() -> None:
    assert sizes(32, 256) == [32, 64, 128, 256] and sizes(16, 16) == [16] and sizes(3, 24) == [3, 6, 12, 24]


def test_swaps_of_a_cache_that_is_cut_over_heads_are_among_them(tiny_spec) -> None:
    """What is copied back lies as the pool does, in the warm-up as in earnest."""
    mesh = Dial.build({"rollout": {"tensor": 2}}).mesh("rollout")
    programs = Programs(tiny_spec, Numerics("float32", 32, 16, tensor_parts=2), mesh, leaf_table(tiny_spec))
    copies = PoolRows(programs, trash=64)
    pools = copies.run_blank(programs.new_pools(65), 16)
    costs, swap = SwapCosts(1), Swap(SimpleNamespace(saved=None), np.arange(9, dtype=np.int32))
    with counted() as compiled:
        copies.save(pools, [[swap]], costs)
        copies.load(pools, [[swap]], costs)
    assert compiled == []
