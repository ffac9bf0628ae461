"""The page pool: from a budget to pages, and what a recipe's budget is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import RolloutConfig
from lockstep.errors import CapacityError, ConfigError
from lockstep.rollout.pool_size import (
    describe_pool,
    enough_pages,
    full_sequences,
    pages_of_recipe,
    pages_within,
    pool_bytes,
    row_bytes,
)
from lockstep.types import Prompt, SamplingParams


@given(st.integers(0, 1 << 34), st.integers(1, 64), st.integers(1, 1 << 20))
def test_a_budget_is_used_and_never_exceeded(budget: int, page: int, row: int) -> None:
    pages = pages_within(budget, page, row)
    assert pages == 0 or pool_bytes(pages, page, row) <= budget
    assert pool_bytes(pages + 1, page, row) > budget


@given(st.integers(1, 64), st.integers(1, 60), st.integers(1, 60), st.sampled_from([1, 3, 16]))
def test_enough_pages_are_enough(slots: int, prompt_length: int, new_tokens: int, page: int) -> None:
    each = -(-prompt_length // page) + -(-new_tokens // page)
    pages = enough_pages(slots, prompt_length + new_tokens, page)
    assert pages >= slots * each and full_sequences(pages, prompt_length + new_tokens, page) == slots


def test_bytes_are_those_that_an_engine_takes(make_engine, tiny_spec) -> None:
    engine = make_engine()
    row = row_bytes(tiny_spec, "float32")
    assert engine.kv_bytes_per_device() == pool_bytes(engine.num_pages, 16, row)
    # 3 layers, keys and values, 2 heads of 8: in float32, and in int8 with a scale of 4 bytes.
    assert (row, row_bytes(tiny_spec, "bfloat16", "int8")) == (3 * 2 * 2 * 8 * 4, 3 * 2 * 2 * (8 + 4))
    assert describe_pool(engine.num_pages, 16, engine.max_positions, engine.kv_bytes_per_device()) == (
        "key-value cache: 24 pages of 16 tokens, 144.4 KiB per device; 6 sequences of full length (48 tokens) fit"
    )


def test_a_recipe_says_pages_or_memory_or_nothing(tiny_spec) -> None:
    big = replace(tiny_spec, head_dim=512)  # a page of 16 positions is 16 * 24 KiB = 384 KiB

    def pages(length: int = 48, **keys: int) -> int:
        return pages_of_recipe(RolloutConfig(slots=32, **keys), big, "float32", length)

    assert (pages(), pages(num_pages=7)) == (32 * 4, 7)
    assert pages(kv_memory_mib=4) == 10 and pages(kv_memory_mib=4, page_size=8) == 21
    assert pages_of_recipe(RolloutConfig(slots=32, kv_memory_mib=4, kv_dtype="int8"), big, "float32", 48) == 42
    with pytest.raises(ConfigError) as error:
        pages(kv_memory_mib=1)
    for words in ("kv_memory_mib = 1 holds 2 pages of 16", "full length (48 tokens) takes 4", "use at least 2"):
        assert words in str(error.value)
    assert pages(kv_memory_mib=2) == 5, "what the error says is enough"
    with pytest.raises(ValueError, match=r"`rollout.num_pages` = 3 and `rollout.kv_memory_mib` = 2 both size"):
        RolloutConfig(num_pages=3, kv_memory_mib=2)


def test_a_sequence_of_full_length_runs_in_the_least_that_is_allowed(make_engine) -> None:
    pages = enough_pages(1, 48, 16)
    for length in (1, 15, 16, 17, 32, 40, 47):
        engine = make_engine(num_pages=pages)
        p = Prompt("p", "", tuple(range(1, length + 1)))
        (done,) = engine.generate([p], {p.id: [1]}, SamplingParams(1.0, 48 - length, frozenset()))
        assert len(done.completion_ids) == 48 - length
    with pytest.raises(CapacityError, match=r"need 4 pages .*the pool has 3; raise rollout.num_pages"):
        p = Prompt("p", "", tuple(range(1, 18)))
        make_engine(num_pages=3).generate([p], {p.id: [1]}, SamplingParams(1.0, 31, frozenset()))
