"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    r(y) = beta log(pi(y | x) / ref(y | x))
    L    = mean over pairs of -log sigmoid(r(y_chosen) - r(y_rejected))

The loss of a reward model whose reward is the policy's own log-ratio to the reference, times beta. Log-probabilities
are sums over the completion, not means: a longer completion can move further.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lockstep.algorithms.bradley_terry import bradley_terry


def dpo(ratios: jax.Array, beta: float, mask: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(loss, metrics), means over the real pairs. ratios [P, 2] float32: log(pi / ref) of chosen and rejected; the only
    thing differentiated. mask [P] bool: False for padding, whose ratios may be anything.

    Metrics as those of `bradley_terry`, of the implicit rewards r: accuracy, margin, chosen, rejected.
    """
    return bradley_terry(beta * ratios, jnp.zeros(mask.shape, jnp.float32), mask)
