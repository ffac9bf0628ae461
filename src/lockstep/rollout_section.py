"""The `[rollout]` table of a recipe: how completions are generated. See `sections`."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from lockstep.schema import Bool, Expects, Float, Int, Section, key, literal


class RolloutConfig(Section):
    prompts: Int = key(16, "Prompts (groups) per step.", ge=1, also=("batch_size", "prompts_per_step"))
    samples: Int = key(
        8,
        "Completions per prompt (size of a group).",
        ge=2,
        why="a group of one is its own mean, so its advantage is always 0 and nothing is learnt; 8 is usual",
        also=("num_generations", "group_size", "n", "num_samples"),
    )
    max_new_tokens: Int = key(
        128, "Completion tokens at most, the stop token included.", ge=1, also=("max_tokens", "max_completion_length")
    )
    temperature: Float = key(
        1.0,
        "Samples are drawn from softmax(logits / temperature).",
        ge=0.001,  # types.LEAST_TEMPERATURE, which imports numpy; reading a recipe does not
        why="at 0 every sample of a group is the same, so no advantage is left to train on, and below 0.001 logits "
        "overflow; use 1.0",
    )
    stop: tuple[Annotated[str, Expects("text, not empty")], ...] = key(
        (),
        "Texts that end a completion, as the model's end tokens do. One that is a single token stands for that token.",
        also=("stop_strings",),
    )
    top_k: Int = key(0, "Draw from so many of the likeliest tokens only; 0: from all.", ge=0)
    top_p: Float = key(
        1.0, "Draw from the fewest likeliest tokens that have this mass together; 1: from all.", gt=0, le=1
    )
    min_p: Float = key(
        0.0, "Draw from tokens at least this many times as likely as the likeliest; 0: from all.", ge=0, le=1
    )
    truncation: Literal["refuse", "correct"] = key(
        "refuse",
        "When top_k, top_p or min_p cut tokens off. correct: each token's advantage is weighted with the mass that was "
        "kept. refuse: an error.",
    )
    speculation: Literal["off", "ngram", "draft"] = key(
        "off",
        "Guess tokens ahead, as many as pay; no completion changes by a bit. ngram: from the prompt and its other "
        "completions; draft: by `draft_model`.",
        also=("spec_decode", "speculative"),
    )
    draft_tokens: Int = key(4, "Guesses per sequence and pass at most.", ge=1, also=("num_speculative_tokens",))
    draft_model: str | None = key(
        None,
        "draft: a smaller model with the same tokenizer, named as `model.name`.",
        path="marked",
        min_length=1,
    )
    slots: Int = key(
        128,
        "Sequences decoded together on each device (those along `tensor` count as one); whole tiles in exact mode.",
        ge=1,
        also=("max_num_seqs",),
    )
    page_size: Int = key(16, "Tokens per page of the key-value cache.", ge=1, also=("block_size",))
    num_pages: Int = key(0, "Pages of the key-value cache; 0: enough for every slot at full length.", ge=0)
    kv_memory_mib: Int = key(
        0,
        "Memory of the key-value cache on each device (MiB); the number of pages follows. 0: as `num_pages` says.",
        ge=0,
    )
    kv_dtype: Literal["compute", "int8", "fp8"] = key(
        "compute",
        "Type of the cached keys and values. compute: `model.dtype`. int8, fp8 (e4m3): with a scale per token and "
        "head; fast mode only.",
        also=("kv_cache_dtype", "cache_dtype"),
    )
    weights_dtype: Literal["compute", "int8"] = key(
        "compute",
        "Type of the layers' matrices in the sampler. int8: with a scale per output channel, made from what each sync "
        "brings; fast mode only.",
        also=("quantization", "load_in_8bit"),
    )
    max_waiting: Int = key(
        4096,
        "Samples per device that may wait to be started; beyond it prompts are handed over as others finish.",
        ge=1,
    )
    swap: Literal["auto", "always", "never"] = key(
        "auto",
        "Rows of samples that give way when the cache is full. always: kept in host memory; never: computed again; "
        "auto: whichever is faster.",
    )
    decode_steps: Int = key(
        8,
        "Tokens that each sample draws between two looks of the host at most, where nobody waits for a slot, drafts "
        "are off and no text ends a completion; 1: it looks at each. No completion depends on it.",
        ge=1,
        also=("num_scheduler_steps", "multi_step"),
    )
    warm_up: Bool = key(
        False,
        "Compile every program that the sampler can need before the first step, rather than each when it is needed.",
    )
    staleness: Int = key(
        0,
        "Updates by which the weights that sampled a batch may be behind those that are trained on it. 0: sample, then "
        "train; n: the next n batches are sampled meanwhile.",
        ge=0,
        also=("max_staleness", "async_level", "off_policy_steps", "max_async_level", "staleness_bound"),
    )
    verify_stale: Bool = key(
        True,
        "Recompute what older weights recorded with those weights, of which `staleness` more versions are kept for it.",
    )
    update: Literal["drain", "abort", "dual"] = key(
        "drain",
        "What becomes of requests under way when new weights come. drain: they finish first; abort: they start anew "
        "with their seeds; dual: they finish on the old weights beside the new.",
        also=("update_policy", "weight_update"),
    )
    on_lost: Literal["fail", "drop"] = key(
        "fail", "A group that was aborted or failed. fail: an error that names it; drop: counted, and the others go on."
    )
    patience_s: Float = key(
        60.0, "Seconds of waiting for rollouts after which the log says what is waited for, and again each time.", gt=0
    )
    deadline_s: Float = key(
        3600.0,
        "Seconds that a batch, or a sampler that finishes before new weights, is waited for; then an error.",
        gt=0,
    )
    url: str | None = key(
        None,
        "Address of a running `lockstep serve`, such as `http://host:8000`: it samples, and no sampler is built here.",
        min_length=1,
        also=("base_url", "server_url", "endpoint"),
    )
    token_file: str | None = key(
        None, "File that holds the token of the service at `url`.", path="always", min_length=1, also=("api_key",)
    )
    sync_host: str | None = key(
        None,
        "Address of this machine that the service at `url` can reach, where it takes weights over the network "
        "(`lockstep serve --transport transfer`). Unset: 127.0.0.1, the service is on this machine.",
        min_length=1,
    )

    @property
    def truncates(self) -> bool:
        """Whether tokens are cut off the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @model_validator(mode="after")
    def _draft_model(self) -> RolloutConfig:
        if self.speculation == "draft" and self.draft_model is None:
            raise ValueError(
                '`rollout.draft_model` is missing, which speculation = "draft" needs: the name of a smaller model with '
                'the same tokenizer; or use speculation = "ngram", which needs none'
            )
        if self.speculation != "draft" and self.draft_model is not None:
            raise ValueError(
                f"`rollout.draft_model` has no effect with speculation = {literal(self.speculation)}; leave it out, or "
                'use speculation = "draft"'
            )
        return self

    @model_validator(mode="after")
    def _pool(self) -> RolloutConfig:
        if self.num_pages and self.kv_memory_mib:
            raise ValueError(
                f"`rollout.num_pages` = {self.num_pages} and `rollout.kv_memory_mib` = {self.kv_memory_mib} both size "
                "the key-value cache; give one of them"
            )
        return self

    @model_validator(mode="after")
    def _truncation(self) -> RolloutConfig:
        if self.truncates and self.truncation == "refuse":
            cut = ", ".join(
                f"`rollout.{k}` = {literal(getattr(self, k))}"
                for k in ("top_k", "top_p", "min_p")
                if getattr(self, k) != type(self).model_fields[k].default
            )
            raise ValueError(
                f"{cut} cuts tokens off, so samples come from another distribution than the one that is trained; use "
                '`rollout.truncation` = "correct" to weight them, or draw from all tokens'
            )
        return self

    @model_validator(mode="after")
    def _service(self) -> RolloutConfig:
        if self.url is None:
            if self.token_file is not None:
                raise ValueError(
                    f"`rollout.token_file` = {literal(self.token_file)} has no effect without `rollout.url`; name the "
                    "service, or leave it out"
                )
            if self.sync_host is not None:
                raise ValueError(
                    f"`rollout.sync_host` = {literal(self.sync_host)} has no effect without `rollout.url`; name the "
                    "service, or leave it out"
                )
            return self
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(
                f"`rollout.url` = {literal(self.url)} is not the address of a service; use one such as "
                '"http://127.0.0.1:8000"'
            )
        return self

    @model_validator(mode="after")
    def _stops(self) -> RolloutConfig:
        if "" in self.stop:
            raise ValueError("`rollout.stop` holds an empty text, which ends nothing; leave it out")
        if len(set(self.stop)) < len(self.stop):
            raise ValueError(f"`rollout.stop` = {literal(self.stop)} holds a text twice; once is enough")
        return self
