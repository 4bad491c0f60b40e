"""Of the model in rows.py: who asks for boxes of e4m3 keys and values, and who makes them wide."""

# ruff: noqa
# mypy: ignore-errors
from machine import step, wait


def order_of(n):
    """Keys come a tile ahead of values."""
    items = [("k", 0)] if n else []
    for t in range(n):
        items += ([("k", t + 1)] if t + 1 < n else []) + [("v", t)]
    return items


def asker(c):
    q = qp = s = sp = a = ap = 0
    first = c.rst if c.qs == 1 else 0  # so many tiles are asked for before the queries
    while True:
        yield wait(c.wd[s], sp ^ 1)
        while c.idx[0] < len(c.W) and not c.W[c.idx[0]][0]:
            c.idx[0] += 1
        w, mine = c.slot[s] = (c.W[c.idx[0]], c.idx[0]) if c.idx[0] < len(c.W) else (None, None)
        c.idx[0] += 1
        c.wk[s].arrive()
        yield lambda: True

        def bring_queries():
            nonlocal q, qp
            yield wait(c.qe[q], qp ^ 1)
            if w is None:
                c.qf[q].arrive()
                return
            c.ask_for_queries(q, mine)
            q += 1
            if q == c.qs:
                q, qp = 0, qp ^ 1

        n = 0 if w is None else w[2] - w[1]
        if first == 0 or n == 0:
            yield from bring_queries()
        if w is None:
            return
        own_slot = s
        s, sp = (0, sp ^ 1) if s == 1 else (1, sp)
        items = order_of(n)
        for i, item in enumerate(items):
            yield wait(c.re_[a], ap ^ 1)
            c.rf[a].expect(5)

            def land(a=a, item=item, mine=mine):
                assert c.rawread[a] == 0, "e4m3 tile overwritten while read"
                c.raw[a] = (mine, item)
                c.rf[a].add(5)

            c.inflight.append(land)
            a += 1
            if a == c.rst:
                a, ap = 0, ap ^ 1
            yield lambda: True
            if first and i + 1 == min(first, len(items)):
                yield from bring_queries()
        assert c.slot[own_slot] == (w, mine)


def widener(c, wp):
    s = sp = a = ap = 0
    rk = [0, 0]
    rv = [0, 0]
    while True:
        yield wait(c.wk[s], sp)
        w, mine = c.slot[s]
        if w is None:
            return
        own_slot = s
        s, sp = (0, sp ^ 1) if s == 1 else (1, sp)
        for kind, t in order_of(w[2] - w[1]):
            yield wait(c.rf[a], ap)
            assert c.raw[a] == (mine, (kind, t)), (c.raw[a], mine, kind, t)
            c.rawread[a] += 1
            ring, cells, rd, f, e = (rk, c.K, c.kr, c.kf, c.ke) if kind == "k" else (rv, c.V, c.vr, c.vf, c.ve)
            st, ph = ring
            yield wait(e[st], ph ^ 1)
            for _ in range(2):
                assert rd[st] == 0, "overwritten while read"
                cells[st][wp] = ((mine, t), "half")
                yield lambda: True
            assert c.raw[a] == (mine, (kind, t))
            c.rawread[a] -= 1
            c.re_[a].arrive()
            yield lambda: True
            cells[st][wp] = ((mine, t), "wide")
            f[st].arrive()
            a += 1
            if a == c.rst:
                a, ap = 0, ap ^ 1
            step(ring, c.kst)
        assert c.slot[own_slot] == (w, mine)
        c.wd[own_slot].arrive()
