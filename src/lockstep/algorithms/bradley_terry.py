"""The loss of preference pairs (Bradley & Terry 1952, Biometrika 39; as a reward model's loss: Ouyang et al. 2022,
arXiv:2203.02155, equation 1, with the margin of Touvron et al. 2023, arXiv:2307.09288, section 3.2.2).

    loss = mean over pairs of -log sigmoid(r_chosen - r_rejected - margin)

Only the difference of a pair's scores is trained; what all scores have in common is arbitrary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def bradley_terry(scores: jax.Array, margins: Any, mask: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics), means over the real pairs. scores [P, 2] float32: chosen, rejected; the only thing
    differentiated. margins [P] float32; mask [P] bool: False for padding, whose scores may be anything.

    accuracy: pairs whose chosen score is the higher one (a tie counts half); margin: mean difference; chosen, rejected:
    mean scores.
    """
    scores = jnp.where(mask[:, None], scores, 0.0)
    difference = scores[:, 0] - scores[:, 1]
    count = mask.sum()

    def mean(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x, 0.0).sum() / count

    loss = mean(jax.nn.softplus(margins - difference))
    return loss, {
        "loss": loss,
        "accuracy": mean(0.5 * (jnp.sign(difference) + 1)),
        "margin": mean(difference),
        "chosen": mean(scores[:, 0]),
        "rejected": mean(scores[:, 1]),
    }
