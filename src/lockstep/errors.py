"""Every error that lockstep raises on purpose, as one tree.

    LockstepError
      ConfigError         a recipe, an override or a command-line value is wrong (also a ValueError)
      ModelError          a model folder, a weight file or a configuration cannot be used (also a ValueError)
      TokenizerError      a tokenizer or a chat template is missing, unsupported or inconsistent (also a ValueError)
      DataError           a data set, a prompt or a task cannot be used (also a ValueError)
      AlgorithmError      an algorithm of one's own raised, or gave what no step can be trained on
      RewardError         a reward function or judge failed (raised, hung, gave no number), or broke its contract
      CapacityError       a request cannot ever fit: prompt over the limit, too few pages, too little memory
      QueueFullError      a request could run, but too many wait already; it can be submitted again later
      ServiceError        the rollout service cannot take or finish a request: closing, no replica, its version is gone
      SyncError           weights could not be placed or verified; names the leaf, both shapes and both layouts
      MismatchError       the trainer's log-probabilities are not the sampler's record (exact mode)
      NumericsError       a log-probability, a gradient or updated weights are NaN or infinite
      FingerprintError    a trajectory was made under another tokenizer, template, decoding or numerics
      CheckpointError     a run directory or checkpoint is missing, torn or belongs to another recipe

The message says what was expected, what was found, the name of the thing, and the remedy. Errors of ours
(a broken invariant) are assertions, not members of this tree.
"""


class LockstepError(Exception):
    """Base of all errors a user can cause or meet."""


class ConfigError(LockstepError, ValueError):
    """A recipe, an override or a command-line value is wrong."""


class ModelError(LockstepError, ValueError):
    """A model folder, a weight file or a model configuration cannot be used."""


class TokenizerError(LockstepError, ValueError):
    """A tokenizer or chat template is missing, unsupported or inconsistent."""


class DataError(LockstepError, ValueError):
    """A data set, a prompt or a task cannot be used."""


class AlgorithmError(LockstepError):
    """An algorithm of one's own raised, or gave what no step can be trained on."""


class RewardError(LockstepError):
    """A reward function or a judge failed and the recipe says that this stops the run, or it broke its contract."""


class CapacityError(LockstepError):
    """A request can never fit: prompt over the limit, too few pages, too little memory."""


class QueueFullError(LockstepError):
    """A request could run, but too many wait already: nothing was queued, it can be submitted again later."""


class ServiceError(LockstepError):
    """The rollout service cannot take or finish a request: it is closing, has no replica, or the version is gone."""


class SyncError(LockstepError):
    """Weights could not be placed or verified; the destination was left as it was."""


class MismatchError(LockstepError):
    """Exact mode, yet the trainer's log-probabilities differ from the sampler's record."""


class NumericsError(LockstepError):
    """A log-probability, a gradient or updated weights are NaN or infinite; nothing of the step was kept."""


class FingerprintError(LockstepError):
    """A trajectory was made under another tokenizer, template, decoding configuration or numerics."""


class CheckpointError(LockstepError):
    """A run directory or a checkpoint is missing, torn, or belongs to another recipe."""
