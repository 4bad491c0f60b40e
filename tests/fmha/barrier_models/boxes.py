"""Model of the box kernel's barriers, alone and in pairs: no deadlock, no stage overwritten while read.

python tests/fmha/barrier_models/boxes.py 0 150
"""

# ruff: noqa
# mypy: ignore-errors
import random, sys
from machine import Bar, run, wait


def is_long(w):
    return w[2] - w[1] > 2


def is_short(w):
    return w[2] - w[1] <= 4


# `late`: the next work is taken with the last keys of a long one; `when_done`: when the one before is done.
def sim(seed, cluster, qs=2, kst=2, warps=8, ws=2, late=True, together=1, when_done=False):
    r = random.Random(seed)
    W = []
    for i in range(r.randint(1, 24)):
        t0 = r.randint(0, 3)
        n = r.choice([0, 1, 1, 2, 3, 5, 8])
        valid = r.random() < 0.85
        W.append((valid, t0, t0 + n, {t for t in range(t0, t0 + n) if r.random() < 0.4}))
    npairs = len(W)

    class CTA:
        pass

    C = []
    for c in range(cluster):
        x = CTA()
        x.qf = [Bar(1, f"qf{c}{i}") for i in range(qs)]
        x.qe = [Bar(warps, f"qe{c}{i}") for i in range(qs)]
        x.wk = [Bar(1, f"wk{c}{i}") for i in range(ws)]
        x.wd = [Bar(warps + 3, f"wd{c}{i}") for i in range(ws)]
        x.q = [None] * qs
        x.qread = [0] * qs
        x.kf = [Bar(1, f"kf{c}{i}") for i in range(kst)]
        x.ke = [Bar(warps * cluster, f"ke{c}{i}") for i in range(kst)]
        x.vf = [Bar(2, f"vf{c}{i}") for i in range(kst)]
        x.ve = [Bar(warps * cluster, f"ve{c}{i}") for i in range(kst)]
        x.raw = [Bar(1, f"raw{c}{i}") for i in range(kst)]
        x.mf = Bar(1, f"mf{c}")
        x.me = Bar(1, f"me{c}")
        x.last = Bar(1, f"last{c}")
        x.mail = None
        x.slot = [None] * ws
        x.k = [[None] * cluster for _ in range(kst)]
        x.v = [[None] * cluster for _ in range(kst)]
        x.clr = [None] * kst
        x.kread = [0] * kst
        x.vread = [0] * kst
        x.done = []
        C.append(x)
    sem = [0]
    nclusters = r.choice([1, 2, 3])
    myc = r.randrange(nclusters)
    inflight = []  # (fn)

    class P:  # producer state shared by tid0
        pass

    def tma(c, kind, st, content, bars, val):
        # multicasts half c to all
        for d in range(cluster):

            def land(d=d):
                arr = getattr(C[d], kind)[st]
                reads = C[d].kread if kind == "k" else C[d].vread
                assert reads[st] == 0, ("overwritten while read", kind, d, st)
                arr[c] = content
                bars[d].add(val)

            inflight.append(land)

    def adv(i, p, n):
        i += 1
        return (0, p ^ 1) if i == n else (i, p)

    def ask_for_queries(x, place, work):
        def land():
            assert x.qread[place] == 0, "queries overwritten while read"
            x.q[place] = work
            x.qf[place].add(7)

        x.qf[place].expect(7)
        inflight.append(land)

    def teller(c):
        x = C[c]
        idx = myc
        mp = 0
        awaits = False
        q = 0
        qp = 0
        s = 0
        sp = 0
        lp = 0

        def take():
            nonlocal idx, mp, awaits
            if cluster == 2 and c == 1:
                awaits = True
                return
            idx = nclusters + sem[0]
            sem[0] += 1
            if cluster == 2:
                yield wait(x.me, mp ^ 1)
                mp ^= 1

                def land(v=idx):
                    C[1].mail = v
                    C[1].mf.add(4)

                inflight.append(land)

        if together > 1:
            yield from tellers(c)
            return
        while True:
            while True:
                if awaits:
                    x.mf.expect(4)
                    yield wait(x.mf, mp)
                    mp ^= 1
                    idx = x.mail
                    C[0].me.arrive()
                    awaits = False
                if idx >= npairs:
                    w = None
                    break
                w = W[idx]
                mine = idx
                if not w[0] or not (late or when_done):
                    yield from take()
                yield lambda: True
                if w[0]:
                    break
            if when_done and w is not None and is_short(w):
                yield from take()
            yield wait(x.wd[s], sp ^ 1)
            x.slot[s] = (w, None if w is None else mine)
            x.wk[s].arrive()
            s, sp = adv(s, sp, ws)
            yield wait(x.qe[q], qp ^ 1)
            if w is None:
                x.qf[q].arrive()
                return

            ask_for_queries(x, q, mine)
            q, qp = adv(q, qp, qs)
            if late:
                if is_long(w):
                    yield wait(x.last, lp)
                    lp ^= 1
                yield from take()
            if when_done and not is_short(w):
                yield wait(x.wd[s], sp ^ 1)
                yield from take()

    # A warp that takes and decodes several short works at once: lanes then tell of them in turn.
    def tellers(c):
        x = C[c]
        first, count = myc, 1
        mp = q = qp = s = sp = lp = 0
        while True:
            lanes = [first + i for i in range(count)]
            works = [(i, W[i]) if i < npairs else (None, None) for i in lanes]
            short_works = True
            yield lambda: True
            for mine, w in works:
                if w is not None and not w[0]:
                    continue
                yield wait(x.wd[s], sp ^ 1)
                x.slot[s] = (w, mine)
                x.wk[s].arrive()
                s, sp = adv(s, sp, ws)
                yield wait(x.qe[q], qp ^ 1)
                if w is None:
                    x.qf[q].arrive()
                    return

                ask_for_queries(x, q, mine)
                q, qp = adv(q, qp, qs)
                short_works = not is_long(w)
                if not short_works:
                    yield wait(x.last, lp)
                    lp ^= 1
            left = npairs - first
            count = 1 if not short_works else together if left >= 2 * together * nclusters else 2 if left > 2 else 1
            if cluster == 2 and c == 1:
                x.mf.expect(4)
                yield wait(x.mf, mp)
                mp ^= 1
                first = x.mail
                C[0].me.arrive()
                continue
            first = nclusters + sem[0]
            sem[0] += count
            if cluster == 2:
                yield wait(x.me, mp ^ 1)
                mp ^= 1

                def land(v=first):
                    C[1].mail = v
                    C[1].mf.add(4)

                inflight.append(land)

    def asker(c, of_keys):
        x = C[c]
        q = 0
        qp = 0
        k = 0
        kp = 0
        while True:
            yield wait(x.wk[q], qp)
            w, mine = x.slot[q]
            x.wd[q].arrive()
            if w is None:
                return
            q, qp = adv(q, qp, ws)
            for t in range(w[1], w[2]):
                if of_keys and late and t + 1 == w[2] and is_long(w):
                    x.last.arrive()
                if of_keys:
                    yield wait(x.ke[k], kp ^ 1)
                    x.kf[k].expect(10 * cluster)
                    tma(c, "k", k, (mine, t), [C[d].kf[k] for d in range(cluster)], 10)
                else:
                    edge = t in w[3]
                    yield wait(x.ve[k], kp ^ 1)
                    b = [(C[d].raw if edge else C[d].vf)[k] for d in range(cluster)]
                    x.clr[k] = False
                    b[c].expect(10 * cluster)
                    tma(c, "v", k, (mine, t), b, 10)
                    yield lambda: True
                    if edge:
                        x.vf[k].arrive()
                k, kp = adv(k, kp, kst)

    def warp1(c):
        x = C[c]
        q = 0
        qp = 0
        v = 0
        vp = 0
        rp = [0] * kst
        while True:
            yield wait(x.wk[q], qp)
            w, mine = x.slot[q]
            yield lambda: True
            x.wd[q].arrive()
            if w is None:
                return
            q += 1
            if q == ws:
                q = 0
                qp ^= 1
            for t in range(w[1], w[2]):
                if t in w[3]:
                    yield wait(x.raw[v], rp[v])
                    rp[v] ^= 1
                    assert x.v[v] == [(mine, t)] * cluster, ("raw", x.v[v], (mine, t))
                    x.clr[v] = True
                else:
                    yield wait(x.ve[v], vp ^ 1)
                x.vf[v].arrive()
                v += 1
                if v == kst:
                    v = 0
                    vp ^= 1
                yield lambda: True

    def cons(c, i):
        x = C[c]
        q = 0
        qp = 0
        s = 0
        k = 0
        kp = 0
        v = 0
        vp = 0
        while True:
            yield wait(x.qf[q], qp)
            w, mine = x.slot[s]
            if w is None:
                return
            assert x.q[q] == mine
            x.qread[q] += 1
            free = lambda: (x.qread.__setitem__(q, x.qread[q] - 1), x.qe[q].arrive())
            t, t_end = w[1], w[2]

            def K(t, k, kp):
                yield wait(x.kf[k], kp)
                x.kread[k] += 1
                assert x.k[k] == [(mine, t)] * cluster, ("k", x.k[k], (mine, t))
                yield lambda: True

            def relK(k):
                x.kread[k] -= 1
                for d in range(cluster):
                    C[d].ke[k].arrive()

            def V(t, v, vp):
                yield wait(x.vf[v], vp)
                x.vread[v] += 1
                assert x.v[v] == [(mine, t)] * cluster and ((t in w[3]) == bool(x.clr[v])), ("v", x.v[v], (mine, t))
                yield lambda: True

            def relV(v):
                x.vread[v] -= 1
                for d in range(cluster):
                    C[d].ve[v].arrive()

            if i >= warps // 2 and mine % 3 == 0:  # a warpgroup without rows passes by
                free()
                for tt in range(t, t_end):
                    yield from K(tt, k, kp)
                    relK(k)
                    k, kp = adv(k, kp, kst)
                    yield from V(tt, v, vp)
                    relV(v)
                    v, vp = adv(v, vp, kst)
            elif t == t_end:
                free()
            else:
                yield from K(t, k, kp)
                relK(k)
                if t + 1 == t_end:
                    free()
                k += 1
                if k == kst:
                    k = 0
                    kp ^= 1
                for tt in range(t + 1, t_end):
                    yield from K(tt, k, kp)
                    yield from V(tt - 1, v, vp)
                    relK(k)
                    if tt + 1 == t_end:
                        free()
                    k += 1
                    if k == kst:
                        k = 0
                        kp ^= 1
                    yield lambda: True
                    relV(v)
                    v += 1
                    if v == kst:
                        v = 0
                        vp ^= 1
                yield from V(t_end - 1, v, vp)
                relV(v)
                v += 1
                if v == kst:
                    v = 0
                    vp ^= 1
            if i == 0:
                x.done.append(mine)
            yield lambda: True
            assert x.slot[s] == (w, mine)
            x.wd[s].arrive()
            s = (s + 1) % ws
            q += 1
            if q == qs:
                q = 0
                qp ^= 1

    threads = []
    for c in range(cluster):
        threads += [[teller(c), None], [asker(c, True), None], [asker(c, False), None], [warp1(c), None]] + [
            [cons(c, i), None] for i in range(warps)
        ]
    run(threads, inflight, r, f"seed {seed} cluster {cluster} works {W}")
    want = [i for i in range(myc, npairs) if False]
    if cluster == 2:
        assert C[0].done == C[1].done
    return C[0].done


def main():
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        for cl in (1, 2):
            for qs in (1, 2):
                for late in (False, True):
                    sim(seed, cl, qs, late=late)
                sim(seed, cl, qs, together=4)
                sim(seed, cl, qs, late=False, when_done=True)
    print("ok")


if __name__ == "__main__":
    main()
