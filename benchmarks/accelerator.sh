#!/usr/bin/env bash
# The checks that need one accelerator: MobileNet's round of 100 clients x 500 images by
# dtype and chunk, NIW beside FedAvg, and FedAvg's roofline. Eight compilations of about
# 20 s each by the prototypes' figures; not run on an accelerator so far, rehearsed on
# CPU.
#
#     benchmarks/accelerator.sh OUT_FOLDER [further flags of round_time.py]
#
# Small enough for a rehearsal on CPU (about ten minutes on 2 cores):
#
#     benchmarks/accelerator.sh /tmp/out --clients=2 --participants=2 \
#         --client_examples=50 --rounds=1 --warmup=1
set -euo pipefail
cd "$(dirname "$0")/.."
out=$1
shift
mkdir -p "$out"
for algorithm in fedavg fedhb_niw; do
  for dtype in bfloat16 float32; do
    for chunk in 0 20; do
      python benchmarks/round_time.py --synthetic --image_shape=32,32,3 \
        --model=mobilenet --algorithm="$algorithm" --dtype="$dtype" \
        --chunk_size="$chunk" --clients=100 --participants=100 \
        --client_examples=500 --rounds=5 --warmup=2 "$@" \
        --out="$out/mobilenet_${algorithm}_${dtype}_chunk${chunk}"
    done
  done
done
