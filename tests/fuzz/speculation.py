"""Draft trees, their judgement and the slots of drafts: right calls by a walk over parents, and hostile values."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from attnops import ops
from attnops.ops.speculation import DraftTree, TreeMaskMode, Verified
from torch import Tensor

from .draw import Draw, Failure
from .judge import check_no_fault
from .memory import Guarded, bytes_of, strided
from .options import new_report
from .paged import _generator, _same_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
from draft_trees import Tree, draw_tree, expected_tree, greedy_path, most_candidates, stack, unpack

KINDS = (torch.int32, torch.int64)
ANYTHING = [-1, 0, 1, 5, -(2**31), 2**31 - 1]


def _expect(name: str, got: Any, expected: Any) -> None:
    if got != expected:
        raise Failure(f"{name} is {str(got)[:200]}, expected {str(expected)[:200]}")


def _draw_trees(draw: Draw) -> tuple[int, int, list[Tree]]:
    topk, steps, batch = draw.pick([1, 2, 4, 8]), draw.number(1, 5), draw.pick([0, 1, 2, 5, 33])
    nodes = draw.number(1, min(most_candidates(topk, steps) + 1, draw.pick([2, 8, 9, 16, 33, 65, 150])))
    trees = [draw_tree(draw.random, topk, steps, nodes, draw.pick([3, 40])) for _ in range(batch)]
    draw.note(topk=topk, steps=steps, B=batch, N=nodes)
    return topk, steps, trees


def _nodes(trees: list[Tree]) -> int:
    return len(trees[0].parents) if trees else 4


def right_trees(draw: Draw) -> None:
    """A tree, and one way to judge it or to pack its mask."""
    topk, steps, trees = _draw_trees(draw)
    batch, nodes = len(trees), _nodes(trees)
    given, report = stack(trees, draw.device, draw.pick(KINDS)), new_report(draw)
    for name in ("parent_list", "top_scores_index", "draft_tokens"):
        given[name] = strided(draw, given[name].cpu())
    shapes = [(batch, nodes, -(-nodes // 8)), (batch * nodes,), *[(batch, nodes)] * 3, (batch * nodes,)]
    guards = [
        Guarded(draw, shape, torch.int64 if place else torch.uint8, dense=True) for place, shape in enumerate(shapes)
    ]
    draw.saw("op build_draft_tree")
    tree = ops.build_draft_tree(**given, topk=topk, out=DraftTree(*(guard.view for guard in guards)), report=report)
    expected = expected_tree(trees)
    _expect("tree_mask", unpack(tree.tree_mask).tolist(), expected["mask"])
    names = ("positions", "retrieve_index", "next_token", "next_sibling", "tokens")
    for name, got in zip(names, tree[1:]):
        _expect(name, got.tolist(), expected[name])
    check_no_fault(report)
    kept = DraftTree(*(part.clone() for part in tree))
    for name, guard in zip(DraftTree._fields, guards):
        guard.check(name)
    draw.pick([_greedy, _sampled, _packed])(draw, kept, trees, draw.pick([1, 2, steps + 1, steps + 2]))


def _check_verified(out: Verified, paths: list[list[int]], predicts: list[int], nodes: int, length: int) -> None:
    rows = [[b * nodes + node for node in path] for b, path in enumerate(paths)]
    _expect("accept_index", out.accept_index.tolist(), [row + [-1] * (length - len(row)) for row in rows])
    _expect("accept_token_num", out.accept_token_num.tolist(), [len(path) - 1 for path in paths])
    _expect("predicts", out.predicts.tolist(), predicts)


def _destinations(draw: Draw, batch: int, nodes: int, length: int) -> tuple[Verified, list[Guarded]]:
    shapes = ((batch * nodes,), (batch, length), (batch,))
    guards = [Guarded(draw, shape, torch.int32, dense=True) for shape in shapes]
    return Verified(*(guard.view for guard in guards)), guards


def _greedy(draw: Draw, tree: DraftTree, trees: list[Tree], length: int) -> None:
    draw.saw("op verify_tree_greedy")
    nodes, report = _nodes(trees), new_report(draw)
    target = [[draw.pick([*walked.tokens, 99]) for _ in range(nodes)] for walked in trees]
    for walked, row in zip(trees, target):
        for node in range(nodes):
            if walked.children(node) and draw.chance(0.8):
                row[node] = walked.tokens[draw.pick(walked.children(node))]
    out, guards = _destinations(draw, len(trees), nodes, length)
    flat = torch.tensor(target, dtype=draw.pick(KINDS)).to(draw.device, non_blocking=True).flatten()
    assert tree.tokens is not None
    links = [strided(draw, part.view(len(trees), nodes).cpu()) for part in (tree.tokens, *tree[2:5])]
    ops.verify_tree_greedy(*links, flat, length, out=out, report=report)
    paths = [greedy_path(walked, row, length) for walked, row in zip(trees, target)]
    predicts = [row[n] if n in path else 0 for path, row in zip(paths, target) for n in range(nodes)]
    _check_verified(out, paths, predicts, nodes, length)
    check_no_fault(report)
    for name, guard in zip(Verified._fields, guards):
        guard.check(name)


def _sampled(draw: Draw, tree: DraftTree, trees: list[Tree], length: int) -> None:
    """Coins of eighths and probabilities of sixteenths, so that sums are exact."""
    draw.saw("op verify_tree_sampling")
    batch, nodes, vocabulary = len(trees), _nodes(trees), draw.pick([40, 41, 300, 5000])
    report = new_report(draw)
    probs = torch.zeros(batch, nodes, vocabulary)
    for b, walked in enumerate(trees):
        for node in range(nodes):
            for _ in range(16):
                likely = [walked.tokens[child] for child in walked.children(node)]
                probs[
                    b, node, draw.pick(likely) if likely and draw.chance(0.6) else draw.number(0, vocabulary - 1)
                ] += 1
    probs /= 16
    coins = torch.tensor([[draw.number(0, 15) / 16 for _ in range(nodes + 1)] for _ in trees]).view(batch, nodes + 1)
    uniform, final = (
        coins[:, :nodes].contiguous().to(draw.device, non_blocking=True),
        coins[:, nodes].contiguous().to(draw.device, non_blocking=True),
    )
    single, acc = draw.pick([(1.0, 1.0), (0.5, 1.0), (1.0, 0.5)])
    assert tree.tokens is not None
    out, guards = _destinations(draw, batch, nodes, length)
    judged = (
        tree.tokens.view(batch, nodes),
        *tree[2:5],
        uniform,
        final,
        probs.to(draw.device, non_blocking=True),
        length,
    )
    ops.verify_tree_sampling(*judged, threshold_single=single, threshold_acc=acc, out=out, report=report)
    paths, predicts = [], []
    for b, walked in enumerate(trees):
        path, row = _sample_path(walked, coins[b].tolist(), probs[b], length, single, acc)
        paths.append(path)
        predicts += row
    _check_verified(out, paths, predicts, nodes, length)
    check_no_fault(report)
    for name, guard in zip(Verified._fields, guards):
        guard.check(name)


def _sample_path(
    tree: Tree, coins: list[float], probs: Tensor, length: int, single: float, acc: float
) -> tuple[list[int], list[int]]:
    path, predicts, rejected = [0], [0] * len(tree.parents), set[int]()
    while len(path) < length:
        node, mass, taken = path[-1], 0.0, -1
        for child in tree.children(node):
            token = tree.tokens[child]
            if token in rejected:
                continue
            mass += float(probs[node, token])
            if coins[node] < mass / acc or float(probs[node, token]) >= single:
                taken = child
                break
            rejected.add(token)
        if taken < 0:
            break
        predicts[node] = tree.tokens[taken]
        path.append(taken)
        rejected = set()
    rest = probs[path[-1]].double()
    left = rest.clone()
    left[list(rejected)] = 0
    sums = left.cumsum(0)
    past = ((sums > coins[-1] * sums[-1]) & (left > 0)).nonzero().flatten().tolist()
    predicts[path[-1]] = past[0] if past else int(rest.argmax())
    return path, predicts


def _packed(draw: Draw, tree: DraftTree, trees: list[Tree], length: int) -> None:
    del length
    draw.saw("op pack_tree_mask")
    batch, nodes = len(trees), _nodes(trees)
    seen = unpack(tree.tree_mask).view(batch, nodes, nodes)
    layout = draw.pick(list(TreeMaskMode)[: 3 if nodes <= 32 else 2])
    options, item = {}, 4 if nodes > 16 else 2 if nodes > 8 else 1
    if layout == TreeMaskMode.FULL_MASK:
        rows = [torch.cat([torch.ones(nodes, draw.number(0, 20)).bool(), one], 1).flatten() for one in seen]
        lead = draw.number(0, 3)
        mask = torch.cat([torch.zeros(lead).bool(), *rows])
        bounds = torch.tensor([lead, *(len(row) for row in rows)]).cumsum(0)
        options = {"mask_indptr": bounds.to(draw.pick(KINDS)).to(draw.device, non_blocking=True)}
    elif layout == TreeMaskMode.QLEN_ONLY:
        mask = seen.flatten()
    else:
        mask = torch.full((batch, nodes, item), draw.pick([0, 255]), dtype=torch.uint8)
        bits = tree.tree_mask.cpu()
        spare = 0 if nodes % 8 == 0 else draw.pick([0, 1]) * (256 - (1 << nodes % 8))
        mask[..., : bits.shape[2]] = bits
        mask[..., bits.shape[2] - 1] |= spare
    report, out = new_report(draw), Guarded(draw, tuple(tree.tree_mask.shape), torch.uint8, dense=True)
    draw.note(layout=layout.name)
    ops.pack_tree_mask(
        mask.contiguous().flatten().clone().to(draw.device, non_blocking=True),
        nodes,
        layout,
        **options,
        tree_mask=out.view,
        report=report,
    )
    _same_bytes("tree_mask", out.view, tree.tree_mask)
    check_no_fault(report)
    out.check("tree_mask")


def right_drafts(draw: Draw) -> None:
    """`move_kv`, `copy_page_tail` or `generate_draft_decode_kv_indices`."""
    draw.pick([_moves, _tails, _indices])(draw)


def _pool(draw: Draw, slots: int, page_size: int) -> list[Guarded]:
    """Buffers of random bytes with room for these slots, strided in any way."""
    guards = []
    for _ in range(draw.number(1, 4)):
        heads, dim = draw.pick([0, 1, 2, 5]), draw.pick([1, 7, 8, 64, 656])
        shape = (-(-slots // page_size), page_size, *([heads] if heads else []), dim)
        dtype = draw.pick([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn])
        guard = Guarded(draw, shape, dtype)
        values = torch.randint(0, 120, shape, generator=_generator(draw))
        bytes_of(guard.view).copy_(values.to(bytes_of(guard.view).dtype))
        guards.append(guard)
    return guards


def _move(whole: list[Tensor], before: list[Tensor], source: int, target: int) -> None:
    for new, old in zip(whole, before):
        size = new.shape[1]
        bytes_of(new)[target // size, target % size] = bytes_of(old)[source // size, source % size]


def _judge_pool(guards: list[Guarded], expected: list[Tensor]) -> None:
    for guard, right in zip(guards, expected):
        _same_bytes("pages", guard.view, right)
        guard.check("pages")


def _moves(draw: Draw) -> None:
    draw.saw("op move_kv")
    batch, nodes, length = draw.pick([0, 1, 2, 9]), draw.number(1, 30), draw.number(1, 20)
    page_size, columns = draw.pick([1, 3, 16]), draw.number(length, 60)
    draw.note(B=batch, N=nodes, path=length, page=page_size)
    room = batch * nodes + draw.number(1, 20)
    slots = draw.permutation(room)[: batch * nodes].tolist()
    guards = _pool(draw, room, page_size)
    before = [guard.view.clone() for guard in guards]
    expected = [old.clone() for old in before]
    table = torch.full((batch + 1, columns), -9, dtype=torch.int32, device=draw.device)
    rows = draw.permutation(batch + 1)[:batch]
    lengths = [draw.number(0, columns - length) for _ in range(batch)]
    cells, accepted = table.tolist(), []
    for b in range(batch):
        count = draw.number(0, min(length, nodes))
        path = sorted(draw.random.sample(range(nodes), count))
        accepted.append([b * nodes + node for node in path] + [-draw.number(1, 5)] * (length - count))
        for i, node in enumerate(path):
            _move(expected, before, slots[b * nodes + node], slots[b * nodes + i])
            cells[int(rows[b])][lengths[b] + i] = slots[b * nodes + i]
    index = torch.tensor(accepted, dtype=draw.pick(KINDS)).view(batch, length)
    options: dict[str, Any] = {}
    if draw.chance(0.6):
        lens = torch.tensor(lengths, dtype=torch.int32).to(draw.device, non_blocking=True)
        options = {
            "req_to_token": table,
            "req_pool_indices": rows.to(draw.device, non_blocking=True),
            "cache_seqlens": lens,
        }
    report = new_report(draw)
    loc = torch.tensor(slots, dtype=draw.pick(KINDS)).to(draw.device, non_blocking=True)
    ops.move_kv(strided(draw, index), loc, [guard.view for guard in guards], **options, report=report)
    _judge_pool(guards, expected)
    if options:
        _expect("req_to_token", table.tolist(), cells)
    check_no_fault(report)


def _first_cells(length: int, topk: int, steps: int, page_size: int) -> list[int]:
    if page_size == 1 or topk == 1:
        return [length + k * steps for k in range(topk)]
    tail = length % page_size
    return [length + k * -(-(tail + steps) // page_size) * page_size for k in range(topk)]


def _drafts(draw: Draw, page_size: int) -> tuple[dict[str, Any], list[list[int]], list[list[int]]]:
    """(arguments, slots of each request's cells, first cells of its branches)."""
    topk, steps, batch = draw.pick([1, 2, 4, 7]), draw.number(1, 9), draw.pick([0, 1, 2, 7])
    lengths = [draw.number(0, 70) for _ in range(batch)]
    firsts = [_first_cells(length, topk, steps, page_size) for length in lengths]
    columns = max([first[-1] + steps for first in firsts], default=0) + draw.number(0, 3)
    columns = max(columns, topk * steps)
    rows = draw.permutation(batch + 1)[:batch]
    slots = draw.permutation((batch + 1) * columns).view(batch + 1, columns)
    draw.note(topk=topk, steps=steps, page=page_size, lengths=lengths)
    given = {
        "req_to_token": strided(draw, slots.int()),
        "req_pool_indices": rows.to(draw.pick(KINDS)).to(draw.device, non_blocking=True),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32).to(draw.device, non_blocking=True),
        "topk": topk,
        "draft_steps": steps,
        "report": new_report(draw),
    }
    return given, slots[rows].tolist(), firsts


def _tails(draw: Draw) -> None:
    draw.saw("op copy_page_tail")
    page_size = draw.pick([1, 3, 16, 64])
    given, cells, firsts = _drafts(draw, page_size)
    guards = _pool(draw, given["req_to_token"].numel(), page_size)
    before = [guard.view.clone() for guard in guards]
    expected = [old.clone() for old in before]
    for row, branches in zip(cells, firsts):
        tail = branches[0] % page_size
        for first in branches[1:] if page_size > 1 else []:
            for i in range(tail):
                _move(expected, before, row[branches[0] - tail + i], row[first - tail + i])
    ops.copy_page_tail(**given, pages=[guard.view for guard in guards])
    _judge_pool(guards, expected)
    check_no_fault(given["report"])


def _indices(draw: Draw) -> None:
    draw.saw("op generate_draft_decode_kv_indices")
    page_size = draw.pick([1, 3, 16, 64])
    given, cells, firsts = _drafts(draw, page_size)
    steps = draw.number(0, given["draft_steps"])
    room = draw.pick([0, 50, 4000])
    indptr = Guarded(draw, (steps, len(cells) * given["topk"] + 1), torch.int32)
    indices = Guarded(draw, (steps, room), torch.int32)
    expected = indices.view.tolist()
    destinations = {"kv_indptr": indptr.view, "kv_indices": indices.view}
    ops.generate_draft_decode_kv_indices(**given, page_size=page_size, **destinations)
    bounds = []
    for step in range(steps):
        flat: list[int] = []
        bounds.append([0])
        for row, branches in zip(cells, firsts):
            for first in branches:
                flat += row[: branches[0]] + row[first : first + step + 1]
                bounds[-1].append(len(flat))
        expected[step][: min(room, len(flat))] = flat[:room]
    _expect("kv_indptr", indptr.view.tolist(), bounds)
    _expect("kv_indices", indices.view.tolist(), expected)
    check_no_fault(given["report"])
    indptr.check("kv_indptr")
    indices.check("kv_indices")


def hostile_trees(draw: Draw) -> None:
    """Any number in any index of any of these ops: on the CPU an error that names the op, nowhere the end."""
    from right_calls import speculation_arguments

    op = draw.pick(sorted(speculation_arguments()))
    given = {
        key: value.to(draw.device, non_blocking=True) if isinstance(value, Tensor) else value
        for key, value in speculation_arguments()[op].items()
    }
    if "pages" in given:
        given["pages"] = [pages.to(draw.device, non_blocking=True) for pages in given["pages"]]
    names = [key for key, value in given.items() if isinstance(value, Tensor) and key not in ("mask", "tree_mask")]
    for name in draw.random.sample(names, draw.number(1, len(names))):
        flat = given[name].view(-1)
        for _ in range(draw.number(1, 3)):
            values = [float("nan"), -1.0, float("inf"), 2.0] if flat.is_floating_point() else ANYTHING
            if flat.dtype == torch.int64:
                values = [*values, 2**62, -(2**63)]
            flat[draw.number(0, len(flat) - 1)] = draw.pick(values)
    report = torch.zeros(8, dtype=torch.int32, device=draw.device) if draw.chance(0.5) else None
    draw.note(op=op, checked=report is not None)
    draw.saw(f"hostile {op}")
    try:
        getattr(ops, op)(**given, report=report)
    except RuntimeError as error:
        if report is not None or draw.device != "cpu" or f"attnops::{op}: " not in str(error):
            raise
