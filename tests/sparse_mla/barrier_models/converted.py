"""Model of the barriers of lists whose rows are converted by their loaders (csrc/mla_decode/sm90/converted/).

Every order of every step of two loading warps, both groups and the copy engine, over works of one to four tiles: nobody
stands still, nothing is written while it is read, and everybody reads what belongs to his tile.

python tests/sparse_mla/barrier_models/converted.py
"""

# ruff: noqa
# mypy: ignore-errors
import itertools, sys

ROPE, LEFT, RIGHT = range(3)
WARPS = (0, 3)  # of four: one like the others, and the one that asks for queries

# Barriers and how many arrive: a group or warp counts once.
COUNTS = {("full", b, part): len(WARPS) for b in range(2) for part in range(3)}
COUNTS |= {("empty", b, part): 1 for b in range(2) for part in range(3)}
COUNTS |= {"queries": 3, "queries empty": 2, "rope empty": 2, "converted": 2, "stored": 1, "sums": 2, "odd": 1}
NAMED = ("scores 0", "probabilities 0")
NAMES = list(COUNTS)
AT = {name: i for i, name in enumerate(NAMES)}


def loader(warp, works):
    parity = [0, 0]
    for count, (tiles, _) in enumerate(works):
        if warp == 3:
            yield "wait", "queries empty", count & 1 ^ 1
            yield "arrive", "queries"
            yield "post", ("latent", count)
        for t in range(tiles):
            b = t & 1
            first, second = (LEFT, RIGHT) if b == 0 else (RIGHT, LEFT)
            free = parity[b] ^ 1

            def copy(part):
                yield "write", (b, part, warp), "bytes"

            yield "wait", ("empty", b, ROPE), free
            yield from copy(ROPE)
            yield "wait", ("empty", b, first), free
            yield from copy(first)
            yield "write", ("bits", b, warp), (count, t)
            for _ in range(2):
                yield "test", ("empty", b, second), free
                yield from copy(second)
            yield "write", (b, ROPE, warp), (count, t)
            yield "write", (b, first, warp), (count, t)
            yield "arrive", ("full", b, ROPE)
            yield "arrive", ("full", b, first)
            yield "unless tested", ("empty", b, second), free
            yield from copy(second)
            yield "write", (b, second, warp), (count, t)
            yield "arrive", ("full", b, second)
            parity[b] ^= 1
            if t == 0 and warp == 3:
                yield "wait", "rope empty", count & 1 ^ 1
                yield "post", ("rope", count)


def engine(works):
    for count in range(len(works)):
        for what in ("latent", "rope"):
            yield "posted", (what, count)
            yield "write", ("q", what), count
            yield "arrive", "queries"


def group(g, works):
    own = LEFT if g == 0 else RIGHT
    parity, stored = [0, 0], -1

    def tile(b, parts, value, begin):
        for part in parts:
            if begin:
                yield "wait", ("full", b, part), parity[b]
            for warp in WARPS:
                yield ("read" if begin else "done"), (b, part, warp), value

    def finish():
        yield "done", ("out", stored, own), None
        yield "arrive", ("empty", stored, own)

    for count, (tiles, by_map) in enumerate(works):
        keeps = lambda t: by_map and t + 1 == tiles
        if count > 0:
            yield ("wait", "stored", count & 1 ^ 1) if g == 0 else ("arrive", "stored")
        if stored >= 0 and (g == 1 or stored == 0):
            yield from finish()
            stored = -1
        yield "wait", "queries", count & 1
        yield "read", ("q", "latent"), count
        yield "done", ("q", "latent"), count
        yield "arrive", "converted"
        yield "wait", "converted", count & 1
        yield "read", ("q", "rope"), count
        yield "done", ("q", "rope"), count
        for t in range(0, tiles, 2):
            has_odd, last = t + 1 < tiles, t + 2 >= tiles
            even, odd = (count, t), (count, t + 1)

            def scores(b, value):
                yield "read", ("q", "latent"), count
                yield from tile(b, (ROPE, LEFT, RIGHT), value, True)

            def scored(b, value):
                yield from tile(b, (ROPE, LEFT, RIGHT), value, False)
                yield "done", ("q", "latent"), count
                yield "arrive", ("empty", b, ROPE)

            def values(b, value):
                for warp in WARPS:
                    yield "read", (b, own, warp), value

            def valued(b, value):
                for warp in WARPS:
                    yield "done", (b, own, warp), value

            def bits(b, value):
                for warp in WARPS:
                    yield "read", ("bits", b, warp), value
                    yield "done", ("bits", b, warp), value

            if g == 0:
                yield from scores(0, even)
                if has_odd:
                    yield "meet", "scores 0"
                if stored >= 0:
                    yield from finish()
                    stored = -1
                yield from scored(0, even)
                if last:
                    yield "arrive", "queries empty"
                yield from values(0, even)
                yield from bits(0, even)
                yield "free", ("out", "P0", 1), None
                yield "write", "P0", even
                yield "meet", "probabilities 0"
                yield from valued(0, even)
                if not keeps(t):
                    yield "arrive", ("empty", 0, own)
                parity[0] ^= 1
                if has_odd:
                    yield "wait", "odd", parity[1]
                    yield "read", ("q", "rope"), odd  # where P1 lies
                    yield "wait", ("full", 1, own), parity[1]
                    yield from values(1, odd)
                    yield "done", ("q", "rope"), odd
                    yield from valued(1, odd)
                    if not keeps(t + 1):
                        yield "arrive", ("empty", 1, own)
                    parity[1] ^= 1
            else:
                if has_odd:
                    yield "met", "scores 0"
                    yield from scores(1, odd)
                    yield from scored(1, odd)
                    if last:
                        yield "arrive", "queries empty"
                    yield from values(1, odd)
                    yield from bits(1, odd)
                else:
                    yield "arrive", "queries empty"
                yield "met", "probabilities 0"
                yield "read", "P0", even
                yield "wait", ("full", 0, own), parity[0]
                yield from values(0, even)
                parity[0] ^= 1
                if not has_odd:
                    yield "done", "P0", even
                    yield from valued(0, even)
                    if not keeps(t):
                        yield "arrive", ("empty", 0, own)
                    continue
                yield "write", ("q", "rope"), odd
                yield "arrive", "odd"
                yield "done", "P0", even
                yield from valued(0, even)
                yield "arrive", ("empty", 0, own)
                yield from valued(1, odd)
                if not keeps(t + 1):
                    yield "arrive", ("empty", 1, own)
                parity[1] ^= 1
        yield "arrive", "rope empty"
        yield "arrive", "sums"
        yield "wait", "sums", count & 1
        if by_map:
            stored = (tiles - 1) % 2
            for warp in WARPS:
                yield "write", (stored, own, warp), "rows"
            yield "read", ("out", stored, own), None
        else:
            # Rows are staged where P0 is.
            yield "free", "P0", None
            yield "read", ("out", "P0", g), None
            yield "done", ("out", "P0", g), None
    if stored >= 0:
        yield from finish()


def programs(works):
    return [list(loader(w, works)) for w in WARPS] + [list(engine(works)), list(group(0, works)), list(group(1, works))]


def explore(works):
    """Every state that any order of steps reaches. A step runs up to what may wait, or ends a read."""
    actors = programs(works)
    start = (
        (0,) * len(actors),
        (False,) * len(actors),
        tuple((COUNTS[n], 0) for n in NAMES),
        (0,) * len(NAMED),
        frozenset(),
        (),
        (),
    )
    seen, todo = {start}, [start]

    def step(state, a):
        pcs, tested, bars, named, posts, cells, reads = state
        program, pc = actors[a], pcs[a]
        if pc == len(program):
            return None
        bars, named, posts, cells, reads = list(bars), list(named), set(posts), dict(cells), dict(reads)
        flag, moved, was = tested[a], False, None

        def done(bar, parity):
            return bars[AT[bar]][1] != parity

        while pc < len(program):
            op, what, *more = program[pc]
            joins = op in ("read", "write", "free") or (op, was) in (
                ("done", "done"),
                ("arrive", "done"),
                ("arrive", "arrive"),
            )
            if moved and not joins:
                break
            if op == "wait" and not done(what, more[0]):
                break
            elif op == "test":
                asked, flag = flag and program[pc - 2][0] == "test", done(what, more[0])
                if asked or not flag:
                    pc += 1  # the copy is under way, or comes later
            elif op == "unless tested":
                if flag:
                    pc += 1
                elif not done(what, more[0]):
                    break
            elif op == "arrive":
                left, phase = bars[AT[what]]
                assert left > 0, what
                bars[AT[what]] = (left - 1, phase) if left > 1 else (COUNTS[what], phase ^ 1)
            elif op == "meet":
                i = NAMED.index(what)
                assert named[i] == 0, ("arrived twice", what)
                named[i] = 1
            elif op == "met":
                i = NAMED.index(what)
                if not named[i]:
                    break
                named[i] = 0
            elif op == "post":
                posts.add(what)
            elif op == "posted":
                if what not in posts:
                    break
                posts.discard(what)
            elif op == "free":
                assert not reads.get(what), ("read", what)
            elif op == "write":
                assert not reads.get(what), ("written while read", what, more)
                cells[what] = more[0]
            elif op == "read":
                if what[0] != "out":
                    assert cells.get(what) == more[0], ("reads", cells.get(what), "at", what, "for", more[0])
                reads[what] = reads.get(what, 0) + 1
            elif op == "done":
                if what[0] != "out":
                    assert cells.get(what) == more[0], ("changed", what)
                reads[what] -= 1
                if not reads[what]:
                    del reads[what]
            was, moved = op, True
            pc += 1
        if not moved:
            return None
        move = lambda old, new: old[:a] + (new,) + old[a + 1 :]
        return (
            move(pcs, pc),
            move(tested, flag),
            tuple(bars),
            tuple(named),
            frozenset(posts),
            tuple(sorted(cells.items(), key=repr)),
            tuple(sorted(reads.items(), key=repr)),
        )

    while todo:
        state = todo.pop()
        following = [n for a in range(len(actors)) if (n := step(state, a)) is not None]
        if not following:
            at = [p[i] if i < len(p) else "end" for p, i in zip(actors, state[0])]
            assert all(x == "end" for x in at), ("stands still", works, at)
        for n in following:
            if n not in seen:
                seen.add(n)
                todo.append(n)
    return len(seen)


if __name__ == "__main__":
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    states = 0
    for count in range(1, most + 1):
        for tiles in itertools.product(range(1, 5), repeat=count):
            for by_map in itertools.product((False, True), repeat=count):
                works = tuple(zip(tiles, by_map))
                states += explore(works)
        print(f"{count} works: {states} states, nothing found", flush=True)
