#!/bin/bash
# Right and fast? Random batches whose heads go in pairs, then FA3 in turns with tiles that make pairs and tiles that do not.
set -u
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH=python
timeout -k 2 90 python tests/fmha/fuzz_pairs.py 40
for tile_q in 32 64 128; do
  timeout -k 2 60 python benchmarks/fmha_variants.py --tile-q "$tile_q" --cells 16k,16kfull,16x1k,1x1k,ragged,ext64,64on64k,128x128
done
timeout -k 2 60 python benchmarks/fmha_variants.py --cells ext1,64x8,ext8,kvfp8
