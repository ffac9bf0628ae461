"""tunix's own sampler as a worker of `benchmarks/decode.py`, float32, on its Llama 3 model.

As with every static batch, all rows run until the longest is done. The cache is as long as the job needs and no longer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decode_worker import Job, Setup, serve


class NumberedPrompts:
    """A tokenizer that takes the number of a prompt for its text: the sampler accepts text only."""

    prompts: list[list[int]]

    def encode(self, text: str, **_: Any) -> list[int]:
        return self.prompts[int(text)]

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""

    def bos_id(self) -> int:
        return 0  # none is put before a prompt then: prompts are complete as they are

    def eos_id(self) -> int:
        return -2  # an id that no model draws: completions end by their length

    def pad_id(self) -> int:
        return 0


class Tunix:
    packages = ("google-tunix", "jax", "jaxlib", "flax")

    def __init__(self, setup: Setup) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np
        from tunix.models.llama3 import model, params

        numbers = json.loads(Path(setup.model, "config.json").read_text(encoding="utf-8"))
        if numbers["model_type"] != "llama":
            raise ValueError(f"this worker knows llama models, the folder holds a {numbers['model_type']}")
        heads = numbers["num_attention_heads"]
        theta = numbers.get("rope_theta") or numbers["rope_parameters"]["rope_theta"]
        self.config = model.ModelConfig(
            num_layers=numbers["num_hidden_layers"],
            vocab_size=numbers["vocab_size"],
            embed_dim=numbers["hidden_size"],
            hidden_dim=numbers["intermediate_size"],
            num_heads=heads,
            head_dim=numbers.get("head_dim") or numbers["hidden_size"] // heads,
            num_kv_heads=numbers["num_key_value_heads"],
            rope_theta=theta,
            norm_eps=numbers["rms_norm_eps"],
            weight_tying=numbers["tie_word_embeddings"],
        )
        # Its attention calls `apply_rope` without the base, whatever the configuration says (0.1.7), so that it is the
        # default's: without this the tokens would be those of another model. It costs nothing.
        model.apply_rope.__defaults__ = (theta,)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        self.model = params.create_model_from_safe_tensors(setup.model, self.config, mesh, dtype=jnp.float32)
        self.tokenizer = NumberedPrompts()
        self.samplers: dict[int, Any] = {}

    def prepare(self, job: Job) -> None:
        from tunix.generate import sampler

        size = len(job.prompts[0]) + max(n for _, n in job.samples)
        if size not in self.samplers:
            c = self.config
            cache = sampler.CacheConfig(size, c.num_layers, c.num_kv_heads, c.head_dim)
            # Kept, or the next job of this size would compile again, on its own time.
            self.samplers[size] = sampler.Sampler(self.model, self.tokenizer, cache)
        self.run = self.samplers[size]
        self.tokenizer.prompts = [p for p, _ in job.samples]

    def generate(self, job: Job) -> list[list[int]]:
        samples = job.samples
        longest = max(n for _, n in samples)
        how = {"temperature": job.temperature, "top_p": 1.0} if job.temperature else {}
        out = self.run(
            [str(i) for i in range(len(samples))], longest, max_prompt_length=len(samples[0][0]), seed=job.seed, **how
        )
        return [ids.tolist()[:n] for ids, (_, n) in zip(out.tokens, samples, strict=True)]

    def details(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(Tunix)
