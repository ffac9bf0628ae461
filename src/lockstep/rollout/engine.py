"""The in-tree rollout engine: `step()` is schedule -> run -> sample -> record.

Continuous batching over a page pool, a group's prompt prefilled once, per-request seeds. The forward pass is
`cluster.programs`, the very functions the trainer runs, so in exact mode the recorded log-probability of a token is the
one the trainer computes, bit for bit, whatever else was in the batch.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jaxlib
import numpy as np

from lockstep.cluster.devices import host_processor
from lockstep.cluster.programs import Programs, SplitWeights, numpy_rows, padded_pages, padded_rows
from lockstep.errors import CapacityError, ConfigError, DataError, NumericsError, SyncError
from lockstep.models.decoder import Numerics
from lockstep.models.spec import Leaf
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout.scheduler import Request, Scheduler, Work
from lockstep.rollout.scheduler import Sequence as Sample
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory


def request_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """64-bit seed of one sample: a hash of (run seed, step, prompt, index), so it depends on nothing else."""
    text = f"{run_seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def enough_pages(slots: int, max_positions: int, page_size: int) -> int:
    """Pages with which every slot can hold `max_positions` (prompt and completion each end in a page of their own)."""
    return slots * (-(-max_positions // page_size) + 1)


def make_fingerprint(tokenizer: Tokenizer, sampling: SamplingParams, num: Numerics, device_kinds: str) -> Fingerprint:
    """Identity of everything but the weights that decides a recorded log-probability.

    device_kinds: of the rollout mesh. On the CPU the processor's instruction set and the number of cores belong to it:
    they decide how XLA vectorises a loop and cuts a matrix product.
    """
    decoding = [sampling.temperature, sorted(sampling.stop_ids), sampling.max_new_tokens]
    made_by = [jax.__version__, jaxlib.__version__, device_kinds, host_processor() if device_kinds == "cpu" else ""]
    numerics = [num.dtype, num.tile_rows, num.page_size, num.lora_scale, *made_by]
    return Fingerprint(
        tokenizer.fingerprint, tokenizer.template_fingerprint, *(json_digest(v) for v in (decoding, numerics))
    )


def json_digest(value: object) -> str:
    """Digest (32 hex digits) of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


@dataclass
class EngineStats:
    """Totals since the engine was made. rows counts real rows, padded_rows those the passes were padded to."""

    passes: int = 0
    rows: int = 0
    padded_rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Engine:
    """One policy snapshot, sampled from.

    programs: the rollout role's compiled functions. slots: sequences decoded together on each device (exact mode
    computes whole tiles, so a multiple of the tile wastes nothing). max_positions: prompt and completion tokens of one
    sequence at most. num_pages: cache pages per device; 0 sizes the pool so that every slot can hold max_positions.
    prefill_rows: rows of one pass at most, where slots is fewer; longer prompts are prefilled over several passes.
    """

    def __init__(
        self,
        programs: Programs,
        *,
        slots: int,
        max_positions: int,
        num_pages: int = 0,
        prefill_rows: int = 512,
        fingerprint: Fingerprint,
    ) -> None:
        page = programs.num.page_size
        self.programs, self.fingerprint = programs, fingerprint
        self.num_pages = num_pages or enough_pages(slots, max_positions, page)
        self._trash = self.num_pages * page
        self._max_positions = max_positions
        max_rows = max(slots, prefill_rows)
        self._shards = [Scheduler(slots, self.num_pages, page, max_rows) for _ in range(programs.num_devices)]
        self._pools = programs.new_pools(self._trash + 1)
        self._weights: SplitWeights | None = None
        self.version: PolicyVersion | None = None
        self.stats = EngineStats()

    def kv_bytes_per_device(self) -> int:
        return sum(2 * k.nbytes for k, _ in self._pools) // self.programs.num_devices

    def install(self, version: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        """Serve `params` as `version` from the next pass on. Only while nothing runs: no sequence changes policy.

        Raises SyncError, with the old version still served: samples in flight; leaves missing, unknown or misshapen.
        """
        if self.busy:
            raise SyncError(
                f"{version} cannot be installed while {sum(s.load for s in self._shards)} samples are under way on "
                f"{self.version}; let them finish (step until not busy) or abort them first"
            )
        check_leaves(params, self.programs.leaves, version)
        self._weights = SplitWeights.of(params, self.programs.spec.num_layers)
        self.version = version

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return any(s.busy for s in self._shards)

    def _request(self, prompt: Prompt, seeds: Sequence[int], params: SamplingParams) -> Request:
        """The request, if it can be served."""
        t = params.temperature
        if not (math.isfinite(t) and t >= 0):
            raise ConfigError(f"prompt {prompt.id!r}: temperature {t} is not a finite number >= 0 (0 is greedy)")
        if params.max_new_tokens < 1 or not seeds:
            raise ConfigError(
                f"prompt {prompt.id!r}: {len(seeds)} samples of up to {params.max_new_tokens} tokens leave nothing to "
                f"draw; ask for at least one sample (a seed each) and one new token"
            )
        wrong = [s for s in seeds if not 0 <= s < 1 << 64]
        if wrong:
            raise ConfigError(f"prompt {prompt.id!r}: seed {wrong[0]} is not in 0..2^64-1; derive it by request_seed")
        need = len(prompt.ids) + params.max_new_tokens
        if need > self._max_positions:
            raise CapacityError(
                f"prompt {prompt.id!r}: {len(prompt.ids)} prompt tokens + {params.max_new_tokens} new tokens = {need} "
                f"positions, the engine was sized for {self._max_positions}; raise task.max_prompt_tokens or lower "
                f"rollout.max_new_tokens"
            )
        bad = [i for i in prompt.ids if not 0 <= i < self.programs.spec.vocab_size]
        if bad:
            raise CapacityError(
                f"prompt {prompt.id!r} holds token id {bad[0]}, the model's vocabulary has "
                f"{self.programs.spec.vocab_size} entries; the tokenizer is not this model's"
            )
        request = Request(prompt, tuple(seeds), params)
        self._shards[0].check(request)  # every device has the same slots and pages
        return request

    def submit(self, prompt: Prompt, seeds: Sequence[int], params: SamplingParams) -> None:
        """Queue one prompt with a sample per seed, on the device with the least to do.

        Raises, with nothing queued: CapacityError for a prompt that is empty, too long or holds an unknown id;
        ConfigError for parameters without meaning; DataError for a prompt id that is under way already.
        """
        request = self._request(prompt, seeds, params)
        if any(shard.holds(prompt.id) for shard in self._shards):
            raise DataError(
                f"prompt {prompt.id!r} is under way already; samples are told apart by (prompt id, index), so "
                f"give each prompt its own id and all its seeds at once"
            )
        self._queue(request)

    def _queue(self, request: Request) -> None:
        min(self._shards, key=lambda s: s.load).submit(request)

    def abort(self, prompt_id: str) -> list[Trajectory]:
        """Cancel a prompt's samples now; they come back with reason `abort` and what was sampled so far."""
        return [self._trajectory(seq) for shard in self._shards for seq in shard.abort(prompt_id)]

    def generate(
        self, prompts: Iterable[Prompt], seeds: Mapping[str, Sequence[int]], params: SamplingParams
    ) -> list[Trajectory]:
        """Every prompt's samples, in the order of (prompt, index). seeds: by prompt id, one per sample.

        Runs until done, so nothing else may be under way. Raises as `submit` does, then too with nothing queued.
        """
        assert not self.busy, "generate() would run, and swallow, samples submitted by somebody else"
        requests = [self._request(prompt, seeds[prompt.id], params) for prompt in prompts]
        order = {request.prompt.id: i for i, request in enumerate(requests)}
        if len(order) < len(requests):
            twice = next(r.prompt.id for i, r in enumerate(requests) if order[r.prompt.id] != i)
            raise DataError(
                f"prompt id {twice!r} is given twice; give each prompt its own id and all its seeds at once"
            )
        for request in requests:
            self._queue(request)
        done: list[Trajectory] = []
        while self.busy:
            done += self.step()
        return sorted(done, key=lambda t: (order[t.group_id], t.index))

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Trajectory]:
        """One forward pass over everything runnable; returns the samples it finished."""
        assert self._weights is not None, "install weights before generating"
        if not self.busy:
            return []
        work = [shard.schedule() for shard in self._shards]
        drawn = self._run(work)
        return [self._trajectory(s) for shard, d in zip(self._shards, drawn, strict=True) for s in shard.record(d)]

    def _run(self, work: list[list[Work]]) -> list[list[tuple[Sample, int, float]]]:
        p, weights = self.programs, self._weights
        assert weights is not None
        n = padded_rows(max(len(w) for w in work), p.num.tile_rows)
        width = padded_pages(max((r.pos + 1 for w in work for r in w), default=1), p.num.page_size)
        host = numpy_rows(p.num_devices, n, width, self._trash)
        wanted: list[list[tuple[int, Sample]]] = []
        for d, rows in enumerate(work):
            for i, r in enumerate(rows, d * n):
                host.tokens[i], host.pos[i], host.length[i] = r.token, r.pos, r.pos + 1
                host.write[i] = self._trash if r.write is None else r.write
                host.read[i, : min(width, len(r.read))] = r.read[:width]
            wanted.append([(i, s) for i, r in enumerate(rows) for s in r.samples])
        rows = p.put_rows(host)
        x = p.embed(weights, rows.tokens)
        for i in range(p.spec.num_layers):
            x, self._pools[i] = p.layer(weights, i, x, rows, self._pools[i])
        self.stats.passes += 1
        self.stats.rows += sum(len(w) for w in work)
        self.stats.padded_rows += n * p.num_devices
        self.stats.prompt_tokens += sum(1 for w in work for r in w if r.write is not None and not _decoding(r))
        return self._sample(weights, x, wanted)

    def _sample(
        self, weights: SplitWeights, x: jax.Array, wanted: list[list[tuple[int, Sample]]]
    ) -> list[list[tuple[Sample, int, float]]]:
        p = self.programs
        most = max(len(w) for w in wanted)
        if not most:
            return [[] for _ in wanted]
        m = padded_rows(most, p.num.tile_rows)
        total = m * p.num_devices
        at, index = np.zeros(total, np.int32), np.full(total, -1, np.int32)
        temperature, seed = np.ones(total, np.float32), np.zeros((total, 2), np.uint32)
        for d, rows in enumerate(wanted):
            for j, (row, seq) in enumerate(rows, d * m):
                request = seq.group.request
                at[j], index[j], temperature[j] = row, len(seq.tokens), request.params.temperature
                s = request.seeds[seq.index]
                seed[j] = (s & 0xFFFFFFFF, s >> 32)
        drawn = p.sample(weights, x, *p.put_rows((at, temperature, seed, index)))
        tokens, logprobs = (np.asarray(a) for a in drawn)
        real = [j for d, rows in enumerate(wanted) for j in range(d * m, d * m + len(rows))]
        if not np.isfinite(logprobs[real]).all():
            raise NumericsError(
                f"policy {self.version}: the model's output is not finite; its weights hold NaN or infinity, or "
                f"overflow in {p.num.dtype}. Nothing of this pass was recorded"
            )
        self.stats.completion_tokens += sum(len(w) for w in wanted)
        return [
            [(seq, int(tokens[j]), float(logprobs[j])) for j, (_, seq) in enumerate(rows, d * m)]
            for d, rows in enumerate(wanted)
        ]

    def _trajectory(self, seq: Sample) -> Trajectory:
        assert self.version is not None
        request = seq.group.request
        return Trajectory(
            prompt_ids=np.asarray(request.prompt.ids, np.int32),
            completion_ids=np.asarray(seq.tokens, np.int32),
            logprobs=np.asarray(seq.logprobs, np.float32),
            versions=np.full(len(seq.tokens), self.version.number, np.int32),
            finish_reason=seq.finish or "abort",
            seed=request.seeds[seq.index],
            group_id=request.prompt.id,
            index=seq.index,
            fingerprint=self.fingerprint,
            generate_s=time.perf_counter() - seq.group.since,
        )


def check_leaves(params: Mapping[str, jax.Array], leaves: Mapping[str, Leaf], version: PolicyVersion) -> None:
    """SyncError unless `params` are exactly `leaves`, adapter included, each of its shape."""
    wrong = [f"{path} is missing" for path in leaves if path not in params]
    wrong += [f"{path} is unknown" for path in params if path not in leaves]
    wrong += [
        f"{path} has shape {params[path].shape}, expected {leaf.shape}"
        for path, leaf in leaves.items()
        if path in params and params[path].shape != leaf.shape
    ]
    if wrong:
        raise SyncError(
            f"{version} does not fit the engine ({len(wrong)} of {len(leaves)} leaves): {'; '.join(wrong[:5])}. "
            f"Nothing was installed; pass the base's and the adapter's leaves together, named as in the leaf table"
        )


def _decoding(row: Work) -> bool:
    return any(s.tokens for s in row.samples)
