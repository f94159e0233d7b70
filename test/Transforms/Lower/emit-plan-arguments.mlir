// RUN: not fsdp-opt %s --emit plan -o %t 2>&1 | FileCheck %s

// CHECK: emit-plan-arguments.mlir:[[# @LINE + 3]]:1: error: 'fsdp.program' op expected ranked tensors as arguments, got: 'i1'
module attributes {fsdp.level = #fsdp.level<planned>} {
fsdp.mesh @world <["shard"=2]>
fsdp.program @train_step(%x: tensor<4xf32>, %flag: i1) -> tensor<f32> {
  %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %l : tensor<f32>
}
}
