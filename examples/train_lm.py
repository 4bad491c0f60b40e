"""Trains one of the two byte-level example models on the text of `corpus.py`.

    python examples/train_lm.py --model gqa --corpus corpus.txt --out gqa.safetensors --steps 6000

With the same device, versions and --steps a run repeats; with --minutes the learning rate follows the clock instead,
so that a run ends on time on any machine, and no two runs are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from corpus import split
from models import Model, batch_attend, build_model, config_of_kind, decode, encode, generate, load_model, save_model
from torch import Tensor, nn
from tqdm import tqdm

SAMPLE_PROMPTS = (
    "It is a truth universally acknowledged, that ",
    "Call me Ishmael. ",
    "And it came to pass in those days, ",
    '"My dear Emma," said he, ',
)


def as_tensor(text: bytes, device: str) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)


class Batches:
    """Random windows of the text; half of them begin where a paragraph does, as prompts do."""

    def __init__(self, text: Tensor, batch: int, length: int, seed: int):
        self.text, self.batch = text, batch
        self.offsets = torch.arange(length + 1, device=text.device)
        self.last_start = text.numel() - length - 1
        newline = text == ord("\n")
        begins = (newline[1:-1] & newline[:-2]).nonzero().flatten() + 2
        self.paragraphs = begins[begins <= self.last_start].cpu()
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        """int64 [batch, length + 1]."""
        half = self.batch // 2
        anywhere = torch.randint(self.last_start + 1, (self.batch - half,), generator=self.generator)
        begins = self.paragraphs[torch.randint(self.paragraphs.numel(), (half,), generator=self.generator)]
        starts = torch.cat([anywhere, begins]).to(self.text.device, non_blocking=True)
        return self.text[starts[:, None] + self.offsets].long()


def autocast(device: str) -> contextlib.AbstractContextManager:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def make_loss(model: Model, batch: int, device: str) -> Callable[[Tensor], Tensor]:
    """windows [batch, length + 1] -> mean cross entropy in nats, positions counted from each window's begin."""
    attend = batch_attend(model, batch)

    def loss(windows: Tensor) -> Tensor:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        positions = torch.arange(inputs.shape[1], device=device).repeat(batch)
        return F.cross_entropy(model(inputs.reshape(-1), positions, attend), targets.reshape(-1))

    return loss


@torch.no_grad()
def bits_per_byte(model: Model, text: Tensor, length: int, batch: int) -> float:
    """Mean over `text`, cut into windows of `length` that do not overlap (the rest is left out)."""
    model.eval()
    count = (text.numel() - 1) // length
    starts = torch.arange(count, device=text.device) * length
    windows = text[starts[:, None] + torch.arange(length + 1, device=text.device)].long()
    total = 0.0
    for part in windows.split(batch):
        with autocast(text.device.type):
            total += make_loss(model, len(part), text.device.type)(part).item() * len(part)
    model.train()
    return total / count / math.log(2)


def make_optimizers(model: Model, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=torch.cuda.is_available()),
    ]


def compiled_if_possible(loss: Callable[[Tensor], Tensor], model: nn.Module, windows: Tensor) -> Callable:
    """torch.compile needs a host compiler; without one training is only slower."""
    compiled = torch.compile(loss, dynamic=False)
    try:
        with autocast(windows.device.type):
            warm_up = compiled(windows)
        warm_up.backward()
    except Exception as error:
        print(f"not compiled ({type(error).__name__}: {str(error)[:200]})", flush=True)
        compiled = loss
    model.zero_grad(set_to_none=True)
    return compiled


def train(model: Model, args: argparse.Namespace, train_text: Tensor, held_out: Tensor) -> dict[str, float]:
    """Trains in place and leaves the weights of the best evaluation; returns what happened."""
    begin = time.monotonic()
    batches = Batches(train_text, args.batch, args.length, args.seed)
    optimizers = make_optimizers(model, args.lr, args.weight_decay)
    loss_of = make_loss(model, args.batch, args.device)
    if args.device == "cuda":
        loss_of = compiled_if_possible(loss_of, model, batches.next())

    best, best_state, step, progress = math.inf, {}, 0, 0.0
    bar = tqdm(total=args.steps, unit="step", mininterval=5)
    while progress < 1.0:
        rate = args.lr * min(1.0, (step + 1) / args.warmup) * (1.0 - progress)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        with autocast(args.device):
            loss = loss_of(batches.next())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        progress = step / args.steps
        if args.minutes:
            progress = max(progress, (time.monotonic() - begin) / (60 * args.minutes))
        if step % args.eval_every == 0 or progress >= 1.0:
            held = bits_per_byte(model, held_out, args.length, args.batch)
            tqdm.write(f"step {step}: train {loss.item() / math.log(2):.4f}, held out {held:.4f} bits per byte")
            if held < best:
                best, best_state = held, {k: v.clone() for k, v in model.state_dict().items()}
    bar.close()
    model.load_state_dict(best_state)
    seconds = time.monotonic() - begin
    return {"steps": step, "seconds": round(seconds), "bytes_per_s": round(step * args.batch * args.length / seconds)}


def show_samples(model: Model, count: int) -> None:
    for prompt in SAMPLE_PROMPTS:
        for temperature in (0.0, 0.7):
            text = decode(list(generate(model, encode(prompt), count, temperature, seed=1)))
            print(f"--- temperature {temperature}\n{prompt}|{text}\n", flush=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gqa", "mla"], required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="text written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write, in bf16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=0.0, help="stop earlier, after this many minutes")
    parser.add_argument("--batch", type=int, default=64, help="windows per step")
    parser.add_argument("--length", type=int, default=2048, help="bytes per window")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--eval-every", type=int, default=250, help="steps")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample-bytes", type=int, default=400, help="length of the samples shown at the end")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    train_text, held_out = (as_tensor(part, args.device) for part in split(args.corpus.read_bytes()))
    model = build_model(config_of_kind(args.model), args.dropout).to(args.device)
    size = sum(p.numel() for p in model.parameters())
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{args.model}: {size} parameters, {train_text.numel()} bytes to learn from, on {device_name}", flush=True)

    report = train(model, args, train_text, held_out)
    save_model(model, args.out)
    model = load_model(args.out, torch.float32, args.device)  # what is judged is what was written
    report |= {"held_out_bits_per_byte": round(bits_per_byte(model, held_out, args.length, args.batch), 4)}
    report |= {"train_bits_per_byte": round(bits_per_byte(model, train_text[:1_000_000], args.length, args.batch), 4)}
    model.eval()
    print(json.dumps({"model": args.model, "parameters": size, "device": device_name, **report}), flush=True)
    if args.device == "cuda":
        model = load_model(args.out, torch.bfloat16, args.device)
    show_samples(model, args.sample_bytes)


if __name__ == "__main__":
    main()
