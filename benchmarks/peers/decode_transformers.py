"""Hugging Face transformers' `generate` as a worker of `benchmarks/decode.py`, float32.

A batch runs until its longest sample is done, and a sample that is done is computed on: that is how `generate` works,
and nobody knows the lengths beforehand. option: rows of a batch at a time ("": all).
"""

from __future__ import annotations

from typing import Any

from decode_worker import Job, Setup, serve


class Transformers:
    packages = ("transformers", "torch", "tokenizers", "safetensors")

    def __init__(self, setup: Setup) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(setup.threads)
        self.model = AutoModelForCausalLM.from_pretrained(setup.model, dtype=torch.float32).eval()
        self.rows = int(setup.option or 0)

    def prepare(self, job: Job) -> None:
        import torch

        torch.manual_seed(job.seed)

    def generate(self, job: Job) -> list[list[int]]:
        import torch

        samples = job.samples
        rows = self.rows or len(samples)
        how: dict[str, Any] = {"do_sample": False}
        if job.temperature:
            how = {"do_sample": True, "temperature": job.temperature, "top_k": 0, "top_p": 1.0}
        done: list[list[int]] = []
        for start in range(0, len(samples), rows):
            part = samples[start : start + rows]
            ids = torch.tensor([p for p, _ in part])
            with torch.inference_mode():
                out = self.model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max(n for _, n in part),
                    eos_token_id=None,
                    pad_token_id=0,
                    **how,
                )
            fresh = out[:, ids.shape[1] :].tolist()
            done += [row[:n] for row, (_, n) in zip(fresh, part, strict=True)]
        return done

    def details(self) -> dict[str, Any]:
        return {"attention": self.model.config._attn_implementation}


if __name__ == "__main__":
    serve(Transformers)
