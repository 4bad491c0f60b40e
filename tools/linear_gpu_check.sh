#!/bin/bash
# What a GPU must show of the linear kernels: right, clean, then fast. Run in the root of a built checkout.
# Half of the time is the CPU's, for what is expected: a thread each, or many processes wait for one another.
export PYTHONPATH=$PWD/python PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
some="(float64 and prefill and (0- or 3- or 7-)) or decay_stays or is_nothing or (drafts_gives and (1- or 5-))"
python -m pytest -q -n 4 -p no:cacheprovider -m gpu tests/linear --maxfail=25
ATTNOPS_CUDA_ARCH=80 python -m pytest -q -n 4 -p no:cacheprovider -m gpu tests/linear/test_prefill.py --maxfail=25
python -m tests.fuzz --seed 1 --seconds 60 --device cuda --jobs 4 --only "linear prompts,linear drafts,linear steps"
PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --print-limit 5 \
  python -m pytest -q -x -p no:cacheprovider -m gpu tests/linear -k "$some"
compute-sanitizer --tool racecheck --print-limit 5 \
  python -m pytest -q -x -p no:cacheprovider -m gpu tests/linear -k "(decay_stays and dtype1) or (drafts_gives and 1-)"
python benchmarks/bench_linear.py --peers  # SGLang and FLA, if they are on PYTHONPATH
