#!/bin/bash
# build.sh OUT: compiles the model of csrc/fmha/cuda with g++; needs CUDA's headers.
set -e
here=$(cd "$(dirname "$0")" && pwd); model=$(dirname "$here"); root=$here/../../../..; out=$(realpath -m "$1"); work=$(mktemp -d)
mkdir -p $work/csrc $work/model/device; cp -r $root/csrc/. $work/csrc/; cp -r $here/device/. $work/model/device/
rm -f $work/csrc/device/sm80/{mma,cp_async,fp8_rows,shared_pieces}.cuh $work/csrc/device/sm90/wgmma.cuh \
  $work/csrc/device/common/{semaphore,launch_dependent}.cuh
cp $model/device/common/{semaphore,launch_dependent}.cuh $work/csrc/device/common/
cp $model/device/sm80/mma.cuh $work/csrc/device/sm80/
cd $work/csrc/fmha
sed -i 's/extern __shared__ __align__(128) char shared_memory\[\];/char* const shared_memory = reinterpret_cast<char*>(memory);/' cuda/kernel.cuh
sed -i -E 's/asm\("rcp.approx.ftz.f32.*/y = 1.f \/ (exp2_approx(x * two_over_cap_log2) + 1.f);/; s/asm volatile\("" : .*shared_.*/ /' cuda/softmax.cuh cuda/attend.cuh
sed -i 's/asm volatile("bar.sync %0, %1;".*/__syncthreads();/' sm90/merge.cuh
${CXX:-g++} -std=c++20 -O1 -w -I$work/model -I$model -I$work/csrc -isystem ${CUDA_HOME:-/usr/local/cuda}/include $here/model.cpp -o $out
rm -r $work
