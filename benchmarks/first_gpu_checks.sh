#!/bin/bash
# What Triton's ops and the wrapped backends need from a GPU, first things first. From the root, with PYTHONPATH=python.
# PEERS: SGLang's Triton kernels and FlashInfer's modules (benchmarks/README.md says where they come from).
set -x
export PYTHONUNBUFFERED=1
# 1. Right: Triton's ops compiled, e5m2 and tables by kernels, every backend, 200 replays.
timeout 120 python -m pytest -q -n 8 -m gpu tests/triton_kernels tests/paged_kv
timeout 240 python -m pytest -q -n 8 -m gpu tests/backends/test_conformance_on_gpu.py --maxfail=30
timeout 60 python -m pytest -q -m gpu tests/backends/test_flashinfer_on_gpu.py
# 2. Fast: beside SGLang's Triton, and the price of fixed splits (bars: 1.15x, 20 %).
timeout 90 python benchmarks/bench_triton.py --out "${O:-.}/triton.jsonl" --commit "$(git rev-parse --short HEAD)"
# 3. FlashInfer called by hand (bar: 3 %).
timeout 60 python benchmarks/bench_flashinfer.py --out "${O:-.}/flashinfer.jsonl"
# 4. Tiles, where a cell lies below its bar.
for i in 0 1 2 3 4 5 6 7; do timeout 100 python benchmarks/tune_triton.py compile $i 8 & done; wait
timeout 60 python benchmarks/tune_triton.py time
