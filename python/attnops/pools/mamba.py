"""The memory of linear layers: a slot per request holds its states of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnops.ops import clear_states, copy_states, delta_commit
from attnops.pools.kv_cache import MHATokenToKVPool
from attnops.pools.req_to_token import ReqToTokenPool
from attnops.types import check_dtype, check_range, device_of

STATE_CHUNK = 64  # tokens; states are kept at multiples of it alone
MAX_DRAFTS = 16  # of a request: csrc/core/linear_verify.h


class MambaState(NamedTuple):
    """States of linear layers, of one or of all.

    Attributes:
        conv: The last inputs of short convolutions, ``[..., slots, channels, width - 1]``; None: there are none.
        temporal: States of recurrences, ``[..., slots, heads, V, K]``; None: there are none.
    """

    conv: Tensor | None
    temporal: Tensor | None


class DraftRings(NamedTuple):
    """Updates of drafts beside the states of linear layers, of one or of all: `attnops.ops.delta_verify`.

    Attributes:
        ring_u: float32 ``[..., slots, heads, rows, V]``.
        ring_k: float32 ``[..., slots, groups, rows, K]``.
        ring_decay: float32 ``[..., slots, heads, rows]``, or ``[..., slots, heads, rows, K]``.
        ring_len: int32 ``[..., slots]``.
    """

    ring_u: Tensor
    ring_k: Tensor
    ring_decay: Tensor
    ring_len: Tensor


class MambaPool:
    """Slots of states, each with a count of holders.

    A prefix cache that keeps a state `share`s its slot, and gives it back by `free`, as requests do. Only a state with
    one holder may be written: who goes on from a shared one takes a `fork`.

    Args:
        size: Slots.
        num_layers: Linear layers.
        conv_shape: (channels, width - 1) of their convolutions; None: they have none.
        temporal_shape: (heads, V, K) of their recurrences; None: they have none.
        dtype: Of the convolutions' inputs.
        temporal_dtype: Of the recurrences' states.
        speculative_num_draft_tokens: The most tokens that a step verifies of a request, at most 16; 0: no such step
            comes, and there are no rings.
        num_k_heads: Of the rings' keys, which divides the heads; None: as many as heads.
        gate_per_channel: The rings are KDA's.
        ring_rows: Rows of a ring; None: three times the drafts. A ring without room for a step's drafts is folded into
            its state, so more rows are more memory and fewer folds.
    """

    def __init__(
        self,
        size: int,
        num_layers: int,
        conv_shape: tuple[int, int] | None,
        temporal_shape: tuple[int, int, int] | None,
        dtype: torch.dtype = torch.bfloat16,
        temporal_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        speculative_num_draft_tokens: int = 0,
        num_k_heads: int | None = None,
        gate_per_channel: bool = False,
        ring_rows: int | None = None,
    ) -> None:
        owner = f"attnops: {type(self).__name__}"
        check_range(owner, "size", size, 1)
        check_range(owner, "num_layers", num_layers, 1)
        check_dtype(owner, "dtype", dtype)
        check_dtype(owner, "temporal_dtype", temporal_dtype)
        check_range(owner, "speculative_num_draft_tokens", speculative_num_draft_tokens, 0, MAX_DRAFTS)
        for name, given in (("num_k_heads", num_k_heads), ("ring_rows", ring_rows)):
            if given is not None:
                check_range(owner, name, given, 1)
        self.size, self.num_layers, self.device = size, num_layers, device_of(device)

        def zeros(shape: tuple[int, ...] | None, dtype: torch.dtype) -> Tensor | None:
            return None if shape is None else torch.zeros(num_layers, size, *shape, dtype=dtype, device=self.device)

        self.states = MambaState(zeros(conv_shape, dtype), zeros(temporal_shape, temporal_dtype))
        self.speculative_num_draft_tokens = drafts = speculative_num_draft_tokens
        self.rings: DraftRings | None = None
        if drafts and temporal_shape is not None:
            heads, value_dim, key_dim = temporal_shape
            groups, rows = num_k_heads or heads, ring_rows or 3 * drafts
            if heads % groups or rows < drafts:
                raise ValueError(
                    f"attnops: num_k_heads must divide {heads} (heads of temporal_shape) and ring_rows be at least "
                    f"{drafts} (speculative_num_draft_tokens), got {groups} and {rows}"
                )
            channels = [key_dim] if gate_per_channel else []
            make = lambda *shape: torch.zeros(num_layers, size, *shape, device=self.device)  # noqa: E731
            self.rings = DraftRings(
                make(heads, rows, value_dim),
                make(groups, rows, key_dim),
                make(heads, rows, *channels),
                torch.zeros(num_layers, size, dtype=torch.int32, device=self.device),
            )
        self._free = list(range(size - 1, -1, -1))
        self._holders = [0] * size

    def layer_rings(self, place: int) -> DraftRings | None:
        """The rings of one layer; None: the pool has none."""
        self._check_place(place)
        return None if self.rings is None else DraftRings(*(part[place] for part in self.rings))

    def fold(self, slots: Tensor) -> None:
        """Rings into states, in all layers, before these are read or copied.

        Args:
            slots: int32 ``[B]``, at most once each; below 0: padding.
        """
        if self.rings is None or self.states.temporal is None or not len(slots):
            return
        none = torch.zeros(len(slots), 1, dtype=torch.int32, device=self.device)
        for place in range(self.num_layers):
            rings = DraftRings(*(part[place] for part in self.rings))._asdict()
            options = {**rings, "state_indices": slots, "fold": True}
            delta_commit(self.states.temporal[place], none, none[:, 0], **options)

    def layer(self, place: int) -> MambaState:
        """The states of one layer; `place` counts linear layers alone."""
        self._check_place(place)
        return MambaState(*(None if states is None else states[place] for states in self.states))

    def _check_place(self, place: int) -> None:
        if not 0 <= place < self.num_layers:
            raise ValueError(f"attnops: place must be in [0, {self.num_layers}) of MambaPool, got {place}")

    def available_size(self) -> int:
        """Free slots."""
        return len(self._free)

    def alloc(self, need_size: int = 1) -> list[int] | None:
        """Slots with states of zero, or None when there are not as many."""
        slots = self._take(need_size)
        if slots:
            for states in self.states:
                if states is not None:
                    clear_states(states, self._indices(slots))
            if self.rings is not None:
                self.rings.ring_len[:, self._indices(slots)] = 0
        return slots

    def fork(self, slot: int) -> int | None:
        """A slot with the same states, for a branch; None when there is no free one."""
        self._check_used([slot])
        taken = self._take(1)
        if taken is None:
            return None
        self.copy_from([slot], taken)
        return taken[0]

    def copy_from(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """States of all layers, from slot to slot.

        Raises:
            ValueError: a slot is free, or one of `dst` has other holders, or comes twice.
        """
        if len(src) != len(dst):
            raise ValueError(f"attnops: src and dst must have one slot each, got {len(src)} and {len(dst)}")
        self._check_used([*src, *dst])
        for slot in dst:
            self.check_writable(slot)
            if slot in src or list(dst).count(slot) > 1:
                raise ValueError(f"attnops: slot {slot} of MambaPool is in dst twice, or in src as well")
        if self.rings is not None and len(src):
            self.fold(self._indices(sorted(set(src))))
            self.rings.ring_len[:, self._indices(dst)] = 0
        for states in self.states:
            if states is not None and len(src):
                copy_states(states, self._indices(src), self._indices(dst))

    def share(self, slots: Iterable[int]) -> None:
        """One holder more for each slot."""
        slots = list(slots)
        self._check_used(slots)
        for slot in slots:
            self._holders[slot] += 1

    def free(self, slots: int | Iterable[int]) -> None:
        """One holder less for each slot; one without any is free.

        Raises:
            ValueError: a slot has fewer holders than leave it; nothing is given back then.
        """
        leaving = Counter([slots] if isinstance(slots, int) else slots)
        self._check_used(list(leaving))
        for slot, count in leaving.items():
            if count > self._holders[slot]:
                raise ValueError(
                    f"attnops: slot {slot} of MambaPool has {self._holders[slot]} holders, got {count} to free"
                )
        for slot in leaving.elements():
            self._holders[slot] -= 1
            if self._holders[slot] == 0:
                self._free.append(slot)

    def clear(self) -> None:
        """Every slot is free again, whoever held it. States stay until `alloc` gives the slot out."""
        self._free = list(range(self.size - 1, -1, -1))
        self._holders = [0] * self.size

    def check_writable(self, slot: int) -> None:
        """Raises ValueError unless the slot has one holder, who may write it."""
        self._check_used([slot])
        if self._holders[slot] > 1:
            raise ValueError(
                f"attnops: slot {slot} of MambaPool has {self._holders[slot]} holders: copy it before you write to it"
            )

    def _take(self, need_size: int) -> list[int] | None:
        if need_size < 0:
            raise ValueError(f"attnops: need_size must not be negative, got {need_size}")
        if need_size > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(need_size)]
        for slot in slots:
            self._holders[slot] = 1
        return slots

    def _check_used(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if not 0 <= slot < self.size or self._holders[slot] == 0:
                raise ValueError(f"attnops: slot {slot} of MambaPool is not in use")

    def _indices(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(list(slots), dtype=torch.int32).to(self.device, non_blocking=True)


class HybridReqToTokenPool(ReqToTokenPool):
    """A row of token slots per running request, and a slot of states.

    Args:
        size, max_context_len, device: as of `ReqToTokenPool`.
        mamba_pool: Where the states are.
        max_checkpoints: The most states that a prompt leaves behind on its way (`keep_at`); 0: none.

    Attributes:
        req_index_to_mamba_index_mapping: int32 ``[size]`` on `device`: the slot of each row; -1: the row is free.
        checkpoints: int32 ``[size, max_checkpoints, 2]`` on `device`: after how many tokens of each row, and to which
            slot; -1: none.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        mamba_pool: MambaPool,
        device: torch.device | str = "cpu",
        max_checkpoints: int = 0,
    ) -> None:
        super().__init__(size, max_context_len, device)
        if max_checkpoints < 0:
            raise ValueError(f"attnops: max_checkpoints must not be negative, got {max_checkpoints}")
        self.mamba_pool, self.max_checkpoints = mamba_pool, max_checkpoints
        self.checkpoints = torch.full((size, max_checkpoints, 2), -1, dtype=torch.int32, device=self.device)
        self.req_index_to_mamba_index_mapping = torch.full((size,), -1, dtype=torch.int32, device=self.device)
        self._slots = [-1] * size

    def alloc(self, need_size: int = 1) -> list[int] | None:
        """Rows and states of zero for `need_size` new requests, or None when there are not as many."""
        if need_size > self.mamba_pool.available_size():
            return None
        rows = super().alloc(need_size)
        if rows:
            slots = self.mamba_pool.alloc(need_size)
            assert slots is not None
            self._map(rows, slots)
        return rows

    def free(self, rows: int | list[int]) -> None:
        """Gives rows and their states back."""
        super().free(rows)
        given = [rows] if isinstance(rows, int) else list(rows)
        self.mamba_pool.free([self._slots[row] for row in given])
        self._map(given, [-1] * len(given))
        if self.max_checkpoints:
            self.checkpoints[given] = -1

    def clear(self) -> None:
        """All rows are free; so are their states, as far as nobody else holds them."""
        self.mamba_pool.free([slot for slot in self._slots if slot >= 0])
        self._map(list(range(self.size)), [-1] * self.size)
        self.checkpoints.fill_(-1)
        super().clear()

    def mamba_slot(self, row: int) -> int:
        """The slot of a row's states; -1: the row is free."""
        return self._slots[row]

    def keep_at(self, row: int, tokens: Sequence[int], slots: Sequence[int]) -> None:
        """States of a row's prompt on its way, for a prefix cache: of all layers, convolutions as well.

        The step in which the prompt passes ``tokens[i]`` writes its states then into ``slots[i]``, too. A decode step
        does not. What was named before is forgotten; so it is when the row is freed.

        Args:
            tokens: Multiples of 64, counted from the prompt's begin.
            slots: Of `mamba_pool`, with one holder each: the caller.

        Raises:
            ValueError: tokens that are no such multiple; a slot that is free or shared, or comes twice; too many.
        """
        if len(tokens) != len(slots) or len(slots) > self.max_checkpoints:
            raise ValueError(
                f"attnops: tokens and slots must have one place each, at most {self.max_checkpoints} "
                f"(max_checkpoints), got {len(tokens)} and {len(slots)}"
            )
        for count in tokens:
            if count < 1 or count % STATE_CHUNK:
                raise ValueError(f"attnops: tokens must be positive multiples of {STATE_CHUNK}, got {count}")
        for slot in slots:
            self.mamba_pool.check_writable(slot)
            if slot == self._slots[row] or list(slots).count(slot) > 1:
                raise ValueError(f"attnops: slot {slot} of MambaPool is given twice, or is the row's own")
        pairs = [*zip(tokens, slots, strict=True)] + [(-1, -1)] * (self.max_checkpoints - len(slots))
        given = torch.tensor(pairs, dtype=torch.int32).view(-1, 2)
        self.checkpoints[row] = given.to(self.device, non_blocking=True)

    def start_from(self, row: int, slot: int) -> None:
        """A request begins with a copy of another state, say of a prefix cache."""
        self.mamba_pool.copy_from([slot], [self._slots[row]])

    def _map(self, rows: Sequence[int], slots: Sequence[int]) -> None:
        for row, slot in zip(rows, slots, strict=True):
            self._slots[row] = slot
        index = torch.tensor([list(rows), list(slots)], dtype=torch.int64).to(self.device, non_blocking=True)
        self.req_index_to_mamba_index_mapping[index[0]] = index[1].to(torch.int32)


class HybridLinearKVPool(MHATokenToKVPool):
    """K and V of the full attention layers of a model that has linear ones, too.

    Args:
        size, page_size, dtype, head_num, head_dim, device, v_head_dim, layout: as of `MHATokenToKVPool`.
        full_attention_layer_ids: `layer_id` of the layers that attend, in the order of their memory.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        full_attention_layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        v_head_dim: int = -1,
        layout: str = "NHD",
    ) -> None:
        self._places = {layer: place for place, layer in enumerate(full_attention_layer_ids)}
        if len(self._places) != len(full_attention_layer_ids):
            raise ValueError(f"attnops: full_attention_layer_ids must differ, got {list(full_attention_layer_ids)}")
        super().__init__(
            size, page_size, dtype, head_num, head_dim, len(self._places), device, v_head_dim=v_head_dim, layout=layout
        )

    def _place_of(self, layer_id: int) -> int:
        if layer_id not in self._places:
            raise ValueError(
                f"attnops: layer_id must be one of {sorted(self._places)}, the layers that attend, got {layer_id}"
            )
        return self._places[layer_id]
