#!/usr/bin/env bash
# Compiles the plans of this folder again: test/Inputs/plans/make.sh [FSDP_OPT]
set -euo pipefail
cd "$(dirname "$0")"
root=../../..
opt=$(realpath "${1:-$root/build/bin/fsdp-opt}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

PYTHONPATH=$root/python $root/.venv/bin/python -m fsdp_mlir.capture \
  --model fsdp_mlir.models.llama:llama_debug \
  --inputs 'tokens=int64[1,8]<256' 'targets=int64[1,8]<256' -o "$work/model.pt"

compile() { # NAME WORLD_SIZE OPTIONS, the policy on standard input; kernels are in llama-fused-2 alone
  cat >"$work/$1.yaml"
  "$opt" "$work/model.pt" --config "$work/$1.yaml" --world-size "$2" "${@:3}" --emit plan -o "$work/$1.json"
  mv "$work/$1.json" "$1.json"
}

compile llama-2 2 <<'YAML'
units: [{match: "layers.*"}]
schedule: {fuse: none}
YAML
compile llama-2-fsdp2 2 --memory=device <<'YAML'
units: [{match: "layers.*"}]
schedule: {prefetch: fsdp2, reduce_scatters_in_flight: 1, fuse: none}
YAML
compile llama-hsdp-4 4 --memory=device <<'YAML'
units: [{match: "layers.*"}]
mesh: {replicate: 2}
clip_grad_norm: 1.0
optimizer: {name: adamw, fused: true}
schedule: {fuse: none}
YAML
compile llama-microbatches-2 2 <<'YAML'
units: [{match: "layers.*"}]
gradient_accumulation_steps: 2
schedule: {fuse: none}
YAML
compile llama-activations-2 2 <<'YAML'
units: [{match: "layers.*"}]
activation_offload: {match: layers.0.feed_forward, min_bytes: 1KiB}
schedule: {fuse: none}
YAML
compile llama-fused-2 2 <<'YAML'
units: [{match: "layers.*"}]
YAML
compile llama-offload-2 2 --memory=device <<'YAML'
units: [{match: layers.0, cpu_offload: true}, {match: "layers.*"}]
clip_grad_norm: 1.0
grad_scaler: true
optimizer: {name: adamw, fused: true}
schedule: {fuse: none}
YAML
compile llama-offload-microbatches-2 2 --memory=device <<'YAML'
units: [{match: "layers.*"}]
cpu_offload: true
gradient_accumulation_steps: 2
schedule: {fuse: none}
YAML

PYTHONPATH=$root/python:$root/examples/loops $root/.venv/bin/python -m fsdp_mlir.capture \
  --model parallel_llama:llama --meta --mesh data=2,tensor=2 --loss parallel_llama:loss_fn --loss-parallel \
  --inputs 'tokens=int64[1,32]<128' 'labels=int64[1,32]<128' -o "$work/model.pt"
compile llama-tensor-2 2 --memory=device <<'YAML'
units: [{match: "layers.*"}]
schedule: {fuse: none}
YAML
