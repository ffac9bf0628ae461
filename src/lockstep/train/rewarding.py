"""From sampled trajectories to rewarded ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.envs.rewards import Reward
from lockstep.errors import RewardError
from lockstep.models.tokenizer import Tokenizer
from lockstep.types import Prompt, Trajectory


def rewarded(
    reward: Reward,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    trajectories: Sequence[Trajectory],
    warn: Callable[[str], None],
) -> tuple[list[Trajectory], dict[str, int]]:
    """(trajectories with text and rewards, numbers for the step's record). Failed samples stay in the record, with
    their reason, and take no part in training. warn: told what failed.

    Raises RewardError where every sample failed, and as `Reward.score` does.
    """
    by_id = {p.id: p for p in prompts}
    texts = [tokenizer.decode(t.completion_ids.tolist()) for t in trajectories]
    scores = reward.score([by_id[t.group_id] for t in trajectories], texts)
    numbers = reward.numbers()
    failed = [s.failed for s in scores if s.failed is not None]
    if len(failed) == len(scores):
        raise RewardError(f"every one of the {len(scores)} samples failed to score; the first: {failed[0]}")
    counted = ", ".join(
        f"{name.removeprefix('failures/')} {count}" for name, count in numbers.items() if name.startswith("failures/")
    )
    if failed:
        warn(f"{len(failed)} of {len(scores)} samples dropped: {failed[0]}; failures: {counted}")
    replaced = [s.replaced for s in scores if s.replaced is not None]
    if replaced:
        warn(
            f"{len(replaced)} of {len(scores)} samples have reward.error_score for what failed: {replaced[0]}; "
            f"failures: {counted}"
        )
    return [
        replace(t, text=text, reward=s.value, rewards=s.parts, failed=s.failed)
        for t, text, s in zip(trajectories, texts, scores, strict=True)
    ], numbers
