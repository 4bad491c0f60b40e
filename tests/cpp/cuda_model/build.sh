#!/bin/bash
# build.sh OUT.so: compiles the model with g++; needs a configured build/ for the flags and CUDA's headers.
set -e
here=$(cd "$(dirname "$0")" && pwd); root=$here/../../..; out=$(realpath -m "$1"); work=$(mktemp -d)
mkdir -p $work/csrc; cp -r $root/csrc/. $work/csrc/
# Shared variables of a kernel are static: CTAs run one after another.
find $work/csrc/device $work/csrc/conv_step $work/csrc/ssd \( -name 'linear_*.cuh' -o -name ring.cuh -o -name block_scan.cuh -o -name step.cuh \) -exec sed -i -E 's/extern __shared__ __align__\([0-9]+\) (unsigned char|float) (memory|shared)\[\];//; s/__shared__ /static /' {} +
rm $work/csrc/device/sm80/{mma,cp_async,log2}.cuh $work/csrc/device/common/{launch_dependent,semaphore}.cuh \
  $work/csrc/device/sm90/{barrier,cluster,copy,proxy,store_box,wgmma_rows_registers}.cuh \
  $work/csrc/device/sm90/tensor_map.h
torch=$(python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
cuda=${CUDA_HOME:-/usr/local/cuda}
g++ -std=c++20 -O2 -w -fPIC -shared -DTORCH_TARGET_VERSION=0x020a000000000000 -I$here -I$work/csrc -isystem $torch/include \
  -isystem $cuda/include $here/prefill_model.cpp $root/csrc/torch_bindings/check.cpp -L$torch/lib -ltorch_cpu -o $out
rm -r $work
