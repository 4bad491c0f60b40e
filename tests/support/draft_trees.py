"""Draft loops and their trees by plain loops: what the ops of `speculation` are held to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Tree:
    """One request's tree, by parents.

    Args:
        parents: Of every node; the root's is -1.
        tokens: Of every node.
        length: Tokens before the root.
    """

    parents: list[int]
    tokens: list[int]
    length: int
    chosen: list[int] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        """From a node to the root, both included."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]


def draw_tree(rng: random.Random, topk: int, steps: int, num_tokens: int, vocabulary: int = 40) -> Tree:
    """A loop of `steps` steps that proposes `topk` children per branch, and `num_tokens` - 1 of the candidates, closed
    under parents."""
    parents_of: list[int] = [-1] * topk  # of candidates
    groups = [-1, *range(topk)]  # parent candidate of each group
    branches = list(range(topk))
    for step in range(1, steps):
        first = len(parents_of)
        for branch in branches:
            parents_of += [branch] * topk
        branches = sorted(rng.sample(range(first, len(parents_of)), topk))
        if step < steps - 1:
            groups += branches
    chosen: set[int] = set()
    order = list(range(len(parents_of)))
    rng.shuffle(order)
    while len(chosen) < min(num_tokens - 1, len(parents_of)):
        candidate = next(c for c in order if c not in chosen and (parents_of[c] < 0 or parents_of[c] in chosen))
        chosen.add(candidate)
    kept = sorted(chosen)
    place = {candidate: node + 1 for node, candidate in enumerate(kept)}
    parents = [-1] + [0 if parents_of[c] < 0 else place[parents_of[c]] for c in kept]
    tokens = [rng.randrange(vocabulary) for _ in parents]
    return Tree(parents, tokens, rng.choice([0, 1, rng.randrange(5000)]), kept, groups if steps > 1 else [])


def most_candidates(topk: int, steps: int) -> int:
    return topk + (steps - 1) * topk * topk


def stack(trees: list[Tree], device: str, dtype: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """The arguments of `build_draft_tree`."""
    drafts = len(trees[0].parents) - 1 if trees else 3

    def matrix(rows: list[list[int]], columns: int) -> Tensor:
        return torch.tensor(rows, dtype=dtype, device=device).view(len(trees), columns)

    return {
        "parent_list": matrix([tree.groups for tree in trees], len(trees[0].groups) if trees else 1),
        "top_scores_index": matrix([tree.chosen for tree in trees], drafts),
        "draft_tokens": matrix([tree.tokens[1:] for tree in trees], drafts),
        "bonus_tokens": torch.tensor([tree.tokens[0] for tree in trees], dtype=dtype, device=device),
        "cache_seqlens": torch.tensor([tree.length for tree in trees], dtype=torch.int32, device=device),
    }


def unpack(tree_mask: Tensor) -> Tensor:
    """bool ``[B, N, N]`` of a packed mask; its last bits must be 0."""
    bits = tree_mask.cpu().unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    rows, tokens = bits.flatten(2).bool(), tree_mask.shape[1]
    assert not rows[..., tokens:].any()
    return rows[..., :tokens]


def expected_tree(trees: list[Tree]) -> dict[str, list]:
    """What `build_draft_tree` makes of trees, as lists."""
    nodes = len(trees[0].parents) if trees else 4
    masks, positions, next_token, sibling = [], [], [], []
    for tree in trees:
        paths = [tree.path(node) for node in range(nodes)]
        masks.append([[other in path for other in range(nodes)] for path in paths])
        positions += [tree.length + len(path) - 1 for path in paths]
        first = [min(tree.children(node), default=-1) for node in range(nodes)]
        later = [
            min((c for c in tree.children(tree.parents[node]) if c > node), default=-1) if node else -1
            for node in range(nodes)
        ]
        next_token.append(first)
        sibling.append(later)
    return {
        "mask": masks,
        "positions": positions,
        "retrieve_index": [[b * nodes + i for i in range(nodes)] for b in range(len(trees))],
        "next_token": next_token,
        "next_sibling": sibling,
        "tokens": [token for tree in trees for token in tree.tokens],
    }


def greedy_path(tree: Tree, target: list[int], path_length: int) -> list[int]:
    """Nodes that come out, the root first."""
    path = [0]
    while len(path) < path_length:
        taken = [c for c in tree.children(path[-1]) if tree.tokens[c] == target[path[-1]]]
        if not taken:
            break
        path.append(taken[0])
    return path


def draw_parents(rng: random.Random, nodes: int) -> list[int]:
    """A tree of any shape: chains, stars and what lies between."""
    reach = rng.choice([1, 2, 4, nodes])
    return [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, nodes)]


def masks_of_parents(trees: list[list[int]]) -> Tensor:
    """The packed masks ``[B, N, ceil(N / 8)]`` of trees of one size."""
    nodes = len(trees[0])
    masks = torch.zeros(len(trees), nodes, -(-nodes // 8), dtype=torch.uint8)
    for b, parents in enumerate(trees):
        for node in range(nodes):
            for seen in Tree(parents, [], 0).path(node):
                masks[b, node, seen // 8] |= 1 << seen % 8
    return masks


def seen_by_walks(parents: list[int], prefix: int, window: int) -> Tensor:
    """bool ``[N, prefix + N]``: a node sees its path and the prefix, as far back as its window goes in positions."""
    seen = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        path = Tree(parents, [], 0).path(node)  # from the node to the root
        positions = {prefix + other: prefix + len(path) - 1 - steps for steps, other in enumerate(path)}
        positions |= {key: key for key in range(prefix)}
        own = prefix + len(path) - 1
        for key, position in positions.items():
            seen[node, key] = window < 0 or own - position <= window
    return seen


def attention_over(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, cap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64 of one request, ``q [S_q, H_q, D]``, over the keys ``[S_k, H_kv, D]`` that are seen."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = cap * torch.tanh(scores / cap) if cap else scores
    lse = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double().unsqueeze(1))
    weights = torch.exp(scores - total.unsqueeze(-1)).masked_fill(~seen, 0.0)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T
