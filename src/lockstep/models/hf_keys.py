"""Reading the keys of a `config.json`: each is read, or required to have the one value that is supported, or known not
to change the function. A key outside those lists is an error, because ignoring it might change the model.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lockstep.errors import ModelError
from lockstep.models.naming import Family

FIXED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
    "use_bidirectional_attention": (False, None),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({}, None),
}

# Bookkeeping, token ids, generation and training settings. Dropout is here because the policy is the evaluation-time
# function, in generation as in training; `dtype` because the dtype of a load is the caller's choice.
INERT = frozenset(
    """
    model_type architectures transformers_version dtype torch_dtype _name_or_path _commit_hash name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id decoder_start_token_id
    use_cache initializer_range attention_dropout _attn_implementation _attn_implementation_autoset attn_implementation
    cache_implementation pretraining_tp is_llama_config transformers.js_config unsloth_fixed unsloth_version
    _sliding_window_pattern finetuning_task id2label label2id problem_type return_dict output_hidden_states
    output_attentions torchscript use_bfloat16 tf_legacy_loss task_specific_params prefix tokenizer_class is_decoder
    tie_encoder_decoder cross_attention_hidden_size chunk_size_feed_forward max_length min_length do_sample
    early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    """.split()  # noqa: SIM905  (a list of words is easier to read than 70 quoted strings)
)

_REQUIRED = object()


class Keys:
    """Reads keys of one configuration, remembers which, and complains about the rest."""

    def __init__(self, family: Family, config: Mapping[str, Any]):
        self.family = family
        self.config = config
        self.seen: set[str] = set()

    def fail(self, key: str, expected: str) -> ModelError:
        return ModelError(
            f"config.json of a {self.family.name} model: key {key!r} is {self.config.get(key)!r}; supported: {expected}"
        )

    def get(self, key: str) -> Any:
        self.seen.add(key)
        value = self.config[key] if key in self.config else self.family.defaults.get(key, _REQUIRED)
        if value is _REQUIRED:
            raise ModelError(f"config.json of a {self.family.name} model lacks the key {key!r}")
        return value

    def integer(self, key: str, most: int = 2**53) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(key, "an integer of at least 1")
        if value > most:
            raise self.fail(key, f"an integer of at most {most:,}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.get(key) is None else self.integer(key)

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def finish(self) -> None:
        """Check the keys that may have one value only, then that no key is left over."""
        fixed = FIXED | {key: (value,) for key, value in self.family.fixed.items()}
        for key in sorted(self.config.keys() - self.seen):
            value = self.config[key]
            if key in self.family.inert:
                continue
            if key in fixed:
                # 0 == False and 1.0 == True in Python; a flag must be a flag.
                if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in fixed[key]):
                    raise self.fail(key, " or ".join(map(repr, fixed[key])))
            elif key not in INERT:
                raise ModelError(
                    f"config.json of a {self.family.name} model: key {key!r} (value {self.config[key]!r}) is not known"
                    " to lockstep, and could change what the model computes. If it does not, take it out of config.json"
                )
