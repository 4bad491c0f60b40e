"""The backend of DeepSeek-V4: every mode and ratio, in any chunks, eager and captured, against float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attnops.backends import Machine, MultiStepDraftBackend, get_backend_class, select, select_backend
from attnops.backends.dsv4 import DeepseekV4AttnBackend
from attnops.graphs import GraphRunner, StaticInput
from attnops.layers import CompressedAttention, RadixAttention
from attnops.pools import DeepSeekV4TokenToKVPool, MLATokenToKVPool, ReqToTokenPool, SWATokenToKVPoolAllocator
from attnops.types import AttentionBatch, AttentionSpec, ForwardMode
from checks import MAX_RELATIVE_ERROR, relative_error
from compressed_model import DECODE, DRAFT_EXTEND, EXTEND, LIMITS, MIXED, VERIFY, Compressed, Recording, Server, spec_of
from graph_tape import GraphTape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPECS = {
    "bf16": spec_of(),
    "fp16_20_heads": spec_of(20, dtype=torch.float16),
    "page_256": spec_of(5, page_size=256, topk=16),
    "deterministic": spec_of(2, deterministic=True),
}


def server(spec=SPECS["bf16"], device="cpu", count=3, backend=Recording, limits=LIMITS, **options) -> Server:
    return Server(Compressed(spec, device, **options), backend(spec, limits, device), count)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_mode_in_any_chunks(spec, device):
    served = server(spec, device)
    served.step(EXTEND, {0: 5, 1: 130, 2: 1})
    served.step(EXTEND, {1: 170})
    served.step(MIXED, {0: 1, 2: 126, 1: 1})
    for _ in range(3):
        served.step(DECODE, {0: 1, 2: 1, 1: 1}, uniform=True)
    served.step(VERIFY, {1: 4, 0: 4}, uniform=True)
    served.reject(1, 3)
    served.reject(0, 1)
    served.step(DRAFT_EXTEND, {1: 2, 0: 2}, uniform=True)
    served.step(VERIFY, {1: 4, 2: 4}, uniform=True)
    served.reject(1, 2)
    served.step(DRAFT_EXTEND, {1: 1, 2: 3}, padding=3)
    served.step(EXTEND, {0: 120, 1: 0, 2: 200}, padding=40)
    served.step(DECODE, {0: 1, 2: 1, 1: 1}, uniform=True)


def fill_alone(spec, index: int, length: int, device="cpu", cuts=(), **options) -> tuple[Server, torch.Tensor]:
    """One request of the three, alone, in chunks that end at `cuts`; its output."""
    served = server(spec, device, **options)
    ends, outs = [*cuts, length], []
    for begin, end in zip([0, *ends], ends):
        outs.append(served.step(DECODE if end - begin == 1 else EXTEND, {index: end - begin}, uniform=end - begin == 1))
    return served, torch.cat(outs)


def entries_of(served: Server, index: int) -> list[torch.Tensor]:
    """Bytes of all that a request has in the pool: of window rows, entries and index keys."""
    pool, request = served.model.pool, served.live[index]
    size, slots, out = pool.page_size, torch.tensor(request.slots[: request.length]), []
    held = pool.slot_map.cpu()[slots].long()
    for layer, ratio in enumerate(pool.compress_ratios):
        kinds = [(pool.get_swa_buffer(layer), held[held >= 0], (576, 8))]
        if ratio:
            entries = slots[ratio - 1 :: ratio] // ratio
            kinds.append((pool.get_compressed_buffer(layer), entries, (576, 8)))
        if ratio == 4:
            kinds.append((pool.get_index_k_with_scale_buffer(layer), entries, (128, 4)))
        for pages, at, widths in kinds:
            count, whole, begin = pages.shape[1], pages.cpu().flatten(1), 0
            for width in widths:
                part = whole[:, begin : begin + count * width].unflatten(1, (count, width))
                out.append(part[at // count, at % count][:, : 7 if width == 8 else width])
                begin += count * width
    assert size == pool.page_size
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_decode_step_by_step_is_one_prefill(device):
    spec = spec_of(topk=200)  # all entries: near ties select others in other orders of a sum
    _, whole = fill_alone(spec, 1, 300, device)
    first, out = fill_alone(spec, 1, 300, device, cuts=[120, *range(121, 145), 250, 297, 298])
    assert relative_error(out, whole.double()) <= 0.7 * MAX_RELATIVE_ERROR[torch.bfloat16]
    second, _ = fill_alone(spec, 1, 300, device)
    for one, other in zip(entries_of(first, 1), entries_of(second, 1), strict=True):
        assert torch.equal(one, other), "rows and entries depend on how a prompt is cut"


@pytest.mark.parametrize("device", DEVICES)
def test_a_deterministic_request_has_the_same_bits_in_any_company(device):
    spec = SPECS["deterministic"]
    alone, other = server(spec, device), server(spec, device)
    alone.step(EXTEND, {1: 290})
    other.step(EXTEND, {0: 30, 1: 290, 2: 70})
    for _ in range(2):
        out = alone.step(DECODE, {1: 1}, uniform=True)
        among = other.step(DECODE, {2: 1, 1: 1, 0: 1}, uniform=True)
        assert torch.equal(out[0], among[1])
    assert torch.equal(alone.step(VERIFY, {1: 4}, uniform=True), other.step(VERIFY, {0: 4, 1: 4}, uniform=True)[4:])
    assert torch.equal(alone.step(EXTEND, {1: 20}), other.step(MIXED, {0: 1, 1: 20, 2: 9})[1:21])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", [spec_of(topk=24), spec_of(topk=24, deterministic=True)], ids=["balanced", "fixed"])
def test_a_long_ragged_step_goes_in_parts(spec, device, monkeypatch):
    from attnops.backends import compressed_steps

    monkeypatch.setattr(compressed_steps, "PART_TOKENS", 64)
    monkeypatch.setattr(compressed_steps, "INVARIANT_PART_TOKENS", 50)
    served = server(spec, device)
    served.step(EXTEND, {0: 70, 1: 200, 2: 3})
    served.step(EXTEND, {1: 150}, padding=20)
    served.step(MIXED, {0: 1, 2: 90, 1: 33}, padding=7)


@pytest.mark.parametrize("device", DEVICES)
def test_window_pages_are_given_back_while_entries_stay(device):
    served = server(device=device, window_pages=6)
    request = served.live[0]
    for _ in range(4):
        served.step(EXTEND, {0: 140})
        gone = (request.length - 128) // 128 * 128
        held = torch.tensor(request.slots[:gone], dtype=torch.int64)
        served.model.allocator.free_swa(held)
        pool = served.model.pool
        free = [page for page in range(6) if page not in set((pool.slot_map[pool.slot_map >= 0] // 128).tolist())]
        for layer in range(3):
            pool.get_swa_buffer(layer)[free] = 0xFF
    for _ in range(3):
        served.step(DECODE, {0: 1}, uniform=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prefix_of_whole_pages_is_shared_with_its_state(device):
    served = server(device=device, num_snapshots=2)
    model, first, second = served.model, served.live[0], served.live[1]
    served.step(EXTEND, {0: 256})
    snapshot = model.pool.snapshots.alloc(1)
    assert snapshot is not None
    model.pool.save_state(first.row, int(snapshot))
    served.step(EXTEND, {0: 77})
    prefix = torch.tensor(first.slots[:256])
    model.allocator.share(prefix)
    model.requests.write(second.row, 0, prefix)
    second.x[:256], second.slots, second.length = first.x[:256], prefix.tolist(), 256
    model.pool.load_state(int(snapshot), second.row)
    served.step(EXTEND, {1: 9, 2: 4})
    served.step(DECODE, {0: 1, 1: 1}, uniform=True)
    model.pool.snapshots.share(snapshot)
    with pytest.raises(ValueError, match=r"snapshot \d of the pool has 2 holders"):
        model.pool.save_state(first.row, int(snapshot))
    rows = model.pool.max_num_reqs
    for row in (-1, rows):  # the latter would be the first snapshot's slot
        with pytest.raises(ValueError, match=rf"row must be in \[0, {rows}\) of the pool, got {row}"):
            model.pool.load_state(int(snapshot), row)
    model.pool.snapshots.free(snapshot)
    model.pool.snapshots.free(snapshot)
    with pytest.raises(ValueError, match=r"snapshot \d of the pool has 0 holders"):
        model.pool.load_state(int(snapshot), second.row)


def test_idle_and_empty_steps():
    served = server()
    batch = served.batch(EXTEND, {}, False)
    served.backend.init_forward_metadata(batch)
    assert served.model(None, None, batch, served.x_of({0: 0})).shape == (0, 3, 3, 512)
    idle = served.batch(ForwardMode.IDLE, {0: 0}, False, padding=2)
    served.backend.init_forward_metadata(idle)
    out = served.model(None, None, idle, served.x_of({0: 0}, 2))
    assert out.shape == (2, 3, 3, 512) and not bool(out.any())


def runner_of(served: Server, mode: ForwardMode, tokens: int, device: str, ragged: bool = False) -> GraphRunner:
    model = served.model
    inputs = {"x": StaticInput((model.width,), torch.float32)}
    options = {"recorder": GraphTape} if device == "cpu" else {}
    layers = {layer.layer_id: layer for layer in model.layers}
    made = GraphRunner(
        model,
        served.backend,
        model.requests.req_to_token,
        model.pool,
        sizes=[1, 2, 4] if device == "cuda" else [2, 4],
        forward_mode=mode,
        tokens_per_request=tokens,
        ragged=ragged,
        inputs=inputs,
        layers=layers,
        **options,
    )
    made.capture(progress=False)
    return made


def replay(served: Server, runner: GraphRunner, new: dict[int, int], uniform: bool = True) -> torch.Tensor:
    batch = served.batch(runner.static.forward_mode, new, uniform)
    batch.max_seqlen_q = max(new.values())
    ids = torch.zeros(batch.num_tokens, dtype=torch.int64, device=served.model.device)
    return runner.replay(ids, batch, x=served.x_of(new)).clone()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bf16", "deterministic"])
def test_replays_of_decode_verify_and_draft_extend_equal_eager(name, device):
    spec = SPECS[name]
    captured, eager = server(spec, device, backend=DeepseekV4AttnBackend), server(spec, device)
    decode = runner_of(captured, DECODE, 1, device)
    verify = runner_of(captured, VERIFY, 4, device)
    extend = runner_of(captured, DRAFT_EXTEND, 3, device, ragged=True)
    for served in (captured, eager):
        served.step(EXTEND, {0: 125, 1: 3, 2: 251}, judged=served is eager)
    # On a GPU 200 replays and more, of all batch sizes; the CPU's tape takes long.
    orders = [{0: 1, 1: 1, 2: 1}, {2: 1, 0: 1}, {1: 1}, {2: 1, 1: 1}]
    for turn in range(70 if device == "cuda" else 2):
        judged = {"judged": turn % 23 == 0}
        new = orders[turn % 4]
        assert torch.equal(replay(captured, decode, new), eager.step(DECODE, new, uniform=True, **judged))
        new = {index: 4 for index in orders[(turn + 1) % 4]}
        assert torch.equal(replay(captured, verify, new), eager.step(VERIFY, new, uniform=True, **judged))
        for index in new:
            for served in (captured, eager):
                served.reject(index, 1 + (turn + index) % 3)
        new = {1: 1 + turn % 3, 2: 2}
        got = replay(captured, extend, new, uniform=False)[: sum(new.values())]
        assert torch.equal(got, eager.step(DRAFT_EXTEND, new, **judged))
        for served in (captured, eager):
            for index in (1, 2):  # so that lengths stay below the limit; three tokens at most, as states allow
                served.reject(index, min(3, new[index]))


def test_a_step_reads_no_value_on_the_host_and_a_replay_follows_its_memory():
    """Ragged prefill on the tape: what depends on lengths is recorded."""
    first, second = server(backend=DeepseekV4AttnBackend), server(backend=DeepseekV4AttnBackend)
    static = first.batch(EXTEND, {0: 40, 1: 150, 2: 6}, False, padding=10)
    x, tape = first.x_of({0: 40, 1: 150, 2: 6}, 10), GraphTape()
    first.backend.init_forward_metadata_out_graph(static, in_capture=True)
    with tape.capture():
        first.backend.init_forward_metadata_in_graph(static)
        out = first.model(None, None, static, x)
    for served in (first, second):
        for index in range(3):
            served.live[index].length, served.live[index].slots = 0, []
        served.model.allocator.clear()
    new = {0: 131, 2: 3, 1: 70}
    other, fresh = first.batch(EXTEND, new, False, padding=2), second.batch(EXTEND, new, False, padding=2)
    for name in ("req_pool_indices", "cache_seqlens", "out_cache_loc", "extend_seq_lens"):
        getattr(static, name).copy_(getattr(other, name))
    x.copy_(first.x_of(new, 2))
    first.backend.init_forward_metadata_out_graph(static)
    tape.replay()
    second.backend.init_forward_metadata(fresh)
    expected = second.model(None, None, fresh, second.x_of(new, 2))
    assert torch.equal(out, expected)


def test_selection_takes_it_for_its_models_alone():
    spec = SPECS["bf16"]
    assert select_backend(spec, LIMITS, device="cpu").name == "dsv4"
    assert get_backend_class("compressed") is get_backend_class("dsv4") is DeepseekV4AttnBackend
    for name in ("nsa", "fa3", "torch_native"):
        with pytest.raises(NotImplementedError, match=r"has no compressed entries \(compress_ratios\)"):
            get_backend_class(name)(spec, LIMITS)
    with pytest.raises(NotImplementedError, match="serves layers of compress_ratios alone"):
        DeepseekV4AttnBackend(AttentionSpec.mla(8, kv_dtype=torch.uint8), LIMITS)
    with pytest.raises(NotImplementedError, match="knows no compressed entries"):
        select(AttentionSpec.mla(8), attention_backend="fa3", model_kind="compressed")
    hopper = Machine(device="cuda", arch=90, has_cuda_kernels=True)
    for machine in (hopper, Machine(device="cpu")):
        picked = select(spec, machine, speculative=True)
        assert (picked.prefill, picked.decode) == ("dsv4", "dsv4")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"compress_ratios": (0, 5)}, "compress_ratios must be a tuple of 0, 4 and 128"),
        ({"compress_ratios": (128,)}, "sparse_topk belongs to compress_ratios of 4"),
        ({"page_size": 64}, r"page_size \(64\) must be a multiple of compress_ratios, 128 among them"),
        ({"sliding_window_size": -1}, "compress_ratios need sliding_window_size"),
        ({"kv_dtype": torch.bfloat16}, "compress_ratios need kv_dtype uint8"),
        ({"head_dim": 576}, "MLA has head_dim 512"),
    ],
    ids=str,
)
def test_wrong_models_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPECS["bf16"], **options)


def test_wrong_steps_are_named():
    served = server()
    model, backend = served.model, served.backend
    batch = served.batch(DECODE, {0: 1, 1: 1}, True)
    backend.init_forward_metadata(batch)
    zero, four, many = model.layers
    given = model.parts(served.x_of({0: 1, 1: 1}))[1]
    q, k = given.pop("q"), given.pop("k")
    for name in given:
        with pytest.raises(ValueError, match=f"layer 1 of ratio 4 needs {name}"):
            four(q, k, None, batch, **{**given, name: None})
    with pytest.raises(ValueError, match=r"index_q must be \[num_tokens, index heads, 128\], got \[2, 512\]"):
        four(q, k, None, batch, **{**given, "index_q": given["index_q"].flatten(1)})
    with pytest.raises(ValueError, match=r"kv_score\.shape\[0\] must be 2 \(num_tokens of the step\), got 1"):
        many(q, k, None, batch, kv_score=given["kv_score"][:1])
    with pytest.raises(RuntimeError, match=r"kv_score\.shape\[1\] must be 1024"):
        many(q, k, None, batch, kv_score=given["kv_score"][:, :7])
    with pytest.raises(ValueError, match=r"k must be \[num_tokens, 512\], got \[2, 500\]"):
        zero(q, k[:, :500], None, batch)
    with pytest.raises(ValueError, match="compress_ratio of layer 1 must be 4, as the pool has it, got 0"):
        CompressedAttention(3, 0.1, 1, 0)(q, k, None, batch)
    with pytest.raises(ValueError, match="sliding_window_size of layer 0 must be 127, as the backend has it, got 5"):
        CompressedAttention(3, 0.1, 0, 0, sliding_window_size=5)(q, k, None, batch)
    with pytest.raises(ValueError, match="serves CompressedAttention layers, got a RadixAttention"):
        RadixAttention(3, 512, 0.1, 1, 0)(q, k, None, batch)
    with pytest.raises(ValueError, match="compress_ratio 4 needs index_compressor"):
        CompressedAttention(3, 0.1, 0, 4, compressor=four.compressor)
    with pytest.raises(ValueError, match="compress_ratio 0 takes no compressor"):
        CompressedAttention(3, 0.1, 0, 0, compressor=four.compressor)
    with pytest.raises(ValueError, match="compress_ratio must be 0, 4 or 128, got 8"):
        CompressedAttention(3, 0.1, 0, 8)
    with pytest.raises(NotImplementedError, match="needs backend dsv4, the step has nsa"):
        batch.attn_backend = get_backend_class("nsa")(AttentionSpec.mla(8), LIMITS)
        zero(q, k, None, batch)
    batch.attn_backend = backend
    with pytest.raises(Exception, match=r"CompressedAttention runs outside torch\.compile"):
        torch.compile(lambda q: zero(q, k, None, batch), backend="eager", fullgraph=True)(q)
    with pytest.raises(ValueError, match="backend dsv4 takes no topk_indices: rows are key and value at once"):
        backend.forward(q, k, None, zero, batch, topk_indices=q)


def test_wrong_drafts_and_pools_are_named():
    served = server(max_draft_tokens=2)
    with pytest.raises(ValueError, match=r"3 drafts of a TARGET_VERIFY .* above max_draft_tokens = 2"):
        served.backend.init_forward_metadata(served.batch(VERIFY, {0: 4}, True))
    batch, rows = served.batch(VERIFY, {0: 2}, True), served.model.pool.max_num_reqs
    more = torch.zeros(rows + 1, LIMITS.max_seqlen, dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"req_to_token\.shape\[0\] must be at most {rows} .*, got {rows + 1}"):
        served.backend.init_forward_metadata(dataclasses.replace(batch, req_to_token=more))
    batch = served.batch(VERIFY, {0: 3}, True)
    batch.tree_mask = torch.zeros(1, 3, 1, dtype=torch.uint8)
    with pytest.raises(NotImplementedError, match="serves no trees of drafts"):
        served.backend.init_forward_metadata(batch)
    batch.tree_mask = None
    batch.token_to_kv_pool = MLATokenToKVPool(256, 128, torch.bfloat16, 3)
    with pytest.raises(ValueError, match="the pool must be a DeepSeekV4TokenToKVPool, got MLATokenToKVPool"):
        served.backend.init_forward_metadata(batch)
    with pytest.raises(NotImplementedError, match="tokens of a DeepSeekV4TokenToKVPool cannot be moved"):
        served.model.pool.all_buffers()
    with pytest.raises(NotImplementedError, match="branches of a draft loop have no states"):
        MultiStepDraftBackend(DeepseekV4AttnBackend, SPECS["bf16"], LIMITS, topk=1, draft_steps=2)
    dense = get_backend_class("fa3")(AttentionSpec.mla(8, page_size=128), LIMITS)
    batch = dataclasses.replace(batch, token_to_kv_pool=served.model.pool)
    with pytest.raises(ValueError, match="the pool is a DeepSeekV4TokenToKVPool, and the model has no compress_ratios"):
        dense.init_forward_metadata(batch)


def test_a_draft_loop_of_ratio_0_equals_a_verify_step():
    torch.manual_seed(3)
    spec = AttentionSpec.deepseek_v4(2, [0], page_size=32, sliding_window_size=20)
    pool = DeepSeekV4TokenToKVPool(512, 512, 32, [0], 4)
    allocator, requests = SWATokenToKVPoolAllocator(pool), ReqToTokenPool(4, 256)
    layer, rows = CompressedAttention(2, 0.05, 0, 0, sliding_window_size=20, sinks=torch.zeros(2)), requests.alloc(2)
    lengths, drafts = [70, 9], 3
    slots = [allocator.alloc(length + drafts) for length in lengths]
    for row, mine in zip(rows, slots):
        requests.write(row, 0, mine)
    shared = {"req_to_token": requests.req_to_token, "token_to_kv_pool": pool, "req_pool_indices": torch.tensor(rows)}
    ints = lambda values: torch.tensor(values, dtype=torch.int32)  # noqa: E731

    def rows_of(count):
        return torch.randn(count, 2, 512).bfloat16(), torch.randn(count, 512).bfloat16()

    plain = DeepseekV4AttnBackend(spec, LIMITS)
    prompt = AttentionBatch(
        forward_mode=EXTEND,
        cache_seqlens=ints(lengths),
        num_tokens=sum(lengths),
        extend_seq_lens=ints(lengths),
        out_cache_loc=torch.cat([mine[:length] for mine, length in zip(slots, lengths)]),
        attn_backend=plain,
        **shared,
    )
    plain.init_forward_metadata(prompt)
    layer(*rows_of(sum(lengths)), None, prompt)
    tokens = [rows_of(2) for _ in range(drafts - 1)]  # of both requests, step by step
    loop = MultiStepDraftBackend(DeepseekV4AttnBackend, spec, LIMITS, topk=1, draft_steps=drafts)
    first = torch.stack([mine[length] for mine, length in zip(slots, lengths)])
    longer = ints([length + 1 for length in lengths])
    batch = AttentionBatch(forward_mode=DECODE, cache_seqlens=longer, num_tokens=2, out_cache_loc=first, **shared)
    loop.init_forward_metadata(batch)
    outs = [loop.forward(q, k, None, layer, loop.step(index)) for index, (q, k) in enumerate(tokens)]
    verify = AttentionBatch(
        forward_mode=VERIFY,
        cache_seqlens=ints([length + 2 for length in lengths]),
        num_tokens=4,
        tokens_per_request=2,
        out_cache_loc=torch.cat([mine[length : length + 2] for mine, length in zip(slots, lengths)]),
        attn_backend=plain,
        **shared,
    )
    plain.init_forward_metadata(verify)
    q, k = (torch.stack([step[part] for step in tokens], 1).flatten(0, 1) for part in (0, 1))
    assert relative_error(torch.stack(outs, 1).flatten(0, 1), layer(q, k, None, verify).double()) <= 3e-3
