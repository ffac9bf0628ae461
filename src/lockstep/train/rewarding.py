"""From sampled trajectories to rewarded ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.envs.base import Score
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
    on_error: str = "fail",
) -> tuple[list[Trajectory], dict[str, int]]:
    """(trajectories with text and rewards, numbers for the step's record). Failed samples stay in the record, with
    their reason, and take no part in training. warn: told what failed. on_error: the recipe's `environment.on_error`.

    Where there is an environment, what it gave is one more part of the reward, "environment", and what failed there is
    not scored any further. Raises RewardError where an environment failed and on_error is "fail", and as `Reward.score`
    does.
    """
    by_id = {p.id: p for p in prompts}
    texts = [tokenizer.decode(t.completion_ids.tolist()) for t in trajectories]
    lost = [t for t in trajectories if t.failed is not None]
    if lost and on_error == "fail":
        raise RewardError(
            f"{lost[0].failed}, for sample {lost[0].index} of {lost[0].group_id!r}. Mend the environment, or set "
            'environment.on_error = "drop" to leave such samples out of training, counted'
        )
    played = [i for i, t in enumerate(trajectories) if t.failed is None]
    scored = reward.score([by_id[trajectories[i].group_id] for i in played], [texts[i] for i in played])
    given = dict(zip(played, scored, strict=True))
    scores = [_with_environment(t, given[i]) if i in given else _failed(t) for i, t in enumerate(trajectories)]
    numbers = reward.numbers()
    kinds = Counter(t.failed.partition(":")[0].removeprefix("environment ") for t in lost if t.failed is not None)
    numbers |= {f"failures/environment/{kind}": count for kind, count in sorted(kinds.items())}
    failed = [s.failed for s in scores if s.failed is not None]
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


def _with_environment(t: Trajectory, score: Score) -> Score:
    if t.turn_rewards is None:
        return score
    given = float(t.turn_rewards.sum())
    return replace(score, value=score.value + given, parts={"environment": given, **score.parts})


def _failed(t: Trajectory) -> Score:
    return Score(math.nan, {}, t.failed)
