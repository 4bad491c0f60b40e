"""Bound layers, of GQA and of MLA, and the tensors of one of their calls."""

from __future__ import annotations

import torch
from attnops import ops
from attnops.metadata import MlaDecodePlan, XqaDecodePlan
from attnops.ops.layer_call import bind_mla_layer, bind_xqa_layer, mla_layer, xqa_layer

LENGTHS = [5, 64, 130]
B, HEADS, KV_HEADS, DIM, PAGES, PAGE_SIZE = 3, 8, 2, 64, 16, 32
OPTIONS = {"softmax_scale": 0.2, "causal": True, "window_left": -1, "logit_cap": 0.0}


class Xqa:
    """Arguments of a call, with pages that its new rows do not reach before it."""

    def __init__(self, device: str, seqlen_q: int = 2, fp8: bool = False, dtype: torch.dtype = torch.bfloat16) -> None:
        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape).to(dtype).to(device)

        self.device, self.seqlen_q, self.fp8 = device, seqlen_q, fp8
        tokens = B * seqlen_q
        self.q, self.k, self.v = random(tokens, HEADS * DIM), random(tokens, KV_HEADS, DIM), random(tokens, 128)
        self.k_scale = torch.tensor([0.03], device=device) if fp8 else None
        self.v_scale = torch.tensor([0.02, 0.05], device=device) if fp8 else None
        pages = [random(PAGES, PAGE_SIZE, KV_HEADS, DIM) for _ in range(2)]
        self.pages = [page.to(torch.float8_e4m3fn) for page in pages] if fp8 else pages
        self.table = torch.randperm(PAGES)[: B * 5].view(B, 5).int().to(device)
        self.seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        position = self.seqlens.long().unsqueeze(1) - seqlen_q + torch.arange(seqlen_q, device=device)
        page = self.table.long().gather(1, position // PAGE_SIZE)
        self.slots = (page * PAGE_SIZE + position % PAGE_SIZE).flatten()
        self.sinks = torch.randn(HEADS, device=device)
        heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
        self.plan = XqaDecodePlan.allocate(B, seqlen_q=seqlen_q, device=device, **heads)
        ops.xqa_decode_plan(self.plan, self.seqlens)
        self.out = torch.empty_like(self.q)

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(B, self.seqlen_q, HEADS, DIM)

    def bind(self) -> torch.Tensor:
        rows = self.rows(self.out), self.rows(self.q)
        return bind_xqa_layer(*rows, *self.pages, self.table, self.seqlens, self.plan, report=None, **OPTIONS)

    def arguments(self, **changes: object) -> dict[str, object]:
        """Of a call, in the op's order, without `bound`."""
        arguments = {
            "out": self.out,
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "slots": self.slots,
            "seqlens": self.seqlens,
            "tree_mask": None,
            "sinks": self.sinks,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }
        assert changes.keys() <= arguments.keys()
        return {**arguments, **changes}

    def call(self, bound: torch.Tensor, **changes: object) -> torch.Tensor:
        arguments = self.arguments(**changes)
        xqa_layer(*arguments.values(), bound)
        return arguments["out"]

    def expected(self, **options: object) -> torch.Tensor:
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        ops.store_kv(*self.pages, self.k, self.v.view(-1, KV_HEADS, DIM), self.slots, **scales)
        options = {**OPTIONS, "sinks": self.sinks, **scales, **options}
        out, _ = ops.xqa_decode(self.rows(self.q), *self.pages, self.table, self.seqlens, self.plan, **options)
        return out.view_as(self.out)


MLA_CACHES = {"bf16": (torch.bfloat16, 576), "e4m3": (torch.float8_e4m3fn, 576), "rows of 656": (torch.uint8, 656)}
MLA_HEADS = 16


class Mla:
    """As `Xqa`, with one token per request. `apart`: latent and rotary parts are tensors of their own."""

    def __init__(self, device: str, cache: str, apart: bool) -> None:
        self.device, self.apart = device, apart
        dtype, row = MLA_CACHES[cache]
        self.scale = torch.tensor([0.02], device=device) if dtype is torch.float8_e4m3fn else None
        self.pages = torch.empty(PAGES, PAGE_SIZE, row, dtype=dtype, device=device)
        rows = self.random(PAGES * PAGE_SIZE, 576)
        ops.store_mla_kv(self.pages, rows, torch.arange(PAGES * PAGE_SIZE, device=device), kv_scale=self.scale)
        self.table = torch.randperm(PAGES)[: B * 5].view(B, 5).int().to(device)
        self.seqlens = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
        last = self.seqlens.long() - 1
        page = self.table.long().gather(1, (last // PAGE_SIZE).unsqueeze(1)).squeeze(1)
        self.slots = page * PAGE_SIZE + last % PAGE_SIZE
        self.plan = MlaDecodePlan.allocate(B, num_q_heads=MLA_HEADS, device=device)
        ops.mla_decode_plan(self.plan, self.seqlens)
        self.out = torch.empty(B, MLA_HEADS * 512, dtype=torch.bfloat16, device=device)
        self.renew()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.bfloat16).to(self.device)

    def renew(self) -> None:
        """Queries and rows of another call."""
        self.q, self.latent = self.random(B, MLA_HEADS, 576), self.random(B, 576)

    def arguments(self, **changes: object) -> dict[str, object]:
        q, latent = self.q, self.latent
        queries, q_pe = (q[..., :512].contiguous(), q[..., 512:].contiguous()) if self.apart else (q, None)
        arguments = {
            "out": self.out,
            "q": queries,
            "q_pe": q_pe,
            "latent": latent[:, :512] if self.apart else latent,
            "k_pe": latent[:, 512:] if self.apart else None,
            "slots": self.slots,
            "seqlens": self.seqlens,
            "tree_mask": None,
            "sinks": None,
            "kv_scale": self.scale,
        }
        assert changes.keys() <= arguments.keys()
        return {**arguments, **changes}

    def bind(self) -> torch.Tensor:
        call = self.arguments()
        q_pe = call["q_pe"].unsqueeze(1) if self.apart else None
        queries = self.out.view(B, 1, MLA_HEADS, 512), call["q"].unsqueeze(1), q_pe
        return bind_mla_layer(*queries, self.pages, self.table, self.seqlens, self.plan, report=None, **OPTIONS)

    def call(self, bound: torch.Tensor, **changes: object) -> torch.Tensor:
        arguments = self.arguments(**changes)
        mla_layer(*arguments.values(), bound)
        return arguments["out"]

    def expected(self) -> torch.Tensor:
        ops.store_mla_kv(self.pages, self.latent, self.slots, kv_scale=self.scale)
        options = {"kv_scale": self.scale, **OPTIONS}
        return ops.mla_decode(self.q.unsqueeze(1), self.pages, self.table, self.seqlens, self.plan, **options)[0]
