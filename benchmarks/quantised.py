"""What eight-bit keys, values and weights do to the sampler's log-probabilities: the mismatch with the trainer's.

    python benchmarks/quantised.py [--model smollm2-135m] [--dtype float32] [--tokens 64]

Eight prompts, four samples each at temperature 1, by an engine in fast mode; then the trainer's forward pass, which
quantises nothing, over the same tokens. The figures are those of `mismatch/*` in a run's metrics, after one sync. Times
are not measured. The last line is JSON.
"""

import argparse
import json
from collections.abc import Sequence

import numpy as np

from lockstep.cluster.mesh import Dial
from lockstep.cluster.programs import Programs, SplitWeights
from lockstep.cluster.sharding import place
from lockstep.models import load_model
from lockstep.models.decoder import Numerics
from lockstep.models.quantise import Storage
from lockstep.models.spec import leaf_table
from lockstep.rollout.engine import Engine, request_seed
from lockstep.train.batching import Geometry, make_micro_batches
from lockstep.train.forward import score
from lockstep.train.trainer import mismatch
from lockstep.types import Fingerprint, PolicyVersion, Prompt, SamplingParams, Trajectory

TEXTS = (
    "The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a small village,", "Water boils at",
    "The three laws of thermodynamics are", "Q: What is 12 + 30? A:", "In 1969, the first", "To make bread you need",
)  # fmt: skip
SAMPLES, PAGE = 4, 16
STORAGES = (Storage(), Storage("int8"), Storage("fp8"), Storage(weights="int8"), Storage("int8", "int8"))


def recomputed(programs: Programs, weights: SplitWeights, done: Sequence[Trajectory]) -> list[np.ndarray]:
    """The trainer's log-probabilities of every completion."""
    batches = make_micro_batches(done, np.zeros(len(done)), 1.0, Geometry(1, 1024, 0, PAGE))
    found: list[np.ndarray | None] = [None] * len(done)
    for batch, flat in zip(batches, score(programs, weights, batches), strict=True):
        batch.scatter(flat, found)
    return [lp for lp in found if lp is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each sample")
    args = parser.parse_args()
    model = load_model(args.model, args.dtype)
    table = leaf_table(model.spec)
    programs = Programs(model.spec, Numerics(args.dtype, 0, PAGE), Dial.build({"rollout": {}}).mesh("rollout"), table)
    params = place(model.params, table, programs.mesh)
    split = SplitWeights.of(params, model.spec.num_layers)
    prompts = [Prompt(str(n), text, tuple(model.tokenizer.encode(text))) for n, text in enumerate(TEXTS)]
    seeds = {p.id: [request_seed(0, 0, p.id, i) for i in range(SAMPLES)] for p in prompts}
    longest = max(len(p.ids) for p in prompts) + args.tokens
    rows = {}
    for storage in STORAGES:
        engine = Engine(
            programs, slots=32, max_positions=longest, storage=storage, fingerprint=Fingerprint("", "", "", "")
        )
        engine.install(PolicyVersion(0, "measured"), params)
        done = engine.generate(prompts, seeds, SamplingParams(1.0, args.tokens, frozenset()))
        recorded = np.concatenate([t.logprobs for t in done])
        again = np.concatenate(recomputed(programs, split, done))
        row = {name.removeprefix("mismatch/"): value for name, value in mismatch(recorded, again).items()}
        row |= {"mean_abs": float(np.abs(again - recorded).mean()), "tokens": len(recorded)}
        row["kv_mib"] = engine.kv_bytes_per_device() / 2**20
        rows[str(storage)] = row
        print(
            f"{storage!s:50} max {row['max_abs']:.3g}  mean {row['mean_abs']:.2g}  k1 {row['k1']:.2g}  "
            f"k3 {row['k3']:.2g}  ess {row['ess']:.4f}  cache {row['kv_mib']:.0f} MiB",
            flush=True,
        )
    print(json.dumps({"model": args.model, "dtype": args.dtype, "new_tokens": args.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
