"""Trees of drafts and their judgement, against walks over parents."""

from __future__ import annotations

import random

import pytest
import torch
from attnops import ops
from attnops.compat import sgl_kernel
from attnops.ops.speculation import DraftTree, TreeMaskMode, Verified
from attnops.report import first_fault, new_report
from draft_trees import draw_tree, expected_tree, greedy_path, most_candidates, stack, unpack

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def draw_trees(seed: int, batch: int):
    rng = random.Random(seed)
    topk, steps = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 5])
    nodes = rng.randint(1, min(most_candidates(topk, steps) + 1, rng.choice([2, 9, 16, 64, 200])))
    vocabulary = rng.choice([3, 40])
    return topk, steps, [draw_tree(rng, topk, steps, nodes, vocabulary) for _ in range(batch)]


def build(trees, topk, device, dtype=torch.int64, **options):
    return ops.build_draft_tree(**stack(trees, device, dtype), topk=topk, **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_trees_are_those_of_a_walk_over_parents(seed, device):
    topk, _, trees = draw_trees(seed, [1, 3, 70][seed % 3])
    report = new_report(device) if seed % 2 else None
    tree = build(trees, topk, device, [torch.int64, torch.int32][seed % 2], report=report)
    expected = expected_tree(trees)
    assert unpack(tree.tree_mask).tolist() == expected["mask"]
    assert tree.positions.tolist() == expected["positions"]
    assert tree.tokens.tolist() == expected["tokens"]
    for name in ("retrieve_index", "next_token", "next_sibling"):
        got = getattr(tree, name if name == "retrieve_index" else f"retrieve_{name}")
        assert got.tolist() == expected[name], name
    assert report is None or first_fault(report) is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(40))
def test_greedy_paths_are_those_of_a_walk(seed, device):
    topk, steps, trees = draw_trees(seed, [1, 5, 70][seed % 3])
    rng = random.Random(seed)
    nodes = len(trees[0].parents)
    target = [[rng.choice([*tree.tokens, 99]) for _ in range(nodes)] for tree in trees]
    for tree, row in zip(trees, target):  # most predict a child
        for node in range(nodes):
            children = tree.children(node)
            if children and rng.random() < 0.8:
                row[node] = tree.tokens[rng.choice(children)]
    length = rng.choice([1, 2, steps + 1, steps + 3])
    tree = build(trees, topk, device)
    flat = torch.tensor(target, device=device, dtype=rng.choice([torch.int32, torch.int64])).flatten()
    out = ops.verify_tree_greedy(tree.tokens.view(len(trees), nodes), *tree[2:5], flat, length)
    for b, walked in enumerate(trees):
        path = greedy_path(walked, target[b], length)
        rows = [b * nodes + node for node in path]
        assert out.accept_index[b].tolist() == rows + [-1] * (length - len(rows))
        assert out.accept_token_num[b] == len(path) - 1
        predicts = [target[b][node] if node in path else 0 for node in range(nodes)]
        assert out.predicts[b * nodes : (b + 1) * nodes].tolist() == predicts


@pytest.mark.parametrize("device", DEVICES)
def test_empty_batches(device):
    tree = build([], 2, device)
    assert tree.tree_mask.shape == (0, 4, 1)
    probs = torch.zeros(0, 4, 9, device=device)
    uniform = torch.zeros(0, 4, device=device)
    candidates = tree.tokens.view(0, 4)
    assert ops.verify_tree_greedy(candidates, *tree[2:5], tree.tokens, 3).accept_index.shape == (0, 3)
    out = ops.verify_tree_sampling(candidates, *tree[2:5], uniform, uniform[:, 0].contiguous(), probs, 3)
    assert out.accept_token_num.shape == (0,)


def small_tree(device, batch=1):
    """Root, children 1 (token 3) and 2 (token 5), and child 3 (token 1) of 1."""
    lens = torch.full((batch,), 9, dtype=torch.int32, device=device)
    chosen = torch.tensor([[0, 1, 2]], device=device).repeat(batch, 1)
    groups = torch.tensor([[-1, 0, 1]], device=device).repeat(batch, 1)
    drafts = torch.tensor([[3, 5, 1]], device=device).repeat(batch, 1)
    bonus = torch.full((batch,), 7, device=device)
    return ops.build_draft_tree(groups, chosen, lens, 2, draft_tokens=drafts, bonus_tokens=bonus)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("draft_probs", [False, True])
def test_what_is_sampled_follows_the_target(device, draft_probs):
    """20,000 draws of the first token, and of the second behind the child of token 3: chi-square of a fixed seed."""
    draws, vocabulary = 20_000, 8
    generator = torch.Generator().manual_seed(3)
    target = torch.rand(4, vocabulary, generator=generator) + 0.05
    target /= target.sum(-1, keepdim=True)
    tree = small_tree(device, draws)
    probs = target.to(device).expand(draws, 4, vocabulary).contiguous()
    uniform = torch.rand(draws, 4, generator=generator).to(device)
    final = torch.rand(draws, generator=generator).to(device)
    drafts = {"draft_probs": torch.zeros_like(probs)} if draft_probs else {}
    out = ops.verify_tree_sampling(tree.tokens.view(draws, 4), *tree[2:5], uniform, final, probs, 3, **drafts)
    first = out.predicts.view(draws, 4)[:, 0].cpu()
    behind = out.predicts.view(draws, 4)[:, 1].cpu()[first == 3]
    for sampled, expected in ((first, target[0]), (behind, target[1])):
        counts = torch.bincount(sampled, minlength=vocabulary).double()
        means = expected.double() * len(sampled)
        chi_square = ((counts - means).square() / means).sum()
        assert len(sampled) > 500
        assert chi_square < 24.3, f"chi-square {chi_square:.1f} of 7 degrees of freedom: one run of a thousand"


def walk_sampled(tree, uniform, final, probs, length, single, acc):
    """(path, tokens) of one request, in float64."""
    path, node, tokens = [0], 0, []
    rejected: list[int] = []
    while len(path) < length:
        rejected, mass, taken = [], 0.0, -1
        for child in tree.children(node):
            token = tree.tokens[child]
            if token in rejected:
                continue
            mass += float(probs[node, token])
            if float(uniform[node]) < mass / acc or float(probs[node, token]) >= single:
                taken = child
                break
            rejected.append(token)
        if taken < 0:
            break
        tokens.append(tree.tokens[taken])
        node, rejected = taken, []
        path.append(node)
    rest = probs[node].double().clone()
    rest[rejected] = 0
    total = rest.cumsum(0)
    past = (total > float(final) * total[-1]).nonzero().flatten().tolist()
    past = [token for token in past if rest[token] > 0]
    return path, [*tokens, past[0] if past else int(probs[node].argmax())]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(30))
def test_sampled_paths_are_those_of_a_walk(seed, device):
    topk, steps, trees = draw_trees(seed, [1, 4][seed % 2])
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes, batch = len(trees[0].parents), len(trees)
    vocabulary = rng.choice([40, 1000, 33_000 if nodes < 20 else 1025])
    logits = torch.randn(batch, nodes, vocabulary, generator=generator) * 3
    for b, walked in enumerate(trees):
        for node, parent in enumerate(walked.parents[1:], 1):
            logits[b, parent, walked.tokens[node]] += 8
    probs = logits.softmax(-1)
    uniform, final = torch.rand(batch, nodes, generator=generator), torch.rand(batch, generator=generator)
    single, acc = rng.choice([(1.0, 1.0), (0.3, 1.0), (1.0, 0.5)])
    tree = build(trees, topk, device)
    out = ops.verify_tree_sampling(
        tree.tokens.view(batch, nodes),
        *tree[2:5],
        *(x.to(device) for x in (uniform, final, probs)),
        steps + 1,
        threshold_single=single,
        threshold_acc=acc,
    )
    for b, walked in enumerate(trees):
        path, tokens = walk_sampled(walked, uniform[b], final[b], probs[b], steps + 1, single, acc)
        rows = [b * nodes + node for node in path]
        assert out.accept_index[b].tolist() == rows + [-1] * (steps + 1 - len(rows))
        assert out.predicts.cpu()[rows].tolist() == tokens
        assert out.accept_token_num[b] == len(path) - 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_token_comes_out_whatever_the_probabilities_are(device):
    tree = small_tree(device, 5)
    probs = torch.zeros(5, 4, 8, device=device)
    probs[1] = float("nan")
    probs[2, :, 6] = -1
    probs[3, :, 4] = float("inf")
    probs[4, 0, 3], probs[4, 0, 5] = 0.6, 0.4  # all in rejected children
    uniform = torch.full((5, 4), 0.999, device=device)
    uniform[4] = 1.5
    report = new_report(device)
    final = torch.tensor([0.0, 0.5, float("nan"), 2.0, 0.1], device=device)
    out = ops.verify_tree_sampling(tree.tokens.view(5, 4), *tree[2:5], uniform, final, probs, 3, report=report)
    assert out.predicts.view(5, 4)[:, 0].tolist() == [0, 0, 0, 0, 3]
    assert out.accept_token_num.tolist() == [0] * 5
    assert "attnops::verify_tree_sampling: probability of token" in first_fault(report)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", TreeMaskMode)
@pytest.mark.parametrize("nodes", [1, 7, 8, 17, 32, 60])
def test_masks_of_sglang_become_ours(mode, nodes, device):
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and nodes > 32:
        return
    generator = torch.Generator().manual_seed(nodes)
    seen = torch.rand(3, nodes, nodes, generator=generator) < 0.5
    indptr = None
    if mode == TreeMaskMode.FULL_MASK:
        prefixes = [5, 0, 13]
        parts = [torch.cat([torch.ones(nodes, p).bool(), seen[b]], 1).flatten() for b, p in enumerate(prefixes)]
        flat = torch.cat([torch.zeros(2).bool(), *parts])
        indptr = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).to(device) + 2
    elif mode == TreeMaskMode.QLEN_ONLY:
        flat = seen.flatten()
    else:
        item = 4 if nodes > 16 else 2 if nodes > 8 else 1
        weights = 1 << torch.arange(8)
        wide = torch.zeros(3, nodes, item * 8)
        wide[..., :nodes] = seen
        flat = (wide.unflatten(-1, (item, 8)) * weights).sum(-1).to(torch.uint8).flatten()
        flat[-1] |= 128 if nodes % 8 else 0  # bits beyond the tree say nothing
    report = new_report(device)
    packed = ops.pack_tree_mask(flat.to(device), nodes, mode, mask_indptr=indptr, report=report)
    assert torch.equal(unpack(packed), seen)
    assert first_fault(report) is None


@pytest.mark.parametrize("device", DEVICES)
def test_a_mask_that_hides_the_prefix_is_a_fault(device):
    mask = torch.ones(2, 3, 7, dtype=torch.bool, device=device)
    mask[1, 2, 3] = False
    mask = mask.flatten()
    indptr = torch.tensor([0, 21, 42], device=device)
    report = new_report(device)
    packed = ops.pack_tree_mask(mask, 3, mask_indptr=indptr, report=report)
    assert (packed == 7).all()
    assert "mask bit of prefix key 3 at request 1, position 2, must be 1" in first_fault(report)
    for bounds in ([0, 21, 41], [0, 6, 42], [-3, 21, 42], [0, 21, 2**40]):
        report = new_report(device)
        ops.pack_tree_mask(mask, 3, mask_indptr=torch.tensor(bounds, device=device), report=report)
        assert "pack_tree_mask: mask bytes" in first_fault(report)


HOSTILE_TREES = [
    ([[0, 4, 1]], "parent -1 at request 0, position 2", "got -1 (none of the tree)"),  # it hangs on 9
    ([[2, 0, 1]], "parent 2 at request 0, position 1", "draft 1: its parent must be one of the nodes before it"),
    ([[0, -5, 1]], "parent -1 at request 0, position 2", "draft 2"),
    ([[0, 1, 2**40]], "parent -1 at request 0, position 3", "draft 3"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chosen, told, error", HOSTILE_TREES)
def test_a_parent_that_does_not_stand_before_its_child(chosen, told, error, device):
    groups = torch.tensor([[-1, 0, 9]], device=device)
    given = (groups, torch.tensor(chosen, device=device), torch.tensor([4], dtype=torch.int32, device=device), 2)
    report = new_report(device)
    tree = ops.build_draft_tree(*given, report=report)
    node = int(told.split()[-1])
    assert told in first_fault(report) and f"must be in [0, {node})" in first_fault(report)
    assert unpack(tree.tree_mask)[0, node].nonzero().flatten().tolist() == [node]
    assert node not in tree.retrieve_next_token[0].tolist() + tree.retrieve_next_sibling[0].tolist()
    if device == "cpu":
        with pytest.raises(RuntimeError, match="attnops::build_draft_tree: top_scores_index, request 0") as raised:
            ops.build_draft_tree(*given)
        assert error in str(raised.value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("retrieve_next_token", 4, "child or sibling 4 at request 0, position 0"),
        ("retrieve_next_token", 2**50, "child or sibling"),
        ("retrieve_next_sibling", 1, "child or sibling"),  # a circle
        ("retrieve_index", 4, "row of the tree"),
        ("retrieve_index", -3, "row of the tree"),
    ],
)
def test_links_that_lead_nowhere(name, value, told, device):
    tree = small_tree(device)
    links = {key: getattr(tree, key).clone() for key in DraftTree._fields[2:5]}
    links[name][0, 0 if name == "retrieve_next_token" else 1] = value
    report = new_report(device)
    target = torch.full((4,), 77, device=device)
    out = ops.verify_tree_greedy(tree.tokens.view(1, 4), **links, target_predict=target, report=report)
    assert told in first_fault(report)
    assert out.accept_index.tolist() == [[0, -1, -1, -1]] and out.predicts[0] == 77
    if device == "cpu":
        with pytest.raises(RuntimeError, match=f"verify_tree_greedy: {'retrieve_'}.*request 0, node"):
            ops.verify_tree_greedy(tree.tokens.view(1, 4), **links, target_predict=target)


@pytest.mark.parametrize("device", DEVICES)
def test_schemas_fakes_and_mutation(device):
    tree = small_tree(device, 2)
    given = stack([draw_tree(random.Random(1), 2, 2, 4) for _ in range(2)], device)
    order = ("parent_list", "top_scores_index", "draft_tokens", "bonus_tokens", "cache_seqlens")
    out = DraftTree.allocate(2, 4, device)
    torch.library.opcheck(torch.ops.attnops.build_draft_tree.default, (*out, *(given[name] for name in order), 2))
    verified = Verified.allocate(2, 4, 3, device)
    judged = (*verified, tree.tokens.view(2, 4), *tree[2:5])
    torch.library.opcheck(torch.ops.attnops.verify_tree_greedy.default, (*judged, tree.tokens))
    floats = [torch.rand(shape, device=device) for shape in ((2, 4), (2,), (2, 4, 9))]
    torch.library.opcheck(torch.ops.attnops.verify_tree_sampling.default, (*judged, *floats))
    mask = torch.ones(2 * 16, dtype=torch.uint8, device=device)
    torch.library.opcheck(torch.ops.attnops.pack_tree_mask.default, (out.tree_mask, mask, 1))


ERRORS = [
    ("build_draft_tree", {"topk": 0}, r"topk must be in \[1, "),
    (
        "build_draft_tree",
        {"top_scores_index": torch.zeros(2, 1024).long()},
        "top_scores_index must make trees of 1 to 1024 tokens",
    ),
    ("build_draft_tree", {"bonus_tokens": None}, "tokens, draft_tokens and bonus_tokens must be given together"),
    ("build_draft_tree", {"cache_seqlens": torch.zeros(2).long()}, "cache_seqlens must have dtype int32, got int64"),
    ("verify_tree_greedy", {"target_predict": torch.zeros(7).long()}, r"target_predict\.shape\[0\].* must be 8"),
    ("verify_tree_greedy", {"candidates": torch.zeros(2, 5).long()}, r"retrieve_index\.shape\[1\].* must be 5"),
    ("verify_tree_sampling", {"threshold_acc": 0.0}, r"threshold_acc must be in \(0, 1\], got 0"),
    ("verify_tree_sampling", {"threshold_single": float("nan")}, r"threshold_single must be in \[0, 1\], got nan"),
    ("verify_tree_sampling", {"target_probs": torch.zeros(2, 4, 0)}, r"target_probs.*must be at least 1"),
    ("pack_tree_mask", {"layout": 3}, r"layout must be in \[0, 2\]"),
    ("pack_tree_mask", {"mask_indptr": None}, "mask_indptr must be given in layout 0"),
]


@pytest.mark.parametrize("name, change, message", ERRORS)
def test_errors_name_the_argument(name, change, message):
    from right_calls import ops_calls

    function, given = ops_calls()[name]
    with pytest.raises(RuntimeError, match=f"attnops::{name}: {message}"):
        function(**{**given, **change})


@pytest.mark.parametrize("layout, nodes, count, whole", [(1, 4, 15, 16), (2, 9, 19, 18), (2, 4, 3, 4)])
def test_masks_hold_whole_trees(layout, nodes, count, whole):
    message = rf"mask.shape\[0\] must be a multiple of {whole}, as a tree of num_tokens {nodes} .* got {count}"
    with pytest.raises(ValueError, match=message):
        ops.pack_tree_mask(torch.zeros(count, dtype=torch.uint8), nodes, layout)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", TreeMaskMode)
def test_sglangs_names_and_masks(mode, device):
    rng = random.Random(5)
    trees = [draw_tree(rng, 4, 3, 12) for _ in range(3)]
    given, expected = stack(trees, device), expected_tree(trees)
    nodes = 12
    sizes = [3 * nodes * nodes, 3 * nodes * 2]
    size = sum(nodes * (tree.length + nodes) for tree in trees) if mode == 0 else sizes[mode - 1]
    mask = torch.ones(size, dtype=torch.uint8 if mode == 2 else torch.bool, device=device)
    links = [torch.full((3, nodes), -1, device=device) for _ in range(3)]
    positions = torch.empty(3 * nodes, dtype=torch.int64, device=device)
    lengths = given["cache_seqlens"].long()
    sgl_kernel.build_tree_kernel_efficient(
        given["parent_list"], given["top_scores_index"], lengths, mask, positions, *links, 4, 3, nodes, int(mode)
    )
    assert positions.tolist() == expected["positions"]
    assert [link.tolist() for link in links[1:]] == [expected["next_token"], expected["next_sibling"]]
    bounds = (nodes * (lengths + nodes)).cumsum(0)
    indptr = torch.cat([bounds.new_zeros(1), bounds]) if mode == 0 else None
    packed = ops.pack_tree_mask(mask, nodes, mode, mask_indptr=indptr, report=new_report(device))
    assert unpack(packed).tolist() == expected["mask"]
    tokens = torch.tensor(expected["tokens"], device=device)
    predicts, accepted, count = Verified.allocate(3, nodes, 4, device)
    sgl_kernel.verify_tree_greedy(predicts, accepted, count, tokens.view(3, nodes), *links, tokens.view(3, nodes))
    target = [tree.tokens for tree in trees]
    assert count.tolist() == [len(greedy_path(tree, row, 4)) - 1 for tree, row in zip(trees, target)]
    probs = torch.full((3, nodes, 40), 1 / 40, device=device)
    uniform = torch.zeros(3, nodes, device=device)
    sgl_kernel.tree_speculative_sampling_target_only(
        predicts, accepted, count, tokens.view(3, nodes), *links, uniform, uniform[:, 0].contiguous(), probs, probs * 0
    )
    assert count.tolist() == [min(max(len(tree.path(n)) for n in _leftmost(tree)), 4) - 1 for tree in trees]


def _leftmost(tree):
    """Nodes of the path along first children, which a coin of 0 takes."""
    node, nodes = 0, [0]
    while tree.children(node):
        node = tree.children(node)[0]
        nodes.append(node)
    return nodes


def test_a_destination_of_other_tokens_is_an_error():
    mask, bounds = torch.ones(72, dtype=torch.uint8), torch.tensor([0, 36, 72])
    with pytest.raises(ValueError, match=r"tree_mask.shape\[1\] must be 4 \(num_tokens\), got 3"):
        ops.pack_tree_mask(mask, 4, mask_indptr=bounds, tree_mask=torch.zeros(2, 3, 1, dtype=torch.uint8))
