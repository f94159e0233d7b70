// A plan computes: what would reach a file or the network is in none.

// RUN: split-file %s %t
// RUN: not fsdp-opt %t/file.mlir --world-size 2 --emit plan 2>&1 | FileCheck %s --check-prefix=FILE
// RUN: not fsdp-opt %t/network.mlir --world-size 2 --emit plan 2>&1 | FileCheck %s --check-prefix=NETWORK

// FILE: expected no string in a call that has no tensor to compute with, got a call of "aten::from_file" (P36)
// NETWORK: expected an operator of namespace "aten", got "c10d::barrier" (P36)

//--- file.mlir
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.param @a : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @a : tensor<4xf32>
  fsdp.phase forward
  %f = aten.call "aten::from_file"("file", true, 4, none, none, none) : () -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%f, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.gradients [@a] %x : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

//--- network.mlir
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.param @a : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @a : tensor<4xf32>
  fsdp.phase forward
  %f = aten.call "c10d::barrier"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%f, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.gradients [@a] %x : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
