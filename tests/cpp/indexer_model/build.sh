#!/bin/bash
# build.sh FOLDER: makes FOLDER/select_check and FOLDER/logits_check, or those in CHECKS. Each is to be run as
# `check SEED CASES`. The kernels' own code, but for instructions of PTX, which the model answers.
set -e
here=$(cd "$(dirname "$0")" && pwd); root=$here/../../..; out=$(realpath -m "$1"); mkdir -p "$out"
rm -rf "$out/csrc"; cp -r "$root/csrc" "$out/csrc"
python3 "$here/adapt.py" "$out/csrc"
for check in ${CHECKS:-select_check logits_check}; do
  g++ -std=c++20 -O2 -w -D__device__= -D__global__= -D__host__= -D__forceinline__=inline -D__noinline__= -I"$here" -I"$out/csrc" \
    -isystem "${CUDA_HOME:-/usr/local/cuda}/include" "$here/$check.cpp" -o "$out/$check"
done
