"""The in-tree rollout engine: `step()` is schedule -> run -> sample -> record.

Continuous batching over a page pool, a group's prompt prefilled once, per-request seeds. The forward pass is
`cluster.programs`, the very functions the trainer runs, so in exact mode the recorded log-probability of a token is the
one the trainer computes, bit for bit, whatever else was in the batch.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jaxlib
import numpy as np

from lockstep.cluster.decoding import DecodeSteps
from lockstep.cluster.devices import host_processor
from lockstep.cluster.programs import Programs, SplitWeights, padded_pages
from lockstep.cluster.quantised_weights import Int8Weights
from lockstep.cluster.shared import shared
from lockstep.errors import DataError, ServiceError
from lockstep.models.decoder import Numerics, Rows
from lockstep.models.quantise import AS_COMPUTED, Storage
from lockstep.models.tokenizer import Tokenizer
from lockstep.rollout import ahead
from lockstep.rollout.checks import check_leaves, check_request, check_sizes, require_finite
from lockstep.rollout.drafts import Drafts, Payoff
from lockstep.rollout.lanes import Lane, Lanes, RetiredLane
from lockstep.rollout.pool_size import enough_pages
from lockstep.rollout.routing import best_device
from lockstep.rollout.sampler import Sampler, Want, lay_out_rows
from lockstep.rollout.scheduler import MAX_WAITING, Scheduler
from lockstep.rollout.stops import Decode
from lockstep.rollout.swap import PoolRows, SwapCosts
from lockstep.rollout.trajectories import decoding_digest, json_digest, make_trajectory
from lockstep.rollout.warm_up import WarmUp, warm_up
from lockstep.rollout.work import OpenSample, Pass, Request
from lockstep.rollout.work import Sequence as Sample
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

PASS_UNIT = 8  # rows by which the time of a pass may differ


def request_seed(run_seed: int, step: int, prompt_id: str, index: int) -> int:
    """64-bit seed of one sample: a hash of (run seed, step, prompt, index), so it depends on nothing else."""
    text = f"{run_seed}/{step}/{prompt_id}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def make_fingerprint(
    tokenizer: Tokenizer, sampling: SamplingParams, num: Numerics, device_kinds: str, storage: Storage = AS_COMPUTED
) -> Fingerprint:
    """Identity of everything but the weights that decides a recorded log-probability.

    storage: the engine's. device_kinds: of the rollout mesh. On the CPU the processor's instruction set and the number
    of cores belong to it: they decide how XLA vectorises a loop and cuts a matrix product.
    """
    made_by = [jax.__version__, jaxlib.__version__, device_kinds, host_processor() if device_kinds == "cpu" else ""]
    numerics = [num.dtype, num.tile_rows, num.page_size, num.lora_scale, *made_by]
    if storage.quantised:
        numerics += [f"kv {storage.kv}", f"weights {storage.weights}"]
    if num.tensor_parts > 1:  # so that records made before there were parts keep their identity
        numerics.append(num.tensor_parts)
    return Fingerprint(
        tokenizer.fingerprint, tokenizer.template_fingerprint, decoding_digest(sampling), json_digest(numerics)
    )


@dataclass
class EngineStats:
    """Totals since the engine was made. rows counts real rows, padded_rows those the passes were padded to;
    prompt_tokens those computed, cached_tokens those found in the prefix cache instead; preemptions: times a sample had
    to give its pages back, swaps: of them, those whose rows were kept on the host."""

    passes: int = 0
    rows: int = 0
    padded_rows: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    drafted: int = 0
    accepted: int = 0


class Engine:
    """Policies, sampled from: each request under the one that was installed last when it was submitted (`lanes`).

    programs: the rollout role's compiled functions. slots: sequences decoded together on each device, or on each group
    of devices along `tensor`, which count as one here and below (exact mode computes whole tiles, so a multiple of the
    tile wastes nothing). max_positions: prompt and completion tokens of one sequence at most. num_pages: cache pages
    per device; 0 sizes the pool so that every slot can hold max_positions.
    prefill_rows: rows of one pass at most, where slots is fewer; longer prompts are prefilled over several passes.
    max_waiting: samples per device that may wait to be started (`submit` refuses more). swap: whether rows of preempted
    samples are kept on the host where that is cheaper ("auto"), always, or never. decode: text of ids, for stop texts.
    drafts: guesses of at most draft_tokens tokens per sample and pass, as many as make_payoff(draft_tokens, rows of a
    tile) finds worth it; see `drafts`. decode_steps: steps that are taken at once at most where nobody has to look at
    what they draw; see `ahead`. storage: eight-bit keys, values, matrices; in fast mode only (ConfigError).
    """

    def __init__(
        self,
        programs: Programs,
        *,
        slots: int,
        max_positions: int,
        num_pages: int = 0,
        prefill_rows: int = 512,
        max_waiting: int = MAX_WAITING,
        swap: Literal["auto", "always", "never"] = "auto",
        decode: Decode | None = None,
        drafts: Drafts | None = None,
        draft_tokens: int = 4,
        decode_steps: int = ahead.STEPS,
        make_payoff: Callable[[int, int], Payoff] = Payoff,
        storage: Storage = AS_COMPUTED,
        fingerprint: Fingerprint,
    ) -> None:
        least = {"slots": (slots, 1), "max_positions": (max_positions, 1), "num_pages": (num_pages, 0)}
        least |= {"prefill_rows": (prefill_rows, 1), "max_waiting": (max_waiting, 0), "draft_tokens": (draft_tokens, 0)}
        check_sizes(least | {"decode_steps": (decode_steps, 1)}, swap)
        page = programs.num.page_size
        storage.require_fast(programs.num.tile_rows, programs.num.tensor_parts)
        self.programs, self.fingerprint, self.storage = programs, fingerprint, storage
        self.num_pages = num_pages or enough_pages(slots, max_positions, page)
        self._trash = self.num_pages * page
        self.max_positions = max_positions
        self._shapes: set[tuple[int, ...]] = set()
        max_rows = max(slots, prefill_rows)
        self._pools = programs.new_pools(self._trash + 1, storage.kv)
        leaves = jax.tree.leaves(self._pools)
        self._pool_rows = shared(PoolRows, programs, self._trash)
        self.swap_costs = SwapCosts(sum(a.nbytes // a.shape[0] for a in leaves))
        self._to_int8 = Int8Weights(programs) if storage.weights == "int8" else None
        pays = {"auto": self.swap_costs.pays, "always": lambda rows: True, "never": None}[swap]
        unit = min(programs.num.tile_rows or PASS_UNIT, PASS_UNIT)
        self._shards = [
            Scheduler(
                slots, self.num_pages, page, max_rows, max_waiting=max_waiting, swap_pays=pays, decode=decode,
                drafts=drafts, payoff=make_payoff(draft_tokens, unit) if drafts is not None else None,
            )
            for _ in range(programs.row_shards)
        ]  # fmt: skip
        self._sampler, self._decode = Sampler(programs), decode
        self.decode_steps, self._decode_steps = decode_steps, shared(DecodeSteps, programs, self._trash)
        self._lanes = Lanes(self._shards)
        self._compiled = False  # whether the last pass was the first of its shape
        self.stats = EngineStats()

    def kv_bytes_per_device(self) -> int:
        return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.itemsize for a in jax.tree.leaves(self._pools))

    def install(self, version: PolicyVersion, params: Mapping[str, jax.Array]) -> None:
        """Serve `params` as `version` to all that is submitted from now on. What is under way stays on what it was
        submitted under, whose weights are held until its last sample has ended (`take_retired`).

        Raises SyncError, with nothing changed, for leaves that are missing, unknown or misshapen.
        """
        check_leaves(params, self.programs.leaves, version)
        weights = SplitWeights.of(params, self.programs.spec.num_layers)
        # Made anew whatever came: a copy that is kept where a leaf seems to be the same is one that can be stale.
        self._lanes.add(version, weights if self._to_int8 is None else self._to_int8(weights))

    @property
    def version(self) -> PolicyVersion | None:
        """What is submitted now runs under it; None before the first install."""
        lane = self._lanes.newest
        return None if lane is None else lane.version

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Policies whose weights are held, oldest first."""
        return self._lanes.versions

    @property
    def weights(self) -> SplitWeights:
        """Of `version`, as the programs take them."""
        lane = self._lanes.newest
        assert lane is not None, "install weights first"
        return lane.weights

    def take_retired(self) -> list[RetiredLane]:
        """Versions that were let go since this was last called: a newer one was installed, and their last sample had
        ended."""
        return self._lanes.take_retired()

    def warm_up(self, params: SamplingParams) -> WarmUp:
        """Compile what requests that ask for no more than `params` can need. After `install`, while nothing runs."""
        return warm_up(self, params)

    # -- requests ----------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return any(s.busy for s in self._shards)

    @property
    def capacity(self) -> int:
        """Samples that can run at a time."""
        return sum(shard.slots for shard in self._shards)

    @property
    def samples(self) -> tuple[int, int]:
        """(running, waiting for a slot) now."""
        running = sum(shard.num_running for shard in self._shards)
        return running, sum(shard.load for shard in self._shards) - running

    @property
    def pages(self) -> tuple[int, int, int, int]:
        """(free, cached, used, total) of all devices."""
        free, cached, used, total = map(sum, zip(*(s.memory.pages.counts for s in self._shards), strict=True))
        return free, cached, used, total

    def check(self, prompt: Prompt, seeds: Sequence[int], params: SamplingParams) -> Request:
        """The request. Raises CapacityError or ConfigError if it could never run. May be called from any thread."""
        check_request(
            prompt, seeds, params, self.programs.spec.vocab_size, self.max_positions, self._decode is not None
        )
        request = Request(prompt, tuple(seeds), params)
        self._shards[0].check(request)  # every device has the same slots and pages
        return request

    def submit(self, prompt: Prompt, seeds: Sequence[int], params: SamplingParams) -> None:
        """Queue one prompt with a sample per seed, on the device that `routing` chooses.

        Raises, with nothing queued: CapacityError for a prompt that is empty, too long or holds an unknown id;
        ConfigError for parameters without meaning; DataError for a prompt id that is under way already; QueueFullError
        where too many samples wait on every device; ServiceError before the first install.
        """
        request = self.check(prompt, seeds, params)
        if any(shard.holds(prompt.id) for shard in self._shards):
            raise DataError(
                f"prompt {prompt.id!r} is under way already; samples are told apart by (prompt id, index), so "
                f"give each prompt its own id and all its seeds at once"
            )
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """`submit` without its checks, for requests that are known to be right."""
        if self.version is None:
            raise ServiceError(f"prompt {request.prompt.id!r}: no policy is installed yet; install weights first")
        best_device(self._shards, request).submit(request)

    def check_integrity(self) -> list[tuple[int, int, int, int]]:
        """(free, cached, used, total) pages of each device; asserts that the books balance."""
        return [shard.check_integrity() for shard in self._shards]

    def abort(self, prompt_id: str) -> list[Trajectory]:
        """Cancel a prompt's samples now; they come back with reason `abort` and what was sampled so far."""
        return self._trajectories([seq for shard in self._shards for seq in shard.abort(prompt_id)])

    def abort_broken(self) -> list[str]:
        """After `step` raised NumericsError: cancel all prompts of the policy whose pass it was, and return their ids.
        Those of other policies go on."""
        groups = [g for shard in self._shards for g in shard.groups.values() if g.lane == self._lanes.ran]
        for group in groups:
            self.abort(group.request.prompt.id)
        return [group.request.prompt.id for group in groups]

    def open_samples(self, prompt_id: str) -> list[OpenSample]:
        """What has been drawn of a prompt's samples that were started and are not finished, in no order."""
        found = [seq for shard in self._shards for seq in shard.open_samples(prompt_id)]
        return [OpenSample(seq.index, seq.tokens, seq.logprobs, seq.top) for seq in found]

    def generate(
        self, prompts: Iterable[Prompt], seeds: Mapping[str, Sequence[int]], params: SamplingParams
    ) -> list[Trajectory]:
        """Every prompt's samples, in the order of (prompt, index). seeds: by prompt id, one per sample.

        Runs until done, so nothing else may be under way. Raises as `submit` does, then too with nothing queued.
        """
        assert not self.busy, "generate() would run, and swallow, samples submitted by somebody else"
        requests = [self.check(prompt, seeds[prompt.id], params) for prompt in prompts]
        order = {request.prompt.id: i for i, request in enumerate(requests)}
        if len(order) < len(requests):
            twice = next(r.prompt.id for i, r in enumerate(requests) if order[r.prompt.id] != i)
            raise DataError(
                f"prompt id {twice!r} is given twice; give each prompt its own id and all its seeds at once"
            )
        done: list[Trajectory] = []
        waiting = deque(requests)
        while waiting or self.busy:
            while waiting and any(s.accepts(waiting[0]) for s in self._shards):
                self.enqueue(waiting.popleft())
            done += self.step()
        return sorted(done, key=lambda t: (order[t.group_id], t.index))

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Trajectory]:
        """One forward pass over everything runnable of one policy, or several (`ahead`); returns the samples that this
        finished. Raises NumericsError, with nothing recorded, where the model's output is not finite."""
        if not self.busy:
            return []
        for shard in self._shards:
            shard.settle()
        lane = self._lanes.next()
        work = [shard.schedule(lane.number) for shard in self._shards]
        self._swap(work)
        steps = min(ahead.steps_ahead(s, w, self.decode_steps) for s, w in zip(self._shards, work, strict=True))
        self._lanes.took(steps)
        start = time.perf_counter()
        finished = self._run_ahead(lane, work, steps) if steps > 1 else self._run_once(lane, work)
        seconds = (time.perf_counter() - start) / steps
        self.swap_costs.ran(sum(map(len, work)), seconds)
        if not self._compiled:
            for shard in self._shards:
                if shard.payoff is not None:
                    shard.payoff.passed(max(map(len, work)), seconds)
        for shard in self._shards:
            for name, count in shard.take_counts().items():
                setattr(self.stats, name, getattr(self.stats, name) + count)
                # A draft's row draws a token too; it counts when the draft was right.
                self.stats.completion_tokens += {"drafted": -count, "accepted": count}.get(name, 0)
        return self._trajectories(finished)

    def _swap(self, work: list[Pass]) -> None:
        """Copy rows of preempted samples out, and of resumed ones back in."""
        if any(w.save for w in work):
            self._pool_rows.save(self._pools, [w.save for w in work], self.swap_costs)
        if any(w.load for w in work):
            self._pools = self._pool_rows.load(self._pools, [w.load for w in work], self.swap_costs)

    def _lay_out(self, lane: Lane, work: list[Pass], steps: int = 1) -> Rows:
        """The pass's rows on the host, their index wide enough for so many steps."""
        assert all(s.group.lane == lane.number for w in work for r in w for s in r.samples), "a pass of two policies"
        p = self.programs
        width = padded_pages(max((r.pos + steps for w in work for r in w), default=1), p.num.page_size)
        n = p.rows_for(max(len(w) for w in work), width)
        host = lay_out_rows(work, n, width, self._trash)
        shape = (n, width, p.head_rows_for(max(sum(len(r.samples) for r in w) for w in work)))
        self._compiled = shape not in self._shapes
        self._shapes.add(shape)
        self.stats.passes += steps
        self.stats.padded_rows += steps * n * p.row_shards
        self.stats.prompt_tokens += sum(r.kind == "prompt" for w in work for r in w)
        if len(self._lanes) > 1:
            self._lanes.check_rows(lane, host)
        return host

    def _forward(self, weights: SplitWeights, rows: Rows) -> jax.Array:
        """Output of the last layer, the rows' keys and values written to the pools."""
        x = self.programs.embed(weights, rows.tokens)
        for i in range(self.programs.spec.num_layers):
            x, self._pools[i] = self.programs.layer(weights, i, x, rows, self._pools[i])
        return x

    def _run_once(self, lane: Lane, work: list[Pass]) -> list[Sample]:
        """One pass; returns the samples that it finishes."""
        weights = lane.weights
        x = self._forward(weights, self.programs.put_rows(self._lay_out(lane, work)))
        self.stats.rows += sum(map(len, work))
        scored = [[(i, r.score, r.pos) for i, r in enumerate(w) if r.score is not None] for w in work]
        self._sampler.score_prompts(weights, x, scored)
        drawn = self._sampler.draw(
            weights, x, [[Want(i, s, r.drafts) for i, r in enumerate(w) for s in r.samples] for w in work]
        )
        require_finite(
            all(math.isfinite(d.logprob) for own in drawn for d in own), lane.version, self.programs.num.dtype
        )
        self.stats.completion_tokens += sum(d.sequence.draws for own in drawn for d in own)
        return [s for shard, own in zip(self._shards, drawn, strict=True) for s in shard.record(own)]

    def _run_ahead(self, lane: Lane, work: list[Pass], steps: int) -> list[Sample]:
        """So many decode steps, sent off one after the other; the host looks when all have run."""
        p, weights = self.programs, lane.weights
        for shard, own in zip(self._shards, work, strict=True):
            ahead.hold(shard, own, steps)
        state = p.put_rows(ahead.decoding(p, self._lay_out(lane, work, steps), work))
        found = []
        for step in range(steps):
            x = p.pick(self._forward(weights, state.rows), state.at)
            drawn = p.sample(weights, x, state.temperature, state.seed, state.index)
            found.append((*drawn, state.index))
            if step + 1 < steps:
                state = self._decode_steps.advance(state, drawn[0])
        host = [tuple(np.asarray(a).reshape(len(work), -1) for a in step) for step in found]
        finite = all(np.isfinite(logprobs[index >= 0]).all() for _, logprobs, index in host)
        require_finite(finite, lane.version, p.num.dtype)
        drew = sum(int((index >= 0).sum()) for *_, index in host)
        self.stats.rows += drew
        self.stats.completion_tokens += drew
        return [
            done
            for d, (shard, own) in enumerate(zip(self._shards, work, strict=True))
            for done in ahead.record(shard, [r.samples[0] for r in own], [tuple(a[d] for a in step) for step in host])
        ]

    def _trajectories(self, ended: list[Sample]) -> list[Trajectory]:
        """Each under the policy that it ran under. Policies whose last samples these are end with them."""
        made = [make_trajectory(seq, self._lanes[seq.group.lane].version, self.fingerprint) for seq in ended]
        self._lanes.retire()
        return made
