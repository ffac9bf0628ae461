"""Supervised fine-tuning: maximum likelihood of given completions (as the first stage of RLHF: Ouyang et al. 2022,
arXiv:2203.02155, section 3.5).

    L = -sum over examples, tokens t of their completions: log pi(y_t | x, y_<t)  /  all completion tokens

A prompt's tokens are read and not predicted. The mean is over the tokens of the whole batch, so a token weighs the same
in a short completion and in a long one, and however the batch is cut.
"""

from __future__ import annotations

from typing import Any

import jax


def sft(sums: jax.Array, tokens: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss in nats per token, metrics). sums [B] float32: each completion's log-probability, summed over its tokens,
    0 for padding; the only thing differentiated. tokens: a scalar, those of all completions of the batch."""
    loss = -sums.sum() / tokens
    return loss, {"loss": loss}
