"""lockstep's own engine as a worker of `benchmarks/decode.py`. option: `exact` or `fast`."""

from __future__ import annotations

import time
from typing import Any

from decode_worker import Job, Setup, serve

TILE_ROWS, PAGE_SIZE = 32, 16  # the defaults of a recipe


class Lockstep:
    """One engine, sized for the largest job, warm from job to job. Prompts differ from job to job, so that no job finds
    its own in the prefix cache; within a job the samples of a prompt share it."""

    packages = ("lockstep-rl", "jax", "jaxlib", "numpy")

    def __init__(self, setup: Setup) -> None:
        import jax

        from lockstep.cluster.devices import device_kinds
        from lockstep.cluster.mesh import Dial
        from lockstep.cluster.programs import Programs
        from lockstep.cluster.sharding import place
        from lockstep.models import load_model
        from lockstep.models.decoder import Numerics
        from lockstep.models.spec import leaf_table
        from lockstep.rollout.engine import Engine, make_fingerprint
        from lockstep.types import PolicyVersion, SamplingParams

        loaded = load_model(setup.model, "float32")
        mesh = Dial.build({"actor": {}, "rollout": "actor"}, jax.devices()[:1]).mesh("rollout")
        table = leaf_table(loaded.spec)
        tile = TILE_ROWS if setup.option == "exact" else 0
        programs = Programs(loaded.spec, Numerics("float32", tile, PAGE_SIZE), mesh, table)
        slots = -(-setup.max_sequences // TILE_ROWS) * TILE_ROWS
        kinds = device_kinds(list(mesh.devices.flat))
        fingerprint = make_fingerprint(loaded.tokenizer, SamplingParams(1.0, 1, frozenset()), programs.num, kinds)
        self.engine = Engine(programs, slots=slots, max_positions=setup.max_positions, fingerprint=fingerprint)
        self.engine.install(PolicyVersion(0, "0" * 32), place(loaded.params, table, mesh))
        self.jobs = 0
        self.last: dict[str, Any] = {}

    def prepare(self, job: Job) -> None:
        self.jobs += 1

    def generate(self, job: Job) -> list[list[int]]:
        from lockstep.rollout.engine import request_seed
        from lockstep.types import Prompt, SamplingParams

        # A request has one length, so every sample is a request of its own; they find the prompt in the prefix cache.
        for number, (ids, length) in enumerate(job.samples):
            prompt = Prompt(f"{self.jobs}/{number}", "", tuple(ids))
            seeds = [request_seed(job.seed, self.jobs, prompt.id, 0)]
            self.engine.submit(prompt, seeds, SamplingParams(job.temperature, length, frozenset()))
        before, start, first = dict(vars(self.engine.stats)), time.perf_counter(), 0.0
        done: dict[int, list[int]] = {}
        while self.engine.busy:
            finished = self.engine.step()
            if not first and self.engine.stats.completion_tokens > before["completion_tokens"]:
                first = time.perf_counter() - start
            done |= {int(t.group_id.split("/")[1]): t.completion_ids.tolist() for t in finished}
        now = vars(self.engine.stats)
        self.last = {"first_token_s": first, **{k: now[k] - v for k, v in before.items()}}
        return [done[i] for i in range(len(done))]

    def details(self) -> dict[str, Any]:
        return self.last


if __name__ == "__main__":
    serve(Lockstep)
