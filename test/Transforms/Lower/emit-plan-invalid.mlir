// RUN: not fsdp-opt --emit plan --fsdp-lower %s 2>&1 | FileCheck %s
// RUN: fsdp-opt --fsdp-prefetch-all-gathers --verify-diagnostics %s

// A policy that no pass took up would be lost without a word.

// CHECK: emit-plan-invalid.mlir:[[# @LINE + 5]]:1: error: 'fsdp.gradient_clipping' op Program-16: expected a pass to have applied it before a plan is emitted, found none
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 1.0e-1}
fsdp.unit @u
// expected-error @below {{Program-16: expected a pass to have applied it before a plan is emitted, found none}}
fsdp.gradient_clipping {max_norm = 1.0, norm_type = 2.0}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {frozen}
fsdp.program @train_step(%x: tensor<4xf32> {fsdp.name = "x"}) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
