"""RL post-training for language models on JAX: the sampler and the trainer never disagree, bit for bit.

`Config`, `load_config`, `run` and `plan_sync` are the whole of the Python surface that a script needs:

    import lockstep
    run_directory = lockstep.run(lockstep.load_config("recipes/addition.toml", ["--run.steps", "2"]))
    print(lockstep.plan_sync("llama-3.1-8b", actor="fsdp=8", rollout="tensor=4,data=2"))

They are loaded on first use, so that `import lockstep` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config import Config, load_config
    from lockstep.plan.answer import plan_sync
    from lockstep.train.loop import run

    __version__: str

__all__ = ["Config", "__version__", "load_config", "plan_sync", "run"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("lockstep-rl")
    if name in ("Config", "load_config"):
        from lockstep import config

        return getattr(config, name)
    if name == "plan_sync":
        from lockstep.plan.answer import plan_sync

        return plan_sync
    if name == "run":
        from lockstep.train.loop import run

        return run
    raise AttributeError(f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
