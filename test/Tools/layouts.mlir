// --emit layouts compiles and simulates the step on each mesh of --gpus devices
// that the captures allow: what the model's own axes leave is shared out
// between shards and replicas. The fastest is first.

// RUN: split-file %s %t
// RUN: fsdp-opt %t/one.mlir --captures %t/two.mlir --emit layouts --gpus 4 --device h100 | FileCheck %s
// CHECK: tokens/s a rank  step time, ms  exposed, ms   MFU, %  peak a rank  mesh
// CHECK-DAG: {{[1-9][0-9.]* +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9]+ B  shard 4$}}
// CHECK-DAG: B  replicate 2 x shard 2{{$}}
// CHECK-DAG: B  replicate 4 x shard 1{{$}}
// CHECK-DAG: B  shard 2 x tensor 2{{$}}
// CHECK-DAG: B  replicate 2 x shard 1 x tensor 2{{$}}

// Each is what its statistics say.
// RUN: fsdp-opt %t/two.mlir --emit layouts --gpus 4 --device %S/Inputs/links.yaml > %t/layouts
// RUN: fsdp-opt %t/two.mlir --world-size 2 --emit stats --device %S/Inputs/links.yaml >> %t/layouts
// RUN: FileCheck %s --check-prefix=SAME --input-file %t/layouts
// SAME: {{^ *[0-9.]+ +}}[[SECONDS:[0-9]+\.[0-9]+]] {{.*}} shard 2 x tensor 2
// SAME: step time                   [[SECONDS]] ms

// A model that 2 ranks share does not fit on 3.
// RUN: not fsdp-opt %t/two.mlir --emit layouts --gpus 3 2>&1 | FileCheck %s --check-prefix=ODD
// ODD-DAG: no mesh of 3: {{.*}}two.mlir: 2 ranks share a copy of the model
// ODD-DAG: error: --emit layouts: expected a mesh of 3 devices with a plan, found none

// A mesh on which the policy has no plan is listed with the reason.
// RUN: fsdp-opt %t/one.mlir --config %t/half.yaml --emit layouts --gpus 4 | FileCheck %s --check-prefix=HALF
// HALF: shard 4{{$}}
// HALF: no plan: replicate 4 x shard 1: expected an integer "reshard_after_forward" that is a factor of the 1 ranks of axis "shard", got: 2

// A budget counts for each.
// RUN: fsdp-opt %t/one.mlir --config %t/budget.yaml --emit layouts --gpus 4 | FileCheck %s --check-prefix=BUDGET
// BUDGET: B  shard 4{{$}}
// BUDGET: no plan: replicate 4 x shard 1: {{.*}}expected a step of at most 300 B a rank, got: 304 B

// RUN: not fsdp-opt %t/one.mlir --emit layouts 2>&1 | FileCheck %s --check-prefix=NONE
// NONE: --gpus: expected at least 1 and at most 1048576 with --emit layouts, got 0
// RUN: not fsdp-opt %t/one.mlir --emit stats --gpus 4 2>&1 | FileCheck %s --check-prefix=STATS
// STATS: --gpus: expected --emit layouts
// RUN: not fsdp-opt %t/one.mlir --emit layouts --gpus 4 --world-size 4 2>&1 | FileCheck %s --check-prefix=WORLD
// WORLD: --world-size: expected --gpus with --emit layouts
// RUN: not fsdp-opt %t/one.mlir --config %t/mesh.yaml --emit layouts --gpus 4 2>&1 | FileCheck %s --check-prefix=MESH
// MESH: one.mlir: expected a capture and a policy without a mesh, which --emit layouts chooses
// RUN: cat %t/half.yaml | not fsdp-opt %t/one.mlir --config /dev/stdin --emit layouts --gpus 4 2>&1 | FileCheck %s --check-prefix=PIPE
// PIPE: --config: expected a file that can be read several times with --emit layouts, got /dev/stdin
// RUN: not fsdp-opt %t/one.mlir --captures %t/none.pt --emit layouts --gpus 4 2>&1 | FileCheck %s --check-prefix=MISSING
// MISSING: none.pt: cannot be read: No such file or directory

//--- half.yaml
reshard_after_forward: 2
//--- budget.yaml
schedule: {device: h100, memory_budget: 300}
//--- mesh.yaml
mesh: {replicate: 2}
//--- one.mlir
fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
//--- two.mlir
module attributes {fsdp.model_parallel = {axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}], data_stride = 2 : i64, ranks = 2 : i64}} {
fsdp.param @w : tensor<2xf32>
fsdp.program @train_step(%x: tensor<2xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<2xf32>
  fsdp.phase forward
  %part = aten.call "aten::dot"(%x, %w) : (tensor<2xf32>, tensor<2xf32>) -> tensor<f32>
  %loss = aten.call "_c10d_functional::all_reduce"(%part, "sum", "tensor") {schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<f32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<2xf32>, tensor<f32>) -> tensor<2xf32>
  fsdp.gradients [@w] %g : tensor<2xf32>
  fsdp.return %loss : tensor<f32>
}
}
