"""A run's newest weights as a Hugging Face folder: `lockstep export`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import jax
import numpy as np

from lockstep import checkpoint
from lockstep.config import load_config
from lockstep.errors import CheckpointError
from lockstep.models import load_model
from lockstep.models.hf import save_folder
from lockstep.models.lora import adapter_table, merge
from lockstep.models.spec import leaf_table
from lockstep.train.assembly import TRAINABLE_DTYPE, lora_spec, make_optimizer, make_schedule


def export_run(run_dir: Path, to: Path) -> None:
    """Write the policy of the run's newest checkpoint as a model folder, an adapter merged into its base.

    Raises CheckpointError without a checkpoint, ModelError when `to` exists or the model cannot be written.
    """
    step = checkpoint.latest(run_dir)
    if step is None:
        raise CheckpointError(f"{run_dir} has no checkpoint to export; it writes one at the end and every few steps")
    config = load_config(run_dir / "recipe.toml")
    model = load_model(config.model.name, config.model.dtype)
    lora = lora_spec(config.lora, model.spec)
    table = adapter_table(model.spec, lora) if lora else leaf_table(model.spec)
    like = {path: jax.ShapeDtypeStruct(leaf.shape, TRAINABLE_DTYPE) for path, leaf in table.items()}
    optimizer = make_optimizer(config.optim, make_schedule(config.optim, config.run.steps))
    arrays, _ = checkpoint.restore(
        run_dir, step, {"trainable": like, "optimizer": jax.eval_shape(optimizer.init, like)}
    )
    trained = arrays["trainable"]
    if lora:
        params = merge(model.params, trained, lora.scale)
    else:
        params = {path: np.asarray(trained[path]).astype(model.params[path].dtype) for path in table}
    with tempfile.TemporaryDirectory() as scratch:
        # Special token ids go where `save_folder` looks for them, beside the tokenizer's own files.
        model.tokenizer.save(scratch)
        Path(scratch, "config.json").write_text(json.dumps({"eos_token_id": sorted(model.tokenizer.eos_ids)}))
        save_folder(to, model.spec, params, tokenizer_files_from=scratch)
