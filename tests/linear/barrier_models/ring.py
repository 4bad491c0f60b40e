"""Model of the barriers of the delta rule's ring (device/sm90/linear_chunk_ring.cuh), a warp a thread.

No deadlock, no stage or place overwritten while it is read, nothing read before it is there, and nobody counted twice
at a named barrier. Its second run plants faults, each of which must be found.

python tests/linear/barrier_models/ring.py 0 300
"""

# ruff: noqa
# mypy: ignore-errors
import random, sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "fmha" / "barrier_models"))
from machine import Bar, run


class Named:
    """A hardware barrier: warps arrive, some of them wait."""

    def __init__(s, n, name):
        s.n, s.name, s.there, s.generation = n, name, [], 0

    def arrive(s, who):
        assert who not in s.there, ("counted twice", s.name, who)
        s.there.append(who)
        own = s.generation
        if len(s.there) == s.n:
            s.there, s.generation = [], s.generation + 1
        return lambda: s.generation > own


FAULTS = ["loaders", "one barrier", "values", "early release", "stored", "outs there", "state free", "scaled"]


def sim(seed, stages, groups, loaders, fault=None):
    r = random.Random(seed)
    chunks, warps = r.randint(1, 12), 4
    full = [Bar(2, f"full{i}") for i in range(stages)]
    empty = [Bar(warps * (groups + 1), f"empty{i}") for i in range(stages)]
    scaled = [Bar(1, f"scaled{i}") for i in range(stages)]
    state_there = [Named(2 * warps, f"state there {v}") for v in range(groups)]
    state_free = [Named(2 * warps, f"state free {v}") for v in range(groups)]
    updates_there = [[Named(2 * warps, f"updates there {v} {i}") for i in range(2)] for v in range(groups)]
    values_read = [Named(warps, f"values read {v}") for v in range(groups)]
    outs_there = Named(warps, "outs there")
    stage = [None] * stages  # the chunk that it holds
    readers = [0] * stages
    values = [[set() for _ in range(groups)] for _ in range(stages)]  # warps that have still to read theirs
    updates = [[[None] * warps for _ in range(groups)] for _ in range(stages)]
    scales = [None] * stages
    state = [[None] * warps for _ in range(groups)]
    state_readers = [0] * groups
    outs, storing, stored = [None] * warps, [0], []
    inflight = []

    def wait(bar, parity):
        return lambda: bar.done(parity)

    def loader(own):
        for c in range(chunks + 1):
            if c % loaders != own:
                continue
            s, phase = c % stages, c // stages % 2
            yield wait(empty[s], phase ^ 1)
            if c == chunks:
                assert readers[s] == 0
                stage[s] = "end"
                full[s].arrive(2)
                return
            full[s].expect(5)

            def land(s=s, c=c):
                assert readers[s] == 0, ("overwritten while read", s, c)
                stage[s] = c
                for v in range(groups):
                    values[s][v] = set(range(warps))
                    updates[s][v] = [None] * warps
                full[s].add(5)

            inflight.append(land)
            full[s].arrive()

    def scaler():
        for c in range(chunks):
            s = c % stages
            yield wait(full[s], c // stages % 2)
            assert stage[s] == c
            readers[s] += 1
            yield lambda: True
            scales[s] = c
            readers[s] -= 1
            scaled[s].arrive()

    def states(v, w):
        who = ("states", v, w)
        yield wait(full[0], 0)
        c = 0
        while stage[c % stages] != "end":
            s = c % stages
            assert stage[s] == c, ("states", stage[s], c)
            readers[s] += 1
            yield lambda: True
            if fault != "state free" or c == 0:
                yield state_free[v].arrive(who)
            assert state_readers[v] == 0, "state overwritten while read"
            state[v][w] = c
            state_there[v].arrive(who)
            yield lambda: True
            values[s][v].discard(w)
            yield lambda: True
            if fault != "values":
                yield values_read[v].arrive(who)
            assert not values[s][v], ("values overwritten while read", s, c)
            updates[s][v][w] = c
            yield lambda: True
            updates_there[v][0 if fault == "one barrier" else c % 2].arrive(who)
            if fault == "early release":
                readers[s] -= 1
                empty[s].arrive()
            yield wait(full[(c + 1) % stages], (c + 1) // stages % 2)
            if fault != "early release":
                assert stage[s] == c
                readers[s] -= 1
                empty[s].arrive()
            c += 1
        yield state_free[v].arrive(who)

    def outputs(w):
        who = ("outputs", w)
        for v in range(groups):
            state_free[v].arrive(who)
        c, held = 0, False
        while True:
            s = c % stages
            yield wait(full[s], c // stages % 2)
            if stage[s] == "end":
                break
            assert stage[s] == c, ("outputs", stage[s], c)
            readers[s] += 1
            if fault != "scaled":
                yield wait(scaled[s], c // stages % 2)
            assert scales[s] == c, "scales are not there"
            if w == 0 and fault != "stored":  # the others meet it where states are there
                yield lambda: storing[0] == 0
            for v in range(groups):
                yield state_there[v].arrive(who)
                assert state[v] == [c] * warps, ("state", state[v], c)
                state_readers[v] += 1
            for v in range(groups):
                yield lambda: True
                state_readers[v] -= 1
                state_free[v].arrive(who)
            if fault == "early release":
                readers[s] -= 1
                empty[s].arrive()
            for v in range(groups):
                yield updates_there[v][0 if fault == "one barrier" else c % 2].arrive(who)
                assert updates[s][v] == [c] * warps, ("updates", updates[s][v], c)
            yield lambda: True
            if fault != "early release":
                readers[s] -= 1
                empty[s].arrive()
            assert storing[0] == 0, "outputs overwritten while they are stored"
            outs[w] = c
            yield lambda: True
            if w == 0:
                if fault != "outs there":
                    yield outs_there.arrive(who)
                storing[0] += 1

                def land(c=c):
                    assert outs == [c] * warps, ("stored", outs, c)
                    storing[0] -= 1
                    stored.append(c)

                inflight.append(land)
            elif fault != "outs there":
                outs_there.arrive(who)
            c += 1
        if w == 0:
            yield lambda: storing[0] == 0

    threads = [[loader(i), None] for i in range(loaders)] + [[scaler(), None]]
    threads += [[states(v, w), None] for v in range(groups) for w in range(warps)]
    threads += [[outputs(w), None] for w in range(warps)]
    run(threads, inflight, r, f"seed {seed} stages {stages} groups {groups} chunks {chunks}")
    assert stored == list(range(chunks))


def main():
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for seed in range(first, last):
        for stages in (2, 3, 4):
            for groups in (1, 2):
                for loaders in {stages, 2 if stages == 4 else stages}:
                    sim(seed, stages, groups, loaders)
    for fault in FAULTS:
        found = 0
        for seed in range(first, last):
            try:
                sim(seed, 2 if fault == "loaders" else 3, 2, 3, fault)
            except (AssertionError, RuntimeError):
                found += 1
        print(f"{fault}: found in {found} of {last - first}")
        assert found > 0
    print("ok")


if __name__ == "__main__":
    main()
