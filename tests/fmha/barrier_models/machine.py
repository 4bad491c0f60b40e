"""What the models of barriers have in common: an mbarrier, places of a ring, and threads and copies in any order."""

# ruff: noqa
# mypy: ignore-errors


class Bar:
    def __init__(s, n, name):
        s.n = n
        s.pend = n
        s.tx = 0
        s.phase = 0
        s.name = name

    def check(s):
        if s.pend == 0 and s.tx == 0:
            s.phase ^= 1
            s.pend = s.n

    def arrive(s, k=1):
        assert s.pend >= k, ("too many arrivals", s.name)
        s.pend -= k
        s.check()

    def expect(s, b):
        s.tx += b
        assert s.pend >= 1, ("expect: too many", s.name)
        s.pend -= 1
        s.check()

    def add(s, b):
        s.tx -= b
        s.check()

    def done(s, parity):
        return s.phase != parity


def wait(bar, parity):
    """What a thread yields that waits for a phase."""
    return lambda: bar.done(parity)


def step(place, size):
    """The next place of a ring: [stage, parity]."""
    place[0] += 1
    if place[0] == size:
        place[0] = 0
        place[1] ^= 1


def run(threads, inflight, r, what):
    """Steps threads, and lands copies, in any order, until all threads are done.

    threads: [generator, what it waits for] each; a generator yields a function that says whether it may go on.
    inflight: functions that land a copy; threads add to it.
    """
    alive = threads[:]
    bias = r.random()
    while alive:
        moved = False
        order = alive[:]
        r.shuffle(order)
        if inflight and r.random() < bias:
            inflight.pop(0 if r.random() < 0.5 else r.randrange(len(inflight)))()
            moved = True
        for th in order:
            if th[1] is None or th[1]():
                try:
                    th[1] = next(th[0])
                except StopIteration:
                    alive.remove(th)
                moved = True
                if r.random() < 0.7:
                    break
        if not moved:
            if inflight:
                inflight.pop(r.randrange(len(inflight)))()
                continue
            raise RuntimeError(f"deadlock {what}")
