"""Model of the barriers of the kernels of rows, and of e4m3 keys under 16-bit and e4m3 queries.

No deadlock, no stage overwritten while read, no e4m3 tile overwritten before all have read it.

python tests/fmha/barrier_models/rows.py 0 150
"""

# ruff: noqa
# mypy: ignore-errors
import random, sys
from types import SimpleNamespace

from machine import Bar, run, step, wait
from narrow_boxes import asker, widener

# What `asker` and `widener` see of a CTA.
CTA = set("K V W ask_for_queries idx inflight ke kf kr kst qe qf qs raw rawread re_ rf rst slot ve vf vr wd wk".split())


def sim(seed, kind, overlap, qs, kst=2, groups=2, turns=True, rst=2):
    r = random.Random(seed)
    in_place, narrow, own = kind == "rows in place", kind == "narrow boxes", kind == "narrow rows"
    e4m3 = kind == "e4m3 rows"  # of e4m3 queries
    W = [(r.random() < 0.85, 0, r.choice([0, 1, 1, 2, 3, 4, 6])) for _ in range(r.randint(1, 12))]
    # Arrivals a tile (8 stands for 128): of warps that widen boxes, or rows, or of all lanes.
    A = 3 if narrow else 4 if in_place or own else 8
    parts = 3 if narrow else 4
    rf = [Bar(1, f"rf{i}") for i in range(rst)]
    re_ = [Bar(3, f"re{i}") for i in range(rst)]
    raw = [None] * rst
    wk = [Bar(1, f"wk{i}") for i in range(2)]
    qf = [Bar(1, f"qf{i}") for i in range(qs)]
    qe = [Bar(groups, f"qe{i}") for i in range(qs)]
    wd = [Bar(groups + 3, f"wd{i}") for i in range(2)]
    queries = [None] * qs
    qread = [0] * qs
    kf = [Bar(A, f"kf{i}") for i in range(kst)]
    ke = [Bar(groups, f"ke{i}") for i in range(kst)]
    vf = [Bar(4 if e4m3 else A, f"vf{i}") for i in range(kst)]
    ve = [Bar(groups, f"ve{i}") for i in range(kst)]
    K = [{} for _ in range(kst)]
    V = [{} for _ in range(kst)]
    kr = [0] * kst
    vr = [0] * kst
    slot = [None] * 2
    named = [0, 0]
    inflight = []
    done = []
    turnbar = [[0, 0] for _ in range(groups)]  # arrivals count per turn barrier (sync+arrive of 2)
    idx = [0]

    def ask_for_queries(place, work):
        qf[place].expect(7)

        def land():
            assert qread[place] == 0, "queries overwritten while read"
            queries[place] = work
            qf[place].add(7)

        inflight.append(land)

    def prod(wp):
        own_raw = [None, None]  # of keys, of values

        # Copies of a tile's keys, and of its values, are a step ahead of their conversion.
        def bring_own(w, mine, rk, rv, bring_queries):
            n = w[2] - w[1]

            def copy(i, t):
                place = own_raw[i] = [(mine, t), False]

                def land():
                    place[1] = True

                inflight.append(land)

            def widen(i, t):
                place = own_raw[i]
                yield lambda: place[1]  # wait_group
                assert place is own_raw[i] and place[0] == (mine, t)
                ring, cells, rd, f, e = (rv, V, vr, vf, ve) if i else (rk, K, kr, kf, ke)
                st, ph = ring
                yield wait(e[st], ph ^ 1)
                for width in ("half", "wide"):
                    assert rd[st] == 0, "overwritten while read"
                    cells[st][wp] = ((mine, t), width)
                    yield lambda: True
                f[st].arrive()
                step(ring, kst)

            for t in range(-1, n + 1 if n else -1):
                if 0 <= t < n:
                    yield from widen(0, t)
                if t + 1 < n:
                    copy(0, t + 1)
                if t == -1:
                    yield from bring_queries()
                if t > 0:
                    yield from widen(1, t - 1)
                if 0 <= t < n:
                    copy(1, t)
                yield lambda: True

        # Copies of keys and of values are a tile ahead, and whoever has copied values transposes them.
        e4m3_raw, e4m3_next = [None] * kst, [0, 0]  # place of the next tile to copy, to transpose

        def bring_e4m3(w, mine, rk, rv, bring_queries):
            n = w[2] - w[1]
            landed = {}  # tile: copies that are under way
            for t in range(-1, n + 1 if n else -1):
                if t > 0:
                    at = e4m3_next[1]
                    yield lambda t=t: landed[t - 1] == 0  # wait_group
                    assert e4m3_raw[at] == (mine, t - 1)
                    st, ph = rv
                    yield wait(ve[st], ph ^ 1)
                    for width in ("half", "wide"):
                        assert vr[st] == 0, "overwritten while read"
                        V[st][wp] = ((mine, t - 1), width)
                        yield lambda: True
                    e4m3_raw[at] = None
                    vf[st].arrive()
                    e4m3_next[1] = (at + 1) % kst
                    step(rv, kst)
                if t + 1 < n:
                    landed[t + 1] = 2
                    at = e4m3_next[0]
                    assert e4m3_raw[at] is None, "values overwritten before they are transposed"
                    e4m3_raw[at] = "under way"
                    e4m3_next[0] = (at + 1) % kst

                    def land_values(t=t, at=at):
                        e4m3_raw[at] = (mine, t + 1)
                        landed[t + 1] -= 1

                    inflight.append(land_values)
                    st, ph = rk
                    yield wait(ke[st], ph ^ 1)

                    def land_keys(t=t, st=st):
                        assert kr[st] == 0, "overwritten while read"
                        K[st][wp] = ((mine, t + 1), "wide")
                        landed[t + 1] -= 1
                        kf[st].arrive(2)

                    inflight.append(land_keys)
                    step(rk, kst)
                if t == -1:
                    yield from bring_queries()
                yield lambda: True

        q = 0
        qp = 0
        s = 0
        sp = 0
        rk = [0, 0]
        rv = [0, 0]
        pend = None
        outstanding = []  # copies of this warp in order: [landed]

        def finish(newer):
            nonlocal pend
            if pend is None:
                return
            cells, bar, copy = pend
            yield lambda: copy[0]  # wait_group
            cells[wp] = (cells[wp][0], "wide")
            bar.arrive()
            pend = None

        while True:
            if wp == 0:
                yield wait(wd[s], sp ^ 1)
                while idx[0] < len(W) and not W[idx[0]][0]:
                    idx[0] += 1
                slot[s] = (W[idx[0]], idx[0]) if idx[0] < len(W) else (None, None)
                idx[0] += 1
            yield from finish(0)
            named[0] += 1
            g = named[1]
            if named[0] == 4:
                named[0] = 0
                named[1] += 1
            else:
                yield (lambda g=g: named[1] != g)
            yield lambda: True
            w, mine = slot[s]
            own_slot = s
            s, sp = (0, sp ^ 1) if s == 1 else (1, sp)

            if w is None:
                if wp == 0:
                    yield wait(qe[q], qp ^ 1)
                    qf[q].arrive()
                return
            later = (own or e4m3 or qs == 1) and w[1] < w[2]  # behind the first keys, unless the place is free
            if later and not e4m3 and wp == 0 and qe[q].done(qp ^ 1):
                later = False

            def bring_queries():
                nonlocal q, qp
                if wp == 0:
                    yield wait(qe[q], qp ^ 1)
                    ask_for_queries(q, mine)
                q += 1
                if q == qs:
                    q = 0
                    qp ^= 1

            if not later:
                yield from bring_queries()

            def bring_queries_behind():
                if later:
                    yield from bring_queries()

            if own or e4m3:
                yield from (bring_e4m3 if e4m3 else bring_own)(w, mine, rk, rv, bring_queries_behind)
                assert slot[own_slot] == (w, mine)
                if wp > 0:
                    wd[own_slot].arrive()
                continue

            def bring(keys, tile):
                nonlocal pend
                ring = rk if keys else rv
                st, ph = ring
                yield wait((ke if keys else ve)[st], ph ^ 1)
                step(ring, kst)
                cells = (K if keys else V)[st]
                rd = kr if keys else vr
                bar = (kf if keys else vf)[st]
                copy = [False]
                content = (mine, tile)

                def land():
                    assert rd[st] == 0, "overwritten while read"
                    cells[wp] = (content, "raw" if in_place else "wide")
                    copy[0] = True
                    if not in_place:
                        bar.arrive(2)

                inflight.append(land)
                if in_place:
                    yield lambda: True
                    yield from finish(1)
                    pend = (cells, bar, copy)

            t, t_end = w[1], w[2]
            if t < t_end:
                yield from bring(True, t)
                if later:
                    yield from bring_queries()
                while t < t_end:
                    if t + 1 < t_end:
                        yield from bring(True, t + 1)
                    yield from bring(False, t)
                    t += 1
            assert slot[own_slot] == (w, mine)
            if wp > 0:
                wd[own_slot].arrive()

    rawread = [0] * rst

    def cons(g):
        q = 0
        qp = 0
        s = 0
        k = [0, 0]
        v = [0, 0]

        def take():
            # named barrier sync with 2 participants (arrive by the other, sync by us)
            b = turnbar[g]
            b[0] += 1
            if b[0] == 2:
                b[0] = 0
                b[1] += 1
                return
            gen = b[1]
            yield lambda: b[1] != gen

        def give():
            b = turnbar[(g + 1) % groups]
            b[0] += 1
            assert b[0] <= 2
            if b[0] == 2:
                b[0] = 0
                b[1] += 1

        if turns and g == groups - 1:
            give()

        while True:
            yield wait(qf[q], qp)
            w, mine = slot[s]
            if w is None:
                break
            t_end = w[2]
            assert queries[q] == mine
            qread[q] += 1

            def free():
                qread[q] -= 1
                qe[q].arrive()

            def chk(cells, t):
                assert cells == {i: ((mine, t), "wide") for i in range(parts)}, (cells, mine, t)

            def useK(t):
                yield wait(kf[k[0]], k[1])
                chk(K[k[0]], t)
                kr[k[0]] += 1

            def useV(t):
                yield wait(vf[v[0]], v[1])
                chk(V[v[0]], t)
                vr[v[0]] += 1

            def relK():
                kr[k[0]] -= 1
                ke[k[0]].arrive()
                step(k, kst)

            def relV():
                vr[v[0]] -= 1
                ve[v[0]].arrive()
                step(v, kst)

            def T():
                if turns:
                    yield from take()

            def G():
                if turns:
                    give()

            if g > 0 and mine % 3 == 0:  # a warpgroup without rows passes by
                free()
                for t in range(t_end):
                    yield from T()
                    G()
                    yield lambda: True
                    yield from useK(t)
                    relK()
                    yield from useV(t)
                    relV()
            elif t_end == 0:
                free()
            else:
                t0 = 0
                if overlap:
                    yield from useK(0)
                    yield from T()
                    yield lambda: True
                    G()
                    yield lambda: True
                    relK()
                    if t_end == 1:
                        free()
                    t0 = 1
                for t in range(t0, t_end):
                    yield from useK(t)
                    yield from T()
                    yield lambda: True
                    if overlap:
                        yield from useV(t - 1)
                        G()
                        yield lambda: True
                        relK()
                        if t + 1 == t_end:
                            free()
                        yield lambda: True
                        relV()
                    else:
                        G()
                        yield lambda: True
                        relK()
                        if t + 1 == t_end:
                            free()
                        yield lambda: True
                        yield from useV(t)
                        yield lambda: True
                        relV()
                if overlap:
                    yield from useV(t_end - 1)
                    yield lambda: True
                    relV()
            if g == 0:
                done.append(mine)
            yield lambda: True
            assert slot[s] == (w, mine)
            wd[s].arrive()
            s ^= 1
            q += 1
            if q == qs:
                q = 0
                qp ^= 1
        if turns and g == 0:
            yield from take()

    cta = SimpleNamespace(**{name: value for name, value in locals().items() if name in CTA})
    bring = [asker(cta)] + [widener(cta, i) for i in range(3)] if narrow else [prod(i) for i in range(4)]
    threads = [[b, None] for b in bring] + [[cons(i), None] for i in range(groups)]
    run(threads, inflight, r, f"{seed} {kind} overlap {overlap} qs {qs} {W}")
    assert done == [i for i, w in enumerate(W) if w[0]]


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for n in ("rows", "rows in place", "narrow boxes", "narrow rows", "e4m3 rows"):
            for o in (0, 1):
                for qs in (1, 2):
                    sim(seed, n, o, qs, kst=2 + seed // 3 % 2, rst=2 + seed % 3)
    print("ok")
