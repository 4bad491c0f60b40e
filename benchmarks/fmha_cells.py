"""A cell of bench_fmha.py: its memory, what it needs at least, and its right answer."""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

BF16, FP16, FP8, INT32 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One H200, measured: a read-only sweep, an 8192^3 bf16 product on random data, and twice that for FP8.
BYTES_PER_MS, FLOP_PER_MS = 4.67e9, {1: 1568e9, 2: 784e9}
THIRDS_MS = [(0.0, 0.05), (0.05, 0.5), (0.5, 4.0)]  # the last bound keeps a run short
POOL_ELEMENTS = 1_600_000_000  # of K, of V, and of q


@dataclasses.dataclass
class Cell:
    """Lengths are lists over requests. `page` 0: ragged keys. `table_tokens` 0: a table as wide as it must be."""

    heads: tuple[int, int]
    q_lens: list[int]
    k_lens: list[int]
    head_dim: int = 128
    head_dim_v: int = 0  # 0: head_dim
    page: int = 0
    causal: bool = True
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    window_left: int = -1
    window_right: int = -1
    logit_cap: float = 0.0
    sinks: bool = False
    table_tokens: int = 0
    bar: float = 0.97  # ratio to the best peer below which the cell is measured again
    sustained: bool = False

    def __post_init__(self) -> None:
        self.head_dim_v = self.head_dim_v or self.head_dim
        self.kv_dtype = self.kv_dtype or self.dtype
        self.pairs, self.num_visible = 0, 0
        for sq, sk in zip(self.q_lens, self.k_lens, strict=True):
            pairs, visible = _visible(sq, sk, self.causal, self.window_left, self.window_right)
            self.pairs, self.num_visible = self.pairs + pairs, self.num_visible + visible

    @property
    def out_dtype(self) -> torch.dtype:
        return BF16 if self.dtype == FP8 else self.dtype

    @property
    def bytes(self) -> int:
        """q, out, and every key and value that some row sees, once each."""
        rows = sum(self.q_lens) * self.heads[0]
        kv = self.num_visible * self.heads[1] * (self.head_dim + self.head_dim_v) * self.kv_dtype.itemsize
        return kv + rows * (self.head_dim * self.dtype.itemsize + self.head_dim_v * self.out_dtype.itemsize)

    @property
    def flops(self) -> int:
        return 2 * self.pairs * self.heads[0] * (self.head_dim + self.head_dim_v)

    @property
    def roofline_ms(self) -> float:
        return max(self.bytes / BYTES_PER_MS, self.flops / FLOP_PER_MS[self.dtype.itemsize])

    @property
    def bar_alone_ms(self) -> float:
        """What it may take when no peer runs it: 1.3 times the roofline, or 5 us more."""
        return max(1.3 * self.roofline_ms, self.roofline_ms + 0.005)

    @property
    def third(self) -> int:
        return next((i for i, (_, high) in enumerate(THIRDS_MS) if self.roofline_ms < high), len(THIRDS_MS) - 1)

    @property
    def num_pages(self) -> int:
        return sum(-(-n // max(self.page, 1)) for n in self.k_lens)

    @property
    def kv_tokens(self) -> int:
        return self.num_pages * max(self.page, 1)

    @property
    def slice_elements(self) -> int:
        """What a call takes of a pool, K's, V's or q's."""
        keys = self.kv_tokens * self.heads[1] * max(self.head_dim, self.head_dim_v)
        return max(keys, sum(self.q_lens) * self.heads[0] * self.head_dim, 1)

    def fits(self, elements: int = POOL_ELEMENTS) -> bool:
        return 2 * self.slice_elements <= elements

    @property
    def params(self) -> dict:
        def span(lens: list[int]) -> int | str:
            return lens[0] if len(set(lens)) == 1 else f"{min(lens)}..{max(lens)} sum {sum(lens)}"

        extra = {"window": (self.window_left, self.window_right), "cap": self.logit_cap, "sinks": self.sinks}
        extra["table"] = self.table_tokens
        off = {"window": (-1, -1), "cap": 0.0, "sinks": False, "table": 0}
        return {
            "h_q": self.heads[0],
            "h_kv": self.heads[1],
            "d": self.head_dim,
            "d_v": self.head_dim_v,
            "batch": len(self.q_lens),
            "s_q": span(self.q_lens),
            "s_k": span(self.k_lens),
            "page": self.page,
            "causal": self.causal,
            "dtype": str(self.dtype).removeprefix("torch."),
            "kv": str(self.kv_dtype).removeprefix("torch."),
            **{name: value for name, value in extra.items() if value != off[name]},
        }

    @property
    def name(self) -> str:
        p = self.params
        words = [f"{p['h_q']}/{p['h_kv']} d {p['d']}" + (f",{p['d_v']}" if p["d_v"] != p["d"] else "")]
        words.append(f"{p['batch']} x {p['s_q']}" + (f" on {p['s_k']}" if p["s_k"] != p["s_q"] else ""))
        words += [f"page {self.page}"] if self.page else []
        words += ["" if self.causal else "full", p["dtype"] if self.dtype != BF16 else ""]
        words += [f"kv {p['kv']}" if self.kv_dtype != self.dtype else ""]
        words += [f"{name} {p[name]}" for name in ("window", "cap", "sinks", "table") if name in p]
        return " ".join(word for word in words if word)

    def build(self, pools: Pools) -> Cell:
        """Views of random pools, a random page table, and how often to rotate."""
        self.pools = pools
        self.cu_q, self.cu_k = (_bounds(lens).to(DEVICE) for lens in (self.q_lens, self.k_lens))
        self.seqlens = torch.tensor(self.k_lens, dtype=INT32, device=DEVICE)
        self.sink_logits = torch.randn(self.heads[0], device=DEVICE) if self.sinks else None
        if self.page:
            counts = torch.tensor([-(-n // self.page) for n in self.k_lens])
            self.kv_indptr, self.kv_indices = _bounds(counts.tolist()), torch.randperm(self.num_pages).to(INT32)
            width = max(int(counts.max()), -(-self.table_tokens // self.page), 1)
            table = torch.zeros(len(counts), width, dtype=INT32)  # peers may read cells that no length needs
            table[torch.arange(width) < counts.unsqueeze(1)] = self.kv_indices
            self.page_table, self.kv_indices = table.to(DEVICE), self.kv_indices.to(DEVICE)
            self.last_page_len = torch.tensor([(n - 1) % self.page + 1 for n in self.k_lens], dtype=INT32)
        wanted = 1.5e9 if self.page else 3e8  # new rows come from the projection before, a prefix from memory
        calls = min(math.ceil(wanted / max(self.bytes, 1)), math.ceil(2e12 / max(self.flops, 1)), 128)
        self.rotation = max(1, min(max(2, calls), pools.elements // self.slice_elements))
        return self

    def q(self, r: int) -> torch.Tensor:
        return self._slice("q", self.dtype, r, (sum(self.q_lens), self.heads[0], self.head_dim))

    def kv(self, r: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``[T_k, H_kv, D]`` or ``[P, page, H_kv, D]``."""
        tokens = (self.num_pages, self.page) if self.page else (self.kv_tokens,)
        shapes = ((*tokens, self.heads[1], d) for d in (self.head_dim, self.head_dim_v))
        k, v = (self._slice(name, self.kv_dtype, r, shape) for name, shape in zip("kv", shapes, strict=True))
        return k, v

    def _slice(self, name: str, dtype: torch.dtype, r: int, shape: tuple[int, ...]) -> torch.Tensor:
        size = math.prod(shape)
        return self.pools[name, dtype][r * size : (r + 1) * size].view(shape)

    def relative_error(self, out: torch.Tensor) -> float:
        """The worst of some requests on slice 0, against float64; inf: not finite. out: [T, H, D] or [B, H, S, D]."""
        if out.dim() == 4:
            out = out.transpose(1, 2).flatten(0, 1)
        if not bool(out.isfinite().all()):
            return math.inf
        errors = [0.0]
        for rows, expected in self.expected:
            difference, norm = (out[rows].double() - expected).norm(), expected.norm()
            errors.append(float(difference / norm if norm > 0 else difference))
        return max(errors)

    @functools.cached_property
    def expected(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """First, last and some middle rows of some requests: their numbers, and out in float64."""
        order = sorted(range(len(self.q_lens)), key=lambda b: (self.q_lens[b], self.k_lens[b]))
        some = {0, len(order) - 1, order[0], order[-1], order[len(order) // 2]}
        return [self._expected_of(b) for b in sorted(some) if self.q_lens[b]]

    def _expected_of(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        first, sq, sk = int(self.cu_q[b]), self.q_lens[b], self.k_lens[b]
        keys = self._rows_of(b)
        k, v = ((x.flatten(0, 1) if self.page else x)[keys] for x in self.kv(0))
        rows = torch.cat([torch.arange(min(sq, 64)), torch.randint(sq, (64,)), torch.arange(max(sq - 64, 0), sq)])
        rows = rows.unique().to(DEVICE)
        low, high = _row_bounds(rows, sq, sk, self.causal, self.window_left, self.window_right)
        key = torch.arange(sk, device=DEVICE)
        hidden = (key < low.unsqueeze(1)) | (key >= high.unsqueeze(1))
        group, q, parts = self.heads[0] // self.heads[1], self.q(0)[first + rows], []
        for h in range(self.heads[1]):
            heads = slice(h * group, (h + 1) * group)
            scores = torch.einsum("qgd,kd->gqk", q[:, heads].double(), k[:, h].double()) / math.sqrt(self.head_dim)
            if self.logit_cap:
                scores = self.logit_cap * torch.tanh(scores / self.logit_cap)
            scores = scores.masked_fill(hidden, -math.inf)
            if self.sink_logits is not None:
                sink = self.sink_logits[heads].double().view(-1, 1, 1).expand(-1, len(rows), 1)
                scores = torch.cat([scores, sink], -1)
            weights = scores.softmax(-1).nan_to_num(0.0)[..., :sk]  # a row without keys: zeros
            parts.append(torch.einsum("gqk,kd->qgd", weights, v[:, h].double()))
        return first + rows, torch.cat(parts, 1)

    def _rows_of(self, b: int) -> torch.Tensor:
        token = torch.arange(self.k_lens[b], device=DEVICE)
        if not self.page:
            return token + self.cu_k[b].long()
        return self.page_table[b].long()[token // self.page] * self.page + token % self.page


class Pools:
    """Flat random memory by role and dtype, made when first asked for."""

    def __init__(self, elements: int = POOL_ELEMENTS) -> None:
        self.elements = elements
        self.made: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def __getitem__(self, key: tuple[str, torch.dtype]) -> torch.Tensor:
        if key not in self.made:
            pool = torch.empty(self.elements, dtype=key[1], device=DEVICE)
            for part in pool.split(1 << 27):
                part.copy_(torch.randn(part.numel(), dtype=BF16, device=DEVICE))
            self.made[key] = pool
        return self.made[key]


def _bounds(lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lens]).cumsum(0).to(INT32)


def _row_bounds(
    rows: torch.Tensor, sq: int, sk: int, causal: bool, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[low, high) of the keys that each row sees; high <= low: none."""
    position = rows + (sk - sq)
    high = torch.full_like(rows, sk)
    if causal:
        high = torch.minimum(high, position + 1)
    if right >= 0:
        high = torch.minimum(high, position + right + 1)
    low = (position - left).clamp(min=0) if left >= 0 else torch.zeros_like(rows)
    return low, high.clamp(min=0)


def _visible(sq: int, sk: int, causal: bool, left: int, right: int) -> tuple[int, int]:
    """Pairs of a row and a key that it sees; and keys that some row sees. `_row_bounds`, summed in closed form."""
    if not sq or not sk:
        return 0, 0
    ahead = min(1 if causal else sk + sq, right + 1 if right >= 0 else sk + sq)  # high is position + ahead
    first, last = sk - sq, sk - 1

    def total(offset: int) -> int:
        """Of clamp(position + offset, 0, sk) over all rows."""
        return _ramp(last + offset, sk) - _ramp(first - 1 + offset, sk)

    pairs = total(ahead) - (total(-left) if left >= 0 else 0)
    low = max(first - left, 0) if left >= 0 else 0
    return pairs, max(min(last + ahead, sk) - low, 0)


def _ramp(x: int, limit: int) -> int:
    """The sum of min(t, limit) over t in [1, x]."""
    if x <= 0:
        return 0
    inside = min(x, limit)
    return inside * (inside + 1) // 2 + (x - inside) * limit
