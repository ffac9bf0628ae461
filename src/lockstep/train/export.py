"""A run's newest weights as a Hugging Face folder: `lockstep export`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lockstep import checkpoint
from lockstep.config import load_config
from lockstep.errors import CheckpointError
from lockstep.models import load_model
from lockstep.models.catalog import LoadedModel
from lockstep.models.hf import save_folder
from lockstep.models.lora import merge
from lockstep.sync.verify import leaf_digests, tree_digest
from lockstep.train.optimizer import actor_schedule, make_optimizer
from lockstep.train.policy import TRAINABLE_DTYPE, split_leaves


def export_run(run_dir: Path, to: Path, say: Callable[[str], None] | None = None) -> None:
    """Write the policy of the run's newest checkpoint as a model folder, an adapter merged into its base.

    say: told what takes long, such as a download.
    Raises CheckpointError without a checkpoint, or when the adapter was trained on another base than is there now;
    ModelError when `to` exists or the model cannot be written.
    """
    step = checkpoint.latest(run_dir)
    if step is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to export; it writes one at the end and every few steps")
    config = load_config(run_dir / "recipe.toml")
    model = load_model(config.model.name, config.model.dtype, say=say)
    leaves = split_leaves(config, model.spec)
    like = {path: jax.ShapeDtypeStruct(leaf.shape, TRAINABLE_DTYPE) for path, leaf in leaves.trains.items()}
    optimizer = make_optimizer(config.optim, actor_schedule(config))
    arrays, meta = checkpoint.restore(
        run_dir, step, {"trainable": like, "optimizer": jax.eval_shape(optimizer.init, like)}, partial=True
    )
    trained = arrays["trainable"]
    if leaves.lora:
        base = tree_digest(leaf_digests({path: jax.device_put(array) for path, array in model.params.items()}))
        if base != meta["model"]:
            raise CheckpointError(
                f"the adapter of {run_dir} was trained on other weights than {model.source} holds now (digest then "
                f"{meta['model'][:8]}, now {base[:8]}); put that model back at {config.model.name}"
            )
        params = merge(model.params, trained, leaves.lora.scale)
    else:
        params = {path: np.asarray(trained[path]).astype(model.params[path].dtype) for path in leaves.trains}
    write_model(to, model, params)


def write_model(to: Path, model: LoadedModel, params: Mapping[str, Any]) -> None:
    """`params` as a Hugging Face folder with the model's tokenizer. Raises ModelError when `to` exists."""
    with tempfile.TemporaryDirectory() as scratch:
        # Special token ids go where `save_folder` looks for them, beside the tokenizer's own files.
        model.tokenizer.save(scratch)
        Path(scratch, "config.json").write_text(json.dumps({"eos_token_id": sorted(model.tokenizer.eos_ids)}))
        save_folder(to, model.spec, params, tokenizer_files_from=scratch)
