"""llama.cpp as a worker of `benchmarks/decode.py`: weights, keys and values in float32.

The weights are the GGUF file that the benchmark's folder was made from, expanded to float32 by llama.cpp itself. It
would draw by a sampler per sequence; here a step's tokens are taken from its logits by numpy, which is faster. A prompt
is computed once for all its samples. Sequences have a cache of their own each, and llama.cpp computes neighbouring ones
together, so the longest samples are given the first places: that no gap arises when others finish.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from decode_worker import Job, Setup, serve

F32 = 0  # both GGML_TYPE_F32 and LLAMA_FTYPE_ALL_F32


def float32_file(source: Path, target: Path) -> Path:
    """The model with every tensor in float32; made when missing. RuntimeError when llama.cpp cannot do it."""
    import llama_cpp

    if not target.is_file():
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize, how.pure, how.nthread = F32, True, True, 1
        partial = target.with_suffix(".partial")
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(how))
        if code:
            raise RuntimeError(f"llama.cpp could not expand {source} to float32 (code {code})")
        partial.rename(target)
    return target


class LlamaCpp:
    packages = ("llama-cpp-python", "numpy")

    def __init__(self, setup: Setup) -> None:
        import llama_cpp
        import numpy as np

        if not setup.gguf:
            raise ValueError("the model is a folder; llama.cpp needs the .gguf file that holds the same weights")
        self.lib, self.np, self.setup = llama_cpp, np, setup
        file = float32_file(Path(setup.gguf), Path(setup.model).with_name(Path(setup.model).name + "-float32.gguf"))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp could not load {file}")
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.size = (0, 0)

    def prepare(self, job: Job) -> None:
        """A context for so many sequences of such a length."""
        lib = self.lib
        sequences, positions = len(job.samples), len(job.prompts[0]) + max(n for _, n in job.samples)
        if self.size != (sequences, positions):
            if self.context:
                lib.llama_batch_free(self.batch)
                lib.llama_free(self.context)
            params = lib.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.kv_unified = sequences * positions, sequences, False
            params.n_batch = params.n_ubatch = 512
            params.n_threads = params.n_threads_batch = self.setup.threads
            params.type_k = params.type_v = F32
            self.context = lib.llama_init_from_model(self.model, params)
            if not self.context:
                raise RuntimeError(f"llama.cpp could not make a context for {sequences} x {positions} positions")
            self.batch = lib.llama_batch_init(512, 0, 1)
            self.size = (sequences, positions)
        lib.llama_memory_clear(lib.llama_get_memory(self.context), False)
        self.random = self.np.random.default_rng(job.seed)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> Any:
        """Run rows of (token, position, sequence, whether its logits are wanted); the wanted logits [n, V]."""
        lib, np = self.lib, self.np
        for i, (token, pos, sequence, wanted) in enumerate(rows):
            self.batch.token[i], self.batch.pos[i], self.batch.logits[i] = token, pos, wanted
            self.batch.n_seq_id[i], self.batch.seq_id[i][0] = 1, sequence
        self.batch.n_tokens = len(rows)
        if code := lib.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode of {len(rows)} rows ended with code {code}")
        count = sum(r[3] for r in rows)
        return np.ctypeslib.as_array(lib.llama_get_logits(self.context), shape=(count, self.vocab))

    def draw(self, logits: Any, temperature: float) -> list[int]:
        """A token for each row of logits [n, V]: the largest, or by inversion of the softmax."""
        np = self.np
        if not temperature:
            return logits.argmax(1).tolist()
        weights = np.exp((logits - logits.max(1, keepdims=True)) / np.float32(temperature))
        running = weights.cumsum(1, dtype=np.float64)
        aim = self.random.random(len(logits)) * running[:, -1]
        return [min(int(np.searchsorted(r, a, "right")), self.vocab - 1) for r, a in zip(running, aim, strict=True)]

    def generate(self, job: Job) -> list[list[int]]:
        samples = job.samples
        order = sorted(range(len(samples)), key=lambda i: -samples[i][1])
        place = {sample: number for number, sample in enumerate(order)}
        done: list[list[int]] = [[] for _ in samples]
        self._prompts(job, place, done)
        pos = len(job.prompts[0])
        while active := [i for i in order if len(done[i]) < samples[i][1]]:
            logits = self.decode([(done[i][-1], pos, place[i], True) for i in active])
            for i, token in zip(active, self.draw(logits, job.temperature), strict=True):
                done[i].append(token)
            pos += 1
        return done

    def _prompts(self, job: Job, place: dict[int, int], done: list[list[int]]) -> None:
        """Compute each prompt in the first place of its samples, copy it to the others', draw their first tokens."""
        np, lib, memory = self.np, self.lib, self.lib.llama_get_memory(self.context)
        length, first = len(job.prompts[0]), 0
        groups = []
        for prompt, lengths in zip(job.prompts, job.lengths, strict=True):
            groups.append((prompt, list(range(first, first + len(lengths)))))
            first += len(lengths)
        # Together where their places are neighbours; a batch holds 512 rows.
        groups.sort(key=lambda g: min(place[i] for i in g[1]))
        at_once = max(1, 512 // length)
        for start in range(0, len(groups), at_once):
            part = groups[start : start + at_once]
            rows = [
                (token, pos, min(place[i] for i in own), pos == length - 1)
                for prompt, own in part
                for pos, token in enumerate(prompt)
            ]
            logits = self.decode(rows)
            for row, (_, own) in zip(logits, part, strict=True):
                source = min(place[i] for i in own)
                for i in own:
                    if place[i] != source:
                        lib.llama_memory_seq_cp(memory, source, place[i], -1, -1)
                drawn = self.draw(np.repeat(row[None], len(own), 0), job.temperature)
                for i, token in zip(own, drawn, strict=True):
                    done[i].append(token)

    def details(self) -> dict[str, Any]:
        return {}


if __name__ == "__main__":
    serve(LlamaCpp)
