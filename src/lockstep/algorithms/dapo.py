"""Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, arXiv:2503.14476).

GRPO's advantage and surrogate with four changes, which are settings here and not code: more room above than below
(`clip_high` 0.28, section 3.1); groups whose rewards are all equal are replaced by others (`dynamic_rounds`, section
3.2); a mean over tokens (`aggregate`, section 3.3); a reward that falls towards the limit of length
(`overlong_tokens`, section 3.4, equation 13).
"""

from __future__ import annotations

from lockstep.algorithms.grpo import GRPO


class DAPO(GRPO):
    """GRPO; what differs are the recipe's defaults."""
