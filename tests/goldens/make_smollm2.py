"""Make `smollm2.npz`: what transformers computes for SmolLM2-135M-Instruct with the weights of the GGUF file.

    python tests/goldens/make_smollm2.py FILE.gguf     # needs the `peers` extra, `gguf` and `accelerate`

The weights reach transformers twice, by ways that share no code: through its own GGUF reader, and through
`lockstep.models.gguf` and `save_folder`. All tensors and all logits must be equal bit for bit, which settles the order
of q and k rows and what `config.json` says. Stored: `tokens` [S] int32; `positions` [P]; for those the 8 largest logits
(`top_ids`, `top_logits` [P, 8] float32) and `logsumexp` [P] over the vocabulary; `target_logprobs` [S-1] of the text's
own tokens; `made_with`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from lockstep.models.gguf import params_from_gguf, read_gguf, spec_from_gguf
from lockstep.models.hf import save_folder
from lockstep.models.tokenizer import Tokenizer

OUT = Path(__file__).parent / "smollm2.npz"
TEXT = "The capital of France is Paris, and 17 + 26 = 43.\n"


def main(path: Path) -> None:
    torch.set_num_threads(1)
    file = read_gguf(path)
    spec = spec_from_gguf(file)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    with tempfile.TemporaryDirectory() as folder:
        save_folder(Path(folder) / "model", spec, params_from_gguf(file, spec, "float32"))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            Path(folder) / "model", dtype=torch.float32, attn_implementation="eager"
        ).eval()
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ours, theirs = model.state_dict(), peer.state_dict()
    if ours.keys() != theirs.keys():
        raise SystemExit(f"names differ: {sorted(ours.keys() ^ theirs.keys())}")
    unequal = [n for n in ours if not torch.equal(ours[n], theirs[n])]
    if unequal:
        raise SystemExit(f"{len(unequal)} of {len(ours)} tensors differ: {unequal[:5]}")
    ids = tokenizer.encode(TEXT)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
        if not torch.equal(logits, peer(torch.tensor([ids])).logits[0].double()):
            raise SystemExit("equal tensors, but the logits differ: the two configurations are not the same")
    z = torch.logsumexp(logits, -1)
    positions = [len(ids) // 4, len(ids) // 2, len(ids) - 1]
    values, indices = logits[positions].topk(8)
    targets = (logits[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0] - z[:-1]).numpy()
    np.savez_compressed(
        OUT,
        tokens=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        top_ids=indices.numpy().astype(np.int32),
        top_logits=values.numpy().astype(np.float32),
        logsumexp=z[positions].numpy().astype(np.float32),
        target_logprobs=targets.astype(np.float32),
        made_with=f"transformers {transformers.__version__}, torch {torch.__version__}, float32, eager attention",
    )
    print(f"{len(ours)} tensors equal; {len(ids)} tokens; mean log-probability {targets.mean():.3f}")
    for position, best in zip(positions, indices[:, 0].tolist(), strict=True):
        print(repr(tokenizer.decode(ids[: position + 1])), "->", repr(tokenizer.decode([best])))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
