"""Trains the draft head of `examples/speculate.py` on text that its target writes itself, so it needs no corpus.

    python examples/train_draft.py --out examples/weights/gqa_draft.safetensors --steps 1500

The head learns the target's distribution of the next token and its hidden state: once from the target's hidden states,
and once from those that the head itself predicted, which is what it sees in a draft.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from models import GqaModel, encode, load_model
from models.draft import DraftHead, save_draft
from models.gqa import GqaBatchAttend
from prompts import PROMPTS
from torch import Tensor
from tqdm import tqdm

WEIGHTS = Path(__file__).parent / "weights"
SEED_BYTES = 48  # of a prompt, from any place in it: what a text begins with


class GrowingCache:
    """Attention of `batch` sequences of equal length that grow together."""

    def __init__(self, model: GqaModel, batch: int, length: int) -> None:
        config = model.config
        self.group, self.scale, self.batch = config.num_heads // config.num_kv_heads, config.softmax_scale, batch
        shape = (2, config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
        self.kv, self.lengths = torch.zeros(shape), [0] * config.num_layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        begin, end = self.lengths[layer], self.lengths[layer] + q.shape[2]
        self.kv[0, layer, :, :, begin:end], self.kv[1, layer, :, :, begin:end] = k, v
        self.lengths[layer] = end
        keys, values = self.kv[:, layer, :, :, :end]
        options = {"is_causal": begin == 0, "scale": self.scale, "enable_gqa": True}
        return F.scaled_dot_product_attention(q, keys, values, **options).transpose(1, 2).flatten(0, 1)


@torch.no_grad()
def write_texts(model: GqaModel, batch: int, length: int, temperature: float, seed: int) -> Tensor:
    """int64 ``[batch, length]``: pieces of the demo's prompts, continued by the target. A quarter is greedy."""
    generator = torch.Generator().manual_seed(seed)
    source = [token for prompt in PROMPTS for token in encode(prompt.text)]
    begins = torch.randint(len(source) - SEED_BYTES, (batch,), generator=generator)
    tokens = torch.tensor([source[begin : begin + SEED_BYTES] for begin in begins.tolist()])
    cache = GrowingCache(model, batch, length)
    new, first = tokens, 0
    for _ in tqdm(range(length - SEED_BYTES), desc="texts", mininterval=5):
        positions = torch.arange(first, first + new.shape[1]).repeat(batch)
        logits = model(new.flatten(), positions, cache).view(batch, -1, model.config.vocab_size)[:, -1]
        first += new.shape[1]
        new = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        new[: batch // 4] = logits[: batch // 4].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, new], 1)
    return tokens


@torch.no_grad()
def hidden_states(model: GqaModel, texts: Tensor) -> Tensor:
    """The target's, ``[batch, length, d_model]``."""
    parts = []
    for part in texts.split(8):
        positions = torch.arange(part.shape[1]).repeat(len(part))
        hidden = model.hidden(part.flatten(), positions, GqaBatchAttend(model.config, len(part)))
        parts.append(hidden.unflatten(0, part.shape))
    return torch.cat(parts)


def losses(head: DraftHead, tokens: Tensor, hidden: Tensor, passes: int) -> tuple[Tensor, list[float]]:
    """(loss, how often the best guess is the target's in each pass) of windows ``[n, length]``."""
    attend = GqaBatchAttend(head.config, len(tokens))
    length = tokens.shape[1] - 1
    known, total, hits = hidden[:, :length], tokens.new_zeros((), dtype=torch.float32), []
    for i in range(passes):
        rows = length - i  # row t: token t + 1 + i, and a state that stands for t + i
        positions = torch.arange(i, length).repeat(len(tokens))
        states = known[:, :rows].reshape(-1, known.shape[-1])
        out = head(tokens[:, 1 + i :].reshape(-1), states, positions, attend)
        aim = hidden[:, 1 + i :].reshape(-1, known.shape[-1])
        wanted = head.logits(aim).softmax(-1)
        logits = head.logits(out)
        total = total + F.cross_entropy(logits, wanted) + 0.2 * F.smooth_l1_loss(out, aim)
        hits.append(float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()))
        known = out.view(len(tokens), rows, -1)
    return total / passes, hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=128, help="that the target writes")
    parser.add_argument("--length", type=int, default=768, help="bytes of a text")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop earlier, after this many minutes")
    parser.add_argument("--batch", type=int, default=8, help="windows per step")
    parser.add_argument("--window", type=int, default=192, help="bytes per window")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    begin = time.monotonic()
    target = load_model(WEIGHTS / "gqa.safetensors", torch.float32)
    target.requires_grad_(False)
    assert isinstance(target, GqaModel)
    texts = write_texts(target, args.texts, args.length, args.temperature, args.seed)
    hidden = hidden_states(target, texts)
    held, rows = texts[-4:, :], len(texts) - 4
    head = DraftHead(target)
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.01)
    generator = torch.Generator().manual_seed(args.seed)
    progress, step, bar = 0.0, 0, tqdm(total=args.steps, mininterval=5)
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (step + 1) / 50) * (1.0 - progress)
        row = torch.randint(rows, (args.batch,), generator=generator)
        first = torch.randint(args.length - args.window, (args.batch,), generator=generator)
        place = (row[:, None], first[:, None] + torch.arange(args.window))
        loss, hits = losses(head, texts[place], hidden[place], args.passes)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        step += 1
        bar.update()
        progress = step / args.steps
        if args.minutes:
            progress = max(progress, (time.monotonic() - begin) / (60 * args.minutes))
        if step % 100 == 0:
            tqdm.write(f"step {step}: loss {loss.item():.3f}, guesses right {[round(hit, 3) for hit in hits]}")
    bar.close()
    with torch.no_grad():
        loss, hits = losses(head, held, hidden[-4:], args.passes)
    save_draft(head, args.out)
    size = sum(parameter.numel() for parameter in head.parameters())
    report = {"parameters": size, "bytes": args.out.stat().st_size, "steps": step, "held_out_loss": loss.item()}
    print(json.dumps(report | {"held_out_right": hits, "seconds": round(time.monotonic() - begin)}))


if __name__ == "__main__":
    main()
