"""`lockstep generate` as a function: texts in, texts and records out, without a run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.errors import CapacityError, ConfigError
from lockstep.models import load_model
from lockstep.models.decoder import reference_logits
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.generate import generate
from lockstep.types import Trajectory

DEFAULTS: dict[str, Any] = {
    "chat": False, "samples": 1, "max_new_tokens": 6, "temperature": 1.0, "seed": 0, "stop": (),
    "numerics_mode": "exact",
}  # fmt: skip


def run(folder: Path, *prompts: str, **options: Any) -> list[Trajectory]:
    return generate(str(folder), prompts, **(DEFAULTS | options))


def test_completions_come_in_order_with_text_and_record(tiny_folder: Path) -> None:
    done = run(tiny_folder, "One, two", "A", samples=3)
    assert [(t.group_id, t.index) for t in done] == [(f"prompt/{p}", i) for p in (0, 1) for i in range(3)]
    tokenizer = Tokenizer.from_hf(tiny_folder)
    for t in done:
        assert t.prompt_ids.tolist() == tokenizer.encode(("One, two", "A")[int(t.group_id[-1])])
        assert t.text == tokenizer.decode(t.completion_ids.tolist())
        assert t.versions.tolist() == [0] * len(t.logprobs) and 1 <= len(t.logprobs) <= 6
    assert len({t.text for t in done[:3]}) == 3


def test_the_record_is_the_models(tiny_folder: Path) -> None:
    """Against the slow forward pass, at the temperature it was sampled at."""
    model = load_model(str(tiny_folder))
    for temperature, scale in ((0.7, 0.7), (0.0, 1.0)):
        for t in run(tiny_folder, "Hello", samples=2, temperature=temperature):
            ids = np.concatenate([t.prompt_ids, t.completion_ids])
            z = np.asarray(reference_logits(model.spec, model.params, ids[None]), np.float64)[0] / scale
            z = (z - np.logaddexp.reduce(z, -1, keepdims=True))[len(t.prompt_ids) - 1 : -1]
            np.testing.assert_allclose(t.logprobs, z[np.arange(len(z)), t.completion_ids], atol=1e-5)


def test_runs_repeat_and_seeds_matter(tiny_folder: Path) -> None:
    first, again, other = (run(tiny_folder, "Hello", samples=2, seed=s) for s in (3, 3, 4))
    assert [(t.text, t.logprobs.tobytes()) for t in first] == [(t.text, t.logprobs.tobytes()) for t in again]
    assert [t.text for t in first] != [t.text for t in other]


def test_more_samples_than_are_decoded_together(tiny_folder: Path) -> None:
    """140 samples on 128 slots; the first two are those that two alone would be."""
    many, few = (
        run(tiny_folder, "Hi", samples=140, max_new_tokens=2),
        run(tiny_folder, "Hi", samples=2, max_new_tokens=2),
    )
    assert [t.index for t in many] == list(range(140))
    assert [t.completion_ids.tolist() for t in many[:2]] == [t.completion_ids.tolist() for t in few]


def test_every_end_of_sequence_id_and_every_stop_text_stops(tiny_folder: Path) -> None:
    eos = Tokenizer.from_hf(tiny_folder).eos_ids
    stop = Tokenizer.from_hf(tiny_folder).single_id("e")
    assert len(eos) == 2
    done = run(tiny_folder, "Hello", samples=128, max_new_tokens=24, stop=["e"], temperature=1.3)
    ends = {int(t.completion_ids[-1]) for t in done if t.finish_reason == "stop"}
    assert ends == {*eos, stop}
    for t in done:
        inside = t.completion_ids[:-1] if t.finish_reason == "stop" else t.completion_ids
        assert not set(inside.tolist()) & {*eos, stop}
        assert len(t.completion_ids) == 24 or t.finish_reason == "stop"
    assert any(t.text.endswith("e") for t in done), "a stop text is kept; a special token is not shown"
    assert not any("<|" in t.text for t in done)


def test_a_stop_text_of_several_tokens_ends_where_it_is_complete(tiny_folder: Path) -> None:
    free = run(tiny_folder, "Hello", samples=8, max_new_tokens=16, ignore_eos=True)
    plain = [t.text for t in free if t.text.isascii() and len(t.text) > 6 and "<" not in t.text]
    stop = next((text[i : i + 2] for text in plain for i in range(3, 5)), free[0].text[3:5])
    cut = run(tiny_folder, "Hello", samples=8, max_new_tokens=16, ignore_eos=True, stop=[stop])
    assert any(t.finish_reason == "stop" for t in cut) and all(t.finish_reason == "length" for t in free)
    for whole, part in zip(free, cut, strict=True):
        assert whole.completion_ids.tolist()[: len(part.completion_ids)] == part.completion_ids.tolist()
        assert (part.finish_reason == "stop") == (stop in whole.text)
        assert part.text.endswith(stop) or part.finish_reason == "length"


def test_further_parameters_reach_the_sampler(tiny_folder: Path) -> None:
    t = run(tiny_folder, "Hello", sampling={"top_k": 3, "top_logprobs": 2})[0]
    assert t.kept_logmass is not None and (t.kept_logmass < 0).all()
    assert t.details is not None and t.details.top_ids is not None and t.details.top_ids.shape == (len(t.logprobs), 2)


def test_guessing_ahead_changes_nothing(tiny_folder: Path) -> None:
    wanted = run(tiny_folder, "Hello", samples=3, max_new_tokens=12, temperature=0.2)
    for how in ({"speculation": "ngram"}, {"speculation": "draft", "draft_model": str(tiny_folder), "draft_tokens": 2}):
        got = run(tiny_folder, "Hello", samples=3, max_new_tokens=12, temperature=0.2, **how)
        assert [(t.text, t.logprobs.tobytes()) for t in got] == [(t.text, t.logprobs.tobytes()) for t in wanted]


def test_chat_uses_the_models_template(tiny_folder: Path) -> None:
    t = run(tiny_folder, "Hello", chat=True, max_new_tokens=1)[0]
    text = Tokenizer.from_hf(tiny_folder).decode(t.prompt_ids.tolist(), skip_special=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_fast_numerics_are_told_apart_and_close(tiny_folder: Path) -> None:
    exact, fast = (run(tiny_folder, "Hello", numerics_mode=mode)[0] for mode in ("exact", "fast"))
    assert exact.fingerprint.difference(fast.fingerprint) == ["numerics"]
    same = exact.completion_ids[: len(fast.completion_ids)] == fast.completion_ids[: len(exact.completion_ids)]
    until = len(same) if same.all() else int(np.argmin(same))
    assert until > 0
    np.testing.assert_allclose(exact.logprobs[:until], fast.logprobs[:until], atol=1e-4)


@pytest.mark.slow
def test_bfloat16(tiny_folder: Path) -> None:
    t = run(tiny_folder, "Hello", dtype="bfloat16")[0]
    assert t.logprobs.dtype == np.float32 and np.isfinite(t.logprobs).all()


@pytest.mark.parametrize(
    ("prompts", "options", "error", "words"),
    [
        (["x" * 510], {}, ConfigError, ["6 new tokens need 516 positions", "512", "--max-new-tokens"]),
        ([""], {}, CapacityError, ["'prompt/0' has no tokens"]),
        (["a", ""], {}, CapacityError, ["'prompt/1' has no tokens"]),
        ([], {}, ConfigError, ["no prompts"]),
        (["a"], {"sampling": {"top_p": 2.0}}, ConfigError, ["top_p 2.0"]),
        (["a"], {"samples": 0}, ConfigError, ["0 samples"]),
        (["a"], {"temperature": float("inf")}, ConfigError, ["temperature inf"]),
        (["a"], {"numerics_mode": "quick"}, ConfigError, ["'quick'", "exact", "fast"]),
    ],
)
def test_what_cannot_be_done_is_said(
    tiny_folder: Path, prompts: list[str], options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        run(tiny_folder, *prompts, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_beginning_of_sequence_token_is_put_first_where_the_tokenizer_adds_one(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<|im_start|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain, with_bos = (
        run(folder, "Hello", max_new_tokens=1)[0].prompt_ids.tolist() for folder in (tiny_folder, tmp_path)
    )
    assert with_bos == [Tokenizer.from_hf(tmp_path).bos_id, *plain]
