"""One graph of each op of linear attention, replayed with other slots and lengths: the bits of eager calls.

On the CPU a tape stands for the graph.
"""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.reference import pack_tree_mask
from graph_tape import GraphTape

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BATCH, TOKENS, SLOTS, H, HV, K, V = 5, 320, 24, 1, 2, 128, 64
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """Rings that nobody has written hold NaN."""
    return tensor.view(WORDS[tensor.element_size()])


class Call:
    """Tensors of one graph: inputs that a draw overwrites, and what the calls write.

    Args:
        draw: Overwrites `given` by a random source; reads nothing of a device.
        run: The calls, over `given` and `written`.
    """

    def __init__(self, device):
        self.device, self.given, self.written = device, {}, {}

    def normal(self, name, *shape, dtype=torch.bfloat16):
        self.given[name] = torch.randn(*shape).to(self.device, dtype)

    def ints(self, name, *shape):
        self.given[name] = torch.zeros(*shape, dtype=torch.int32, device=self.device)

    def keep(self, name, *shape, dtype=torch.float32):
        self.written[name] = torch.randn(*shape).to(self.device, dtype)

    def put(self, name, values):
        given = self.given[name]
        given.copy_(torch.as_tensor(values).to(given.dtype).view(given.shape))

    def fresh(self, r, *names):
        """Other numbers."""
        for name in names:
            given = self.given[name]
            generator = torch.Generator().manual_seed(r.randrange(2**31))
            given.copy_(torch.randn(given.shape, generator=generator))

    def check(self, draw, run, replays=25):
        r = random.Random(0)
        draw(r)
        run()  # kernels are chosen and loaded
        recorder = GraphTape() if self.device == "cpu" else None
        if recorder is None:
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            before = {name: tensor.clone() for name, tensor in self.written.items()}
            with torch.cuda.graph(graph):
                run()
        else:
            before = {name: tensor.clone() for name, tensor in self.written.items()}
            with recorder.capture():
                run()
            graph = recorder
        for name, tensor in self.written.items():
            tensor.copy_(before[name])
        changed = False
        for _ in range(replays):
            draw(r)
            before = {name: tensor.clone() for name, tensor in self.written.items()}
            graph.replay()
            replayed = {name: tensor.clone() for name, tensor in self.written.items()}
            for name, tensor in self.written.items():
                tensor.copy_(before[name])
            run()
            for name, tensor in self.written.items():
                assert torch.equal(bits(tensor), bits(replayed[name])), name
                changed = changed or not torch.equal(bits(tensor), bits(before[name]))
        assert changed


def slots_of(r, batch=BATCH):
    return [slot if r.random() < 0.85 else -1 for slot in r.sample(range(SLOTS), batch)]


def gates(call, kind):
    call.normal("rate", HV, dtype=torch.float32)
    call.normal("bias", *((HV, K) if kind == "kda" else (HV,)), dtype=torch.float32)


def tokens(call, kind, count):
    """q, k, v, a and b; of a state space C, B, x and dt."""
    call.normal("q", count, H, K)
    call.normal("k", count, H, K)
    call.normal("v", count, HV, V)
    call.normal("a", count, *((HV, K) if kind == "kda" else (HV,)))
    call.normal("b", count, HV)


def recurrence(call, form, kind, **options):
    given, options = call.given, {"states": call.written["states"], "out": call.written["out"], **options}
    if kind in ("ssd", "lightning"):
        dt = None if kind == "lightning" else given["a"]
        options |= {} if dt is None else {"dt_bias": given["bias"], "D": given["rate"], "dt_softplus": True}
        op = getattr(ops, f"ssd_{form}")
        return op(given["v"], dt, -given["rate"].abs(), given["k"], given["q"], **options)
    options |= {"A_log": given["rate"], "dt_bias": given["bias"]}
    return getattr(ops, f"delta_{form}")(*(given[name] for name in "qkvab"), **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
def test_decode(kind, device):
    call = Call(device)
    gates(call, kind)
    tokens(call, kind, BATCH)
    call.ints("slots", BATCH)
    call.ints("to", BATCH)
    call.keep("states", SLOTS, HV, V, K)
    call.keep("out", BATCH, HV, V, dtype=torch.bfloat16)

    def draw(r):
        chosen = r.sample(range(SLOTS), 2 * BATCH)
        call.put("slots", [slot if r.random() < 0.85 else -1 for slot in chosen[:BATCH]])
        call.put("to", [r.choice([own, other, -1]) for own, other in zip(chosen[:BATCH], chosen[BATCH:])])
        call.fresh(r, "q", "v", "a")

    call.check(
        draw,
        lambda: recurrence(call, "decode", kind, state_indices=call.given["slots"], out_state_indices=call.given["to"]),
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd", "lightning"])
def test_prompts(kind, device):
    """With their plan, prefixes and checkpoints. Some requests have no token, some tokens no request."""
    call = Call(device)
    gates(call, kind)
    tokens(call, kind, TOKENS)
    for name in ("slots", "prefix"):
        call.ints(name, BATCH)
    call.ints("bounds", BATCH + 1)
    call.ints("plan", BATCH)
    call.ints("cells", BATCH, 3)
    call.keep("states", SLOTS, HV, V, K)
    call.keep("out", TOKENS, HV, V, dtype=torch.bfloat16)

    def draw(r):
        cuts = sorted(r.randint(0, TOKENS) for _ in range(BATCH + 1))
        if r.random() < 0.3:
            cuts[2] = cuts[1]
        call.put("bounds", cuts)
        call.put("prefix", [r.choice([0, 0, 64, 100, 128]) for _ in range(BATCH)])
        chosen = r.sample(range(SLOTS), BATCH + 15)
        call.put("slots", [slot if r.random() < 0.85 else -1 for slot in chosen[:BATCH]])
        call.put("cells", [slot if r.random() < 0.6 else -1 for slot in chosen[BATCH:]])
        call.fresh(r, "q", "v", "a")

    def run():
        given = call.given
        plan = ops.ssd_plan if kind in ("ssd", "lightning") else ops.delta_plan
        options = {"cu_seqlens": given["bounds"], "prefix_lens": given["prefix"], "checkpoint_slots": given["cells"]}
        options |= {"state_indices": given["slots"], "plan": plan(given["bounds"], plan=given["plan"])}
        recurrence(call, "prefill", kind, **options)

    call.check(draw, run, replays=12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_drafts_and_commits(kind, tree, device):
    """A verification and its commit in one graph: rings of any length, which are folded when they are full."""
    drafts, rows = 4, 9
    call = Call(device)
    gates(call, kind)
    tokens(call, kind, BATCH * drafts)
    for name in ("slots", "length"):
        call.ints(name, BATCH)
    call.ints("path", BATCH, drafts)
    call.given["tree_mask"] = torch.zeros(BATCH, drafts, 1, dtype=torch.uint8, device=device)
    call.keep("states", SLOTS, HV, V, K)
    call.keep("out", BATCH * drafts, HV, V, dtype=torch.bfloat16)
    call.keep("ring_u", SLOTS, HV, rows, V)
    call.keep("ring_k", SLOTS, H, rows, K)
    call.keep("ring_decay", SLOTS, HV, rows, *([K] if kind == "kda" else []))
    call.written["ring_len"] = torch.zeros(SLOTS, dtype=torch.int32, device=device)

    def draw(r):
        call.put("slots", slots_of(r))
        parents = [[r.randrange(-1, t) if tree else t - 1 for t in range(drafts)] for _ in range(BATCH)]
        sees, paths = torch.zeros(BATCH, drafts, drafts, dtype=torch.bool), []
        for i, own in enumerate(parents):
            for t in range(drafts):
                sees[i, t, t] = True
                if own[t] >= 0:
                    sees[i, t] |= sees[i, own[t]]
            paths.append(sees[i, r.randrange(drafts)].nonzero().flatten().tolist() if r.random() < 0.8 else [])
        call.put("tree_mask", pack_tree_mask(sees))
        call.put("path", [(path + [0] * drafts)[:drafts] for path in paths])
        call.put("length", [len(path) for path in paths])
        call.fresh(r, "q", "v", "a")

    def run():
        given, ring = call.given, {name: call.written[name] for name in call.written if name.startswith("ring")}
        mask = given["tree_mask"] if tree else None
        recurrence(call, "verify", kind, state_indices=given["slots"], tree_mask=mask, **ring)
        commit = ops.ssd_commit if kind == "ssd" else ops.delta_commit
        commit(call.written["states"], given["path"], given["length"], state_indices=given["slots"], **ring)

    call.check(draw, run)
    assert call.written["ring_len"].max() > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("update", [False, True], ids=["ragged", "update"])
def test_convolutions(update, device):
    channels, count = 96, 12 * BATCH
    call = Call(device)
    call.normal("x", count, channels)
    call.normal("weight", channels, 4)
    call.normal("bias", channels)
    call.ints("slots", BATCH)
    call.ints("bounds", BATCH + 1)
    call.given["has"] = torch.zeros(BATCH, dtype=torch.uint8, device=device)
    call.keep("conv_states", SLOTS, channels, 3, dtype=torch.bfloat16)
    call.keep("out", count, channels, dtype=torch.bfloat16)

    def draw(r):
        call.put("slots", slots_of(r))
        call.put("bounds", sorted(r.randint(0, count) for _ in range(BATCH + 1)))
        call.put("has", [r.randint(0, 1) for _ in range(BATCH)])
        call.fresh(r, "x")

    def run():
        given, options = call.given, {**call.written, "state_indices": call.given["slots"]}
        if update:
            return ops.causal_conv1d_update(given["x"], given["weight"], given["bias"], **options)
        options |= {"cu_seqlens": given["bounds"], "has_initial_state": given["has"]}
        return ops.causal_conv1d(given["x"], given["weight"], given["bias"], **options)

    call.check(draw, run)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_convolutions_of_drafts_and_their_commits(tree, device):
    channels, drafts = 96, 4
    call = Call(device)
    call.normal("x", drafts * BATCH, channels)
    call.normal("weight", channels, 4)
    for name in ("slots", "kept"):
        call.ints(name, BATCH)
    call.given["tree_mask"] = torch.zeros(BATCH, drafts, 1, dtype=torch.uint8, device=device)
    call.keep("conv_states", SLOTS, channels, 3, dtype=torch.bfloat16)
    call.keep("windows", BATCH, drafts, channels, 3, dtype=torch.bfloat16)
    call.keep("out", drafts * BATCH, channels, dtype=torch.bfloat16)

    def draw(r):
        call.put("slots", slots_of(r))
        call.put("kept", [r.choice([-1, *range(i * drafts, (i + 1) * drafts)]) for i in range(BATCH)])
        call.put("tree_mask", [r.randrange(256) for _ in range(BATCH * drafts)])
        call.fresh(r, "x")

    def run():
        given, written = call.given, call.written
        options = {**written, "tree_mask": given["tree_mask"] if tree else None, "state_indices": given["slots"]}
        ops.causal_conv1d_update(given["x"], given["weight"], None, **options)
        source = written["windows"].flatten(0, 1)[None]
        ops.copy_states(written["conv_states"][None], given["kept"], given["slots"], source=source)

    call.check(draw, run)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["gdn", "kda", "ssd"])
def test_a_convolution_in_front(kind, device):
    call, channels = Call(device), 2 * H * K + HV * V
    gates(call, kind)
    tokens(call, kind, BATCH)
    call.normal("x", BATCH, channels)
    call.normal("weight", channels, 4)
    call.ints("slots", BATCH)
    call.keep("states", SLOTS, HV, V, K)
    call.keep("conv_states", SLOTS, channels, 3, dtype=torch.bfloat16)
    call.keep("out", BATCH, HV, V, dtype=torch.bfloat16)

    def draw(r):
        call.put("slots", slots_of(r))
        call.fresh(r, "x", "a")

    def run():
        given, options = call.given, {"state_indices": call.given["slots"], **call.written}
        x = given["x"], given["weight"], None, given["a"]
        if kind == "ssd":
            ops.ssd_conv_decode(*x, given["rate"], num_groups=H, dt_softplus=True, **options)
        else:
            options |= {"A_log": given["rate"], "dt_bias": given["bias"]}
            ops.delta_conv_decode(*x, given["b"], num_k_heads=H, **options)

    call.check(draw, run)


@pytest.mark.parametrize("device", DEVICES)
def test_moves_and_clears(device):
    call = Call(device)
    for name in ("src", "dst", "gone"):
        call.ints(name, BATCH)
    call.keep("states", 3, SLOTS, HV, V, 8)

    def draw(r):
        chosen = r.sample(range(SLOTS), 2 * BATCH)
        call.put("src", [slot if r.random() < 0.85 else -1 for slot in chosen[:BATCH]])
        call.put("dst", chosen[BATCH:])
        call.put("gone", slots_of(r))

    def run():
        ops.copy_states(call.written["states"], call.given["src"], call.given["dst"])
        ops.clear_states(call.written["states"], call.given["gone"])

    call.check(draw, run, replays=8)
