"""Model of the barriers of MLA's ring kernel: no deadlock, no slot, item, work or total overwritten while it is read.

python tests/fmha/barrier_models/mla_ring.py 0 300
"""

# ruff: noqa
# mypy: ignore-errors
import random, sys
from machine import Bar, run

SLOTS, AHEAD, SCORES, VALUES, WARPS = 3, 4, 4, 8, 12


class Named:
    """A hardware barrier: those that sync wait for the phase that they have joined."""

    def __init__(s, n, name):
        s.n, s.name, s.count, s.phase, s.joined = n, name, 0, 0, set()

    def join(s, who):
        assert who not in s.joined, ("twice in one phase", s.name, who)
        s.joined.add(who)
        s.count += 1
        phase = s.phase
        if s.count == s.n:
            s.count, s.phase, s.joined = 0, s.phase + 1, set()
        return lambda: s.phase > phase


def sim(seed):
    r = random.Random(seed)
    works = [r.choice([1, 1, 1, 2, 3, 4, 7]) for _ in range(r.randint(1, 9))]
    cut = r.choice([0, 0, 2, 3])  # tiles of a cut, batch-invariant
    items = []
    for w, n in enumerate(works):
        items += [("q", w)] + [("k", w, t) for t in range(n)]
    full = [Bar(VALUES, f"full{i}") for i in range(SLOTS)]
    empty = [[Bar(4, f"empty{i}{h}") for h in range(2)] for i in range(SLOTS)]
    scores_read, totals_read = Bar(SCORES, "scores read"), Bar(VALUES, "totals read")
    go = [Named(WARPS, f"go{i}") for i in range(SLOTS)]
    totals_written, item_ready, kept = Named(WARPS, "totals"), Named(VALUES, "item"), Named(SCORES, "kept")
    warpgroup = Named(SCORES, "warpgroup")  # its products begin together
    slot_holds, slot_rope = [[None] * 8 for _ in range(SLOTS)], [None] * SLOTS
    probabilities, flags = [None] * SLOTS, [[None] * 4 for _ in range(SLOTS)]
    item = [(0, items[0]), None, None]
    work = [None] * AHEAD
    stored = [None]
    inflight, planned, done = [], [0], []

    def plan(which):
        i = planned[0]
        planned[0] += 1
        item[which] = (i, items[i]) if i < len(items) else (i, None)
        if i < len(items) and items[i][0] == "q":
            work[items[i][1] % AHEAD] = items[i][1]

    def scores(me):
        turn = given = 0
        slot = lambda: turn % SLOTS
        wait_full = lambda: lambda s=slot(), p=turn >= SLOTS: full[s].done(int(p))
        for w, n in enumerate(works):
            yield wait_full()
            assert slot_holds[slot()] == [("q", w)] * 8 and slot_rope[slot()] == ("q", w), (slot_holds[slot()], w)
            yield
            yield kept.join(me)
            empty[slot()][0].arrive()
            yield
            empty[slot()][1].arrive()
            scores_read.arrive()
            turn = (turn + 1) % (2 * SLOTS)
            yield
            left = n
            while left > 0:
                tiles = min(cut, left) if cut else left
                first = n - left
                left -= tiles
                for t in range(tiles):
                    yield wait_full()
                    assert work[w % AHEAD] == w
                    assert slot_holds[slot()] == [("k", w, first + t)] * 8 and slot_rope[slot()] == ("k", w, first + t)
                    yield warpgroup.join(me)
                    before = (slot() - 1) % SLOTS
                    if t > 0:
                        flags[before][me] = (w, first + t - 1, False, False, False)
                        go[before].join(("scores", me))
                    yield
                    scores_read.arrive()
                    yield lambda p=turn & 1: scores_read.done(p)
                    if me == 0:
                        probabilities[slot()] = (w, first + t)
                        slot_rope[slot()] = "p"
                    yield
                    turn = (turn + 1) % (2 * SLOTS)
                before = (slot() - 1) % SLOTS
                flags[before][me] = (w, first + tiles - 1, True, left > 0, left == 0 and w == len(works) - 1)
                go[before].join(("scores", me))
                yield
                if given:
                    yield lambda p=given & 1 ^ 1: totals_read.done(p)
                given += 1
                assert work[w % AHEAD] == w
                if me == 0:
                    stored[0] = (w, first)
                yield
                totals_written.join(("scores", me))

    def values(me):
        half = me // 4
        at = {"slot": 0, "parity": 1, "which": 0, "at": 0}

        def advance():
            at["slot"] = (at["slot"] + 1) % SLOTS
            at["parity"] ^= at["slot"] == 0
            at["at"] += 1

        def ask(entry, slot, parity):
            if entry is None:
                return
            yield lambda: empty[slot][half].done(parity)
            full[slot].tx += 2 if me == 4 else 1
            full[slot].arrive()

            def land():
                slot_holds[slot][me] = entry
                full[slot].add(1)

            inflight.append(land)
            if me != 4:
                return
            yield lambda: empty[slot][0].done(parity)

            def land_rope():
                slot_rope[slot] = entry
                full[slot].add(1)

            inflight.append(land_rope)

        def take():
            i, entry = item[at["which"]]
            assert i == at["at"], ("item", i, at)
            at["which"] ^= 1
            return entry

        loads = SLOTS + 1
        while True:
            while loads > 0:
                if loads < SLOTS + 1:
                    yield item_ready.join(me)
                entry = take()
                yield from ask(entry, at["slot"], at["parity"])
                advance()
                if me == 7:
                    if loads == SLOTS + 1:
                        yield
                        planned[0] = 0
                        plan(2)  # the first queries' work, and an item that nobody reads
                        yield
                    plan(at["which"])
                loads -= 1
            while True:
                slot, parity = at["slot"], at["parity"]
                yield go[slot].join(me)
                mine = flags[slot][me % 4]
                assert len({f for f in flags[slot]}) == 1
                assert probabilities[slot] == mine[:2] and slot_rope[slot] == "p", (probabilities[slot], mine)
                yield
                entry = take()
                if me == 7:
                    plan(at["which"])
                yield
                empty[slot][half].arrive()
                yield from ask(entry, slot, parity)
                advance()
                if mine[2]:
                    break
            again, last = mine[3], mine[4]
            refills, asked = not again and not last, False
            slot, parity = at["slot"], at["parity"]
            if refills:
                yield item_ready.join(me)
                entry = take()
                asked = empty[slot][1].done(parity)
                if asked:
                    yield from ask(entry, slot, parity)
                if me == 7:
                    plan(at["which"])
            yield totals_written.join(me)
            assert stored[0][0] == mine[0] and stored[0][1] <= mine[1]
            yield
            totals_read.arrive()
            if me == 0:
                done.append(stored[0])
            yield
            if last:
                return
            if refills:
                assert item[at["which"] ^ 1][0] == at["at"]
                if not asked:
                    yield from ask(entry, slot, parity)
                advance()

    threads = [[scores(i), None] for i in range(SCORES)] + [[values(i), None] for i in range(VALUES)]
    run(threads, inflight, r, (seed, works, cut))
    want = [(w, t) for w, n in enumerate(works) for t in (range(0, n, cut) if cut else [0])]
    assert done == want, (done, want)


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, first + count):
        sim(seed)
    print("right:", count)
