"""The main job: two decoders serve a batch of requests over paged attention, an encoder ranks sentences by meaning.

Every token is checked against plain PyTorch with contiguous keys and values; a difference ends the demo with an error.

    python examples/demo.py                     # the best backend of this machine
    python examples/demo.py --backend torch_native --requests 4
    python examples/demo.py --speculate         # greedily, with trees of drafts (GQA) or chains (MLA)
    python examples/demo.py --graphs full       # decode steps in CUDA graphs; also segments, piecewise
    python examples/demo.py --corrupt-page      # spoils one cached page while serving: the check must fail
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path

# Read when torch's thread pool starts. Threads that spin while they wait slow a busy machine down, by five and more.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import attnops
import torch
from attnops.backends import Selection, detect_machine
from attnops.backends.registry import NOT_BUILT, registered_names
from attnops.backends.select import candidates, reasons_against
from attnops.types import AttentionSpec
from models import GqaModel, MlaModel, ModelConfig, encode, load_model
from models.draft import load_draft
from prompts import PROMPTS
from serving import (
    MODES,
    CheckFailed,
    Engine,
    HeadDrafts,
    LookupDrafts,
    ModelRunner,
    Request,
    SpeculativeEngine,
    Step,
    check_requests,
)
from serving.display import Display
from tqdm import tqdm

WEIGHTS = Path(__file__).parent / "weights"
CONTEXT = ModelConfig.max_context  # of both models
NAMES = {"gqa": "grouped-query attention (GQA)", "mla": "latent attention (MLA), absorbed"}


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--models", nargs="*", choices=NAMES, default=list(NAMES), help="decoders to run")
    parser.add_argument("--no-encoder", action="store_true", help="leave the encoder out")
    parser.add_argument("--backend", default="auto", help="auto, intel_amx, torch_native, ...")
    parser.add_argument("--device", default="auto", help="auto: cuda where there is one, else cpu")
    auto = "auto: float32 on a CPU, where tokens must be the same; bfloat16 on a GPU"
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help=auto)
    graphs = "how steps run: full, segments (CUDA only), piecewise (torch.compile), off (eagerly)"
    parser.add_argument("--graphs", default="off", choices=MODES, help=graphs)
    compilers = ["eager", "aot_eager", "inductor"]
    parser.add_argument("--compiler", default="eager", choices=compilers, help="of the pieces of --graphs piecewise")
    parser.add_argument("--requests", type=int, default=len(PROMPTS), help="how many; prompts repeat beyond 10")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="of the longest request")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    parser.add_argument("--top-p", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    page_size = "tokens per page; 0: 64 on a GPU, as its MLA kernels want it, 16 on a CPU"
    parser.add_argument("--page-size", type=int, default=0, help=page_size)
    parser.add_argument("--pool-tokens", type=int, default=8192, help="tokens that the paged cache holds")
    parser.add_argument("--chunk", type=int, default=256, help="most tokens per step")
    parser.add_argument("--max-batch", type=int, default=16, help="most requests that run at the same time")
    parser.add_argument("--speculate", action="store_true", help="verify drafts: a draft head's trees, MLA: chains")
    parser.add_argument("--topk", type=int, default=4, help="of --speculate: branches of a draft")
    parser.add_argument("--draft-steps", type=int, default=5, help="of --speculate: tokens of a branch")
    parser.add_argument("--draft-tokens", type=int, default=16, help="of --speculate: of a tree, with its root")
    parser.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt anew")
    parser.add_argument("--corrupt-page", action="store_true", help="spoil one cached page, to see the check fail")
    parser.add_argument("--quiet", action="store_true", help="results only")
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if torch.cuda.is_available() else "cpu"
    check_options(parser, options)
    on_cuda = torch.device(options.device).type == "cuda"
    if options.page_size == 0:
        options.page_size = 64 if on_cuda else 16
    if options.dtype == "auto":
        options.dtype = "bfloat16" if on_cuda else "float32"
    options.dtype = getattr(torch, options.dtype)
    if options.speculate:
        options.temperature = 0.0  # what greedy text proves
    return options


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with a message when the options fit no run."""
    names = ["auto", *registered_names(), *NOT_BUILT]
    on_cuda = torch.device(options.device).type == "cuda"
    room = CONTEXT - max(len(encode(prompt.text)) for prompt in PROMPTS)
    for holds, message in (
        (options.backend in names, f"--backend must be one of {', '.join(names)}"),
        (
            on_cuda or options.graphs in ("piecewise", "off"),
            f"--graphs {options.graphs} records CUDA graphs, but --device is {options.device}; use piecewise or off",
        ),
        (
            options.compiler == "eager" or options.graphs == "piecewise",
            f"--compiler {options.compiler} compiles pieces: it needs --graphs piecewise",
        ),
        (
            options.graphs in ("off", "full") or not options.speculate,
            "--speculate captures whole steps, or none: it needs --graphs full or off",
        ),
        (
            min(options.topk, options.draft_steps) >= 1 and options.draft_tokens >= 2,
            "--topk and --draft-steps must be at least 1, --draft-tokens at least 2",
        ),
        (options.requests > 0, "--requests must be at least 1"),
        (0 < options.max_new_tokens <= room, f"--max-new-tokens must be from 1 to {room}"),
        (options.page_size >= 0, "--page-size must be at least 1, or 0 for what fits the device"),
        (options.pool_tokens >= CONTEXT, f"--pool-tokens must be at least {CONTEXT}, what one request may need"),
        (0 < options.max_batch <= options.chunk, "--chunk must be at least --max-batch, and that at least 1"),
    ):
        if not holds:
            parser.error(message)


def make_requests(options: argparse.Namespace) -> list[Request]:
    requests = []
    for index in range(options.requests):
        prompt = PROMPTS[index % len(PROMPTS)]
        again = index // len(PROMPTS)
        request = Request(
            id=index + 1,
            prompt=encode(prompt.text),
            max_new_tokens=math.ceil(options.max_new_tokens * prompt.share),
            arrival=prompt.arrival + 40 * again,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed + index,
        )
        requests.append(request)
    return requests


def serve(kind: str, options: argparse.Namespace) -> None:
    """Serves all requests with one decoder, prints texts and figures, and checks every token."""
    model = load_model(WEIGHTS / f"{kind}.safetensors", options.dtype, options.device)
    drafts = make_drafts(model, options)
    runner = ModelRunner(
        model,
        page_size=options.page_size,
        pool_tokens=options.pool_tokens,
        max_requests=options.max_batch,
        chunk=options.chunk,
        backend=options.backend,
        graphs="off" if drafts else options.graphs,
        compiler=options.compiler,
        drafts=drafts.num_tokens if drafts else 1,
        lookahead=drafts.lookahead if drafts else 0,
    )
    config = model.config
    heads = f"{config.num_heads} query heads" + (
        f", {config.num_kv_heads} K/V heads of {config.head_dim}"
        if isinstance(model, GqaModel)
        else ", latents of 512 + 64"
    )
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title(f"A byte-level decoder with {NAMES[kind]}")
    line(
        "model",
        f"{parameters / 1e6:.1f} M parameters, {config.num_layers} layers, {heads}, {dtype_name(options.dtype)}",
    )
    say_backend(runner.selection, runner.spec, options)
    size = runner.pool.nbytes() / 2**20
    line("cache", f"{runner.pool.num_pages} pages of {options.page_size} tokens for all layers, {size:.0f} MiB")
    engine: Engine
    if drafts is not None:
        if isinstance(drafts, HeadDrafts):
            drafts.attach(runner, None if options.backend == "auto" else options.backend)
        cached = not options.no_prefix_cache
        engine = SpeculativeEngine(runner, options.chunk, drafts, cached, graphs=options.graphs == "full")
    else:
        engine = Engine(runner, options.chunk, use_cache=not options.no_prefix_cache)
    say_graphs(engine if isinstance(engine, SpeculativeEngine) else runner, options)
    requests = make_requests(options)
    line("requests", f"{len(requests)}, arriving while others run; at most {options.chunk} tokens per step\n")

    prompts = {request.id: PROMPTS[(request.id - 1) % len(PROMPTS)] for request in requests}
    display = Display(
        requests,
        {request: prompt.title for request, prompt in prompts.items()},
        {request: prompt.shown for request, prompt in prompts.items()},
        quiet=options.quiet,
    )
    spoiler = PageSpoiler() if options.corrupt_page else None

    def after_step(engine: Engine, step: Step) -> None:
        display(engine, step)
        if spoiler is not None:
            spoiler(engine, step)

    begin = time.perf_counter()
    try:
        engine.serve(requests, after_step)
    finally:
        display.close()
    say_figures(engine, requests, time.perf_counter() - begin)
    if isinstance(engine, SpeculativeEngine):
        say_drafts(engine)

    begin = time.perf_counter()
    hide = options.quiet or not sys.stdout.isatty()
    result = check_requests(model, tqdm(requests, desc="  check", file=sys.stdout, leave=False, disable=hide))
    seconds = time.perf_counter() - begin
    for tie in result.ties:
        line("tie", f"{tie}: rounding decided")
    same = f"all {result.tokens}" if not result.ties else f"{result.tokens - len(result.ties)} of {result.tokens}"
    line("check", f"{same} tokens are those of plain PyTorch with contiguous K and V")
    line("", f"(largest difference of a logit {result.largest_difference:.1e}; {seconds:.1f} s)")


def make_drafts(model: GqaModel | MlaModel, options: argparse.Namespace) -> HeadDrafts | LookupDrafts | None:
    if not options.speculate:
        return None
    if not isinstance(model, GqaModel):
        return LookupDrafts(options.draft_steps + 1)
    head = load_draft(WEIGHTS / "gqa_draft.safetensors", model)
    return HeadDrafts(head, options.topk, options.draft_steps, options.draft_tokens, options.page_size)


def say_drafts(engine: SpeculativeEngine) -> None:
    """How many drafts were accepted, by depth."""
    steps = engine.depths.total()
    line("drafts", f"{engine.mean_accepted():.2f} bytes per verify step, of {steps} steps of a request")
    for depth in range(max(engine.depths, default=-1) + 1):
        share = engine.depths[depth] / steps
        line("", f"{depth} accepted {share:6.1%} {'#' * round(50 * share)}")


class PageSpoiler:
    """Once a request decodes, changes the sign of the keys in its first page, in one layer. The check has to notice."""

    def __init__(self) -> None:
        self.page = -1

    def __call__(self, engine: Engine, step: Step) -> None:
        decoding = [request for request in engine.scheduler.running if request.pending == 1]
        if self.page < 0 and decoding:
            self.page = engine.scheduler.pages_of(decoding[0], 1)[0]
            engine.runner.pool.get_key_buffer(0)[self.page].neg_()


def say_backend(selection: Selection, spec: AttentionSpec, options: argparse.Namespace) -> None:
    """Which backend serves, and why not each of the others."""
    machine = detect_machine(options.device)
    chosen = dict.fromkeys([selection.prefill, selection.decode])
    served = (
        " and ".join(chosen)
        if not selection.is_hybrid
        else f"{selection.prefill} for prefill, {selection.decode} for decode"
    )
    why = "asked for" if options.backend != "auto" else "the first in order of preference that serves this model here"
    line("backend", f"{served}: {why}")
    for name in candidates(spec, machine):
        if name not in chosen:
            reasons = selection.rejected.get(name) or reasons_against(name, spec, machine)
            line(
                "", f"not {name}: {'; '.join(reasons) if reasons else 'would serve it, too; comes later in the order'}"
            )


def say_graphs(runner: ModelRunner | SpeculativeEngine, options: argparse.Namespace) -> None:
    """Captures, and says what that took."""
    begin = time.perf_counter()
    report = runner.capture(progress=not options.quiet)
    if report is None:
        return
    seconds = time.perf_counter() - begin
    what = {
        "full": "steps of decoding requests are replayed whole, those with prompts run eagerly",
        "segments": "every step is replayed in segments around eager attention",
        "piecewise": f"every step runs in pieces compiled by {options.compiler!r} around eager attention",
    }[options.graphs]
    recorded = f", {report.total / 2**20:.0f} MiB" if report.pieces else ""
    line("graphs", f"{what}; {len(runner.graphs.sizes)} sizes in {seconds:.1f} s{recorded}")


def say_figures(engine: Engine, requests: list[Request], seconds: float) -> None:
    stats, scheduler = engine.stats, engine.scheduler
    written = sum(len(request.output) for request in requests)
    asked = sum(len(request.prompt) for request in requests)
    reused = sum(request.reused for request in requests)
    line(
        "served", f"{len(requests)} requests, up to {stats.most_running} at a time, {written} bytes in {seconds:.1f} s"
    )
    for name, tokens, steps, spent, of_model in (
        (
            "prefill",
            stats.prefill_tokens + stats.prefill_rode_along,
            stats.prefill_steps,
            stats.prefill_seconds,
            stats.prefill_model_seconds,
        ),
        ("decode", stats.decode_tokens, stats.decode_steps, stats.decode_seconds, stats.decode_model_seconds),
    ):
        beside = f"; {stats.prefill_rode_along} of them decoded beside prompts" if name == "prefill" else ""
        rate = tokens / spent if spent else 0
        line(name, f"{rate:.0f} tokens/s ({tokens} tokens in {steps} steps and {spent:.1f} s{beside})")
        if of_model:
            line("", f"a step of the model takes {statistics.median(of_model) * 1e3:.2f} ms (median)")
    line(
        "pages",
        f"{stats.peak_request_pages} held by running requests at most, {stats.peak_pages} with those kept for reuse, "
        f"of {engine.allocator.num_pages}",
    )
    line(
        "prefixes",
        f"{reused} of {asked} prompt tokens came from the cache ({reused / asked:.0%}); "
        f"{scheduler.cache.evicted_pages} pages evicted, {scheduler.preemptions} requests preempted",
    )


def rank_sentences(options: argparse.Namespace) -> None:
    """Ranks sentences by meaning with the encoder, and compares it with the original implementation."""
    import encoder as enc

    title("A public sentence encoder (all-MiniLM-L6-v2)")
    encoder = enc.Encoder(options.backend, options.device, torch.float32)
    say_backend(encoder.selection, encoder.spec, options)
    texts = [*enc.QUERIES, *enc.SENTENCES]
    lengths = [len(ids) for ids in encoder.tokenize(texts)]
    begin = time.perf_counter()
    embeddings = encoder.embed(texts)
    seconds = time.perf_counter() - begin
    ragged = f"{sum(lengths)} tokens instead of {len(texts) * max(lengths)} padded"
    spread = f"{min(lengths)} to {max(lengths)} tokens"
    line("batch", f"{len(texts)} sentences of {spread}, ragged: {ragged}; {seconds * 1e3:.0f} ms\n")
    queries, sentences = embeddings.split([len(enc.QUERIES), len(enc.SENTENCES)])
    print("      cosine  sentence closest in meaning")
    for query, scores in zip(enc.QUERIES, queries @ sentences.T):
        print(f'      "{query}"')
        for score, index in zip(*(found.tolist() for found in scores.topk(2))):
            print(f"       {score:.3f}  {shorten(enc.SENTENCES[index], 84)}")
    difference = float((embeddings - enc.original_embeddings(encoder.tokenize(texts))).abs().max())
    if not difference <= enc.EMBEDDING_BOUND:
        raise CheckFailed(
            f"encoder: an embedding differs from transformers' BertModel by {difference:.2g}, "
            f"allowed are {enc.EMBEDDING_BOUND:g}"
        )
    print()
    line("check", f"equal to transformers' BertModel on padded sentences (largest difference {difference:.1e})")


def title(text: str) -> None:
    print(f"\n--- {text}", flush=True)


def line(key: str, text: str) -> None:
    print(f"  {key:<9} {text}", flush=True)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3].rstrip() + "..."


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    begin = time.perf_counter()
    machine = detect_machine(options.device)
    kernels = f"kernels for {torch.ops.attnops.cpu_isa()}, {torch.get_num_threads()} threads"
    where = machine.name if machine.device == "cuda" else f"CPU, {kernels}"
    print(f"attnops {attnops.__version__} on {where}; torch {torch.__version__}")
    try:
        for kind in options.models:
            serve(kind, options)
        if not options.no_encoder:
            rank_sentences(options)
    except CheckFailed as failure:
        print(f"\nCHECK FAILED: {failure}", file=sys.stderr, flush=True)
        return 1
    except NotImplementedError as refusal:  # no backend serves what the options ask for; the message says why
        print(f"\n{refusal}", file=sys.stderr, flush=True)
        return 2
    print(f"\nEverything that was served has been checked. {time.perf_counter() - begin:.0f} s in all.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
