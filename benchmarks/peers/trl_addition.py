"""The peer of `benchmarks/loop.py`: TRL's `GRPOTrainer` on the addition task, on CPU, in float32.

Runs in an environment of its own (torch, transformers, peft, trl; no lockstep), which `benchmarks/loop.py` makes:

    python benchmarks/peers/trl_addition.py --model DIR --prompts FILE.jsonl --steps 6 --seed 0 --out FILE.jsonl

`--model` is a folder in Hugging Face layout. `--prompts` is JSON lines with the columns `prompt` and `answer`; step k
(from 1) trains on lines (k-1) * prompts ... k * prompts - 1 in that order, each sampled `--samples` times.

Writes to `--out`, and prints, one JSON object per line: first a `setup` record (versions, settings), then a `step`
record per optimizer step. Seconds are wall-clock: `step_s` from the start of a step to the end of its optimizer update
(writing the record is outside), `generate_s` within `model.generate` and what prepares it, `score_s` the rest of the
rollout (decoding, rewards, advantages), `train_s` all else: forward, backward, update. `cpu_s` is the CPU time of all
threads in the step, the number to look at when the machine is shared.

Chosen in the peer's favour where TRL's defaults would be slower: no gradient checkpointing (on by default), one
forward for the whole batch. What matters for comparing curves: the group standard deviation is the sample one (n - 1),
and adapters start from PEFT's initialisation (A Kaiming-uniform, B zero).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

PACKAGES = ("torch", "trl", "transformers", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "numpy")
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
STOP_TEXT = "\n"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; the defaults are the settings of the paired benchmark."""
    parser = argparse.ArgumentParser(description="TRL GRPO on the addition task (the peer of benchmarks/loop.py).")
    parser.add_argument("--model", type=Path, required=True, help="folder in Hugging Face layout")
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with the columns prompt and answer")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON lines go")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--group-prompts", type=int, default=16, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="completions per prompt")
    parser.add_argument("--max-new-tokens", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--lora-rank", type=int, default=8)
    parser.add_argument("--lora-alpha", type=float, default=16.0)
    parser.add_argument("--lora-last-layers", type=int, default=10)
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences per forward; 0: the whole batch")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's default; slower here")
    args = parser.parse_args(argv)
    for name in ("steps", "threads", "group_prompts", "samples", "max_new_tokens", "lora_rank", "lora_last_layers"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    batch = args.group_prompts * args.samples
    args.micro_batch = args.micro_batch or batch
    if args.micro_batch < 1 or batch % args.micro_batch:
        parser.error(f"--micro-batch must divide prompts x samples = {batch}, got {args.micro_batch}")
    return args


def read_prompts(path: Path, count: int) -> list[dict[str, str]]:
    """The first `count` rows of the prompts file, as {"prompt", "answer"}. ValueError names what is missing."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(rows) < count:
        raise ValueError(f"{path}: expected at least {count} rows (steps x prompts), got {len(rows)}; write more rows")
    for number, row in enumerate(rows[:count], start=1):
        for column in ("prompt", "answer"):
            if not isinstance(row.get(column), str):
                raise ValueError(f"{path}, row {number}: column {column!r} must be a string, got {row.get(column)!r}")
    return [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows[:count]]


def first_line_exact(completion: str, answer: str) -> float:
    """1.0 when the first line of the completion, without surrounding blanks, is exactly the answer, else 0.0."""
    return float(completion.split("\n", 1)[0].strip() == answer)


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """`first_line_exact` in the form that TRL calls: one value per completion."""
    return [first_line_exact(text, gold) for text, gold in zip(completions, answer, strict=True)]


def emit(record: dict[str, Any], file: TextIO) -> None:
    """One JSON line to the file and to stdout."""
    line = json.dumps(record)
    print(line, flush=True)
    print(line, file=file, flush=True)


def stop_token(tokenizer: Any) -> int:
    """The id of the newline, which must be one token for both sides to stop alike."""
    ids = tokenizer(text=[STOP_TEXT], add_special_tokens=False)["input_ids"][0]
    if len(ids) != 1:
        raise ValueError(f"the stop text {STOP_TEXT!r} must be exactly one token, got {ids}; use another model")
    return ids[0]


def unique_ids(tokenizer: Any, rows: list[dict[str, str]]) -> list[list[int]]:
    """Token ids of the rows' prompts as the trainer makes them, each different prompt once."""
    ids = tokenizer(text=[row["prompt"] for row in rows])["input_ids"]
    return [list(row) for row in dict.fromkeys(tuple(row) for row in ids)]


def load(args: argparse.Namespace) -> tuple[Any, Any, list[int]]:
    """The float32 model and its tokenizer; generation ends at the newline or at any end-of-sequence id of the model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left", truncation_side="left")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{args.model}: tokenizer_config.json names no eos_token, which TRL pads with; add it")
    own = model.generation_config.eos_token_id
    own = [own] if isinstance(own, int) else list(own or [])
    # GRPOTrainer takes its stop ids from here, for generate() and for the mask alike; passed through
    # `generation_kwargs` they would end generation but not the mask.
    stops = sorted({stop_token(tokenizer), tokenizer.eos_token_id, *own})
    model.generation_config.eos_token_id = stops
    return model, tokenizer, stops


def grpo_config(args: argparse.Namespace, output_dir: str) -> Any:
    """The settings of the benchmark in TRL's words."""
    from trl import GRPOConfig

    batch = args.group_prompts * args.samples
    return GRPOConfig(
        output_dir=output_dir,
        seed=args.seed,
        use_cpu=True,
        bf16=False,
        fp16=False,
        max_steps=args.steps,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=batch // args.micro_batch,
        num_generations=args.samples,
        max_completion_length=args.max_new_tokens,
        temperature=args.temperature,
        top_p=1.0,
        top_k=0,
        repetition_penalty=1.0,
        shuffle_dataset=False,
        num_iterations=1,
        loss_type="dapo",  # sum of token losses over the tokens of the whole batch
        scale_rewards="group",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        disable_dropout=True,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        warmup_steps=0,
        optim="adamw_torch",
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=args.gradient_checkpointing,
        eval_strategy="no",
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
    )


def lora_config(args: argparse.Namespace, num_layers: int) -> Any:
    """LoRA on every projection of the last layers, without dropout."""
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=args.lora_rank,
        lora_alpha=args.lora_alpha,
        lora_dropout=0.0,
        bias="none",
        target_modules=list(LORA_TARGETS),
        layers_to_transform=list(range(max(0, num_layers - args.lora_last_layers), num_layers)),
    )


def check_mask(ids: Any, mask: Any, stops: list[int], max_new_tokens: int) -> dict[str, float]:
    """What the completion mask trains on. RuntimeError unless it covers each completion up to and with its stop token.

    ids, mask [B, T] tensors. Returns the mean completion length and the fraction that ended at a stop id.
    """
    stopped = 0
    lengths = mask.sum(1).tolist()
    for row, length in zip(ids.tolist(), lengths, strict=True):
        hits = [i for i, token in enumerate(row[:length]) if token in stops]
        expected = hits[0] + 1 if hits else max_new_tokens
        if length != expected:
            raise RuntimeError(f"the mask covers {length} tokens of {row}, expected {expected}: stop ids {stops}")
        stopped += bool(hits)
    return {"completion_length": sum(lengths) / len(lengths), "finish_stop": stopped / len(lengths)}


def make_trainer_class() -> type:
    """`GRPOTrainer` with a stopwatch on its two phases; computes nothing differently."""
    from trl import GRPOTrainer

    class TimedTrainer(GRPOTrainer):
        generate_s = 0.0
        rollout_s = 0.0
        rollout: dict[str, float]
        stops: list[int]

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = super()._generate_single_turn(*args, **kwargs)
            self.generate_s += time.perf_counter() - start
            return result

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            start = time.perf_counter()
            batch = super()._generate_and_score_completions(inputs)
            self.rollout_s += time.perf_counter() - start
            self.rollout = check_mask(
                batch["completion_ids"], batch["completion_mask"], self.stops, self.max_completion_length
            )
            self.rollout["prompt_tokens"] = int(batch["prompt_mask"].sum())
            self.rollout["trained_tokens"] = int(batch["completion_mask"].sum())
            return batch

    return TimedTrainer


def make_recorder(file: TextIO) -> Any:
    """A callback that writes the `step` record, from the trainer's own log and the stopwatch."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        trainer: Any
        began = 0.0
        began_cpu = 0.0
        step_s = 0.0
        cpu_s = 0.0
        elapsed_s = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.trainer.generate_s = self.trainer.rollout_s = 0.0
            self.began, self.began_cpu = time.perf_counter(), time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.step_s = time.perf_counter() - self.began
            self.cpu_s = time.process_time() - self.began_cpu
            self.elapsed_s += self.step_s

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
            if "reward" not in logs:  # the summary at the end of training
                return
            trainer = self.trainer
            record = {
                "event": "step",
                "step": state.global_step,
                "reward": logs["reward"],
                "reward_std": logs["reward_std"],
                "zero_variance": logs["frac_reward_zero_std"],
                "loss": logs["loss"],
                "grad_norm": logs["grad_norm"],
                "entropy": logs["entropy"],
                "lr": logs["learning_rate"],
                "step_s": self.step_s,
                "generate_s": trainer.generate_s,
                "score_s": trainer.rollout_s - trainer.generate_s,
                "train_s": self.step_s - trainer.rollout_s,
                "cpu_s": self.cpu_s,
                "elapsed_s": self.elapsed_s,
                **trainer.rollout,
            }
            emit(record, file)

    return Recorder()


def train(args: argparse.Namespace, file: TextIO) -> None:
    """Load, train `args.steps` steps, write the records."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback

    torch.set_num_threads(args.threads)
    rows = read_prompts(args.prompts, args.steps * args.group_prompts)
    model, tokenizer, stops = load(args)
    recorder = make_recorder(file)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = make_trainer_class()(
            model=model,
            reward_funcs=reward,
            args=grpo_config(args, scratch),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=lora_config(args, model.config.num_hidden_layers),
            callbacks=[recorder],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.stops = stops
        recorder.trainer = trainer
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        trainable = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        emit(
            {
                "event": "setup",
                "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
                "settings": settings,
                "stop_ids": stops,
                "trainable_parameters": trainable,
                "attention": trainer.model.config._attn_implementation,
                "prompt_ids": unique_ids(tokenizer, rows[: args.group_prompts]),
            },
            file,
        )
        trainer.train()


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_arguments(argv)
    # Read by the math libraries when they load, so before torch is imported. Nothing is fetched at run time.
    os.environ.update(
        OMP_NUM_THREADS=str(args.threads),
        MKL_NUM_THREADS=str(args.threads),
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_OFFLINE="1",
    )
    with args.out.open("w", encoding="utf-8") as file:
        train(args, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
