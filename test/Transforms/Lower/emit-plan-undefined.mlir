// RUN: not fsdp-opt --emit plan %s 2>&1 | FileCheck %s

// A shard has no place in a plan: what uses it as a value is an error, and not
// a use of the first value.

// CHECK: emit-plan-undefined.mlir:[[# @LINE + 11]]:3: error: 'fsdp.free' op names something that the plan does not have, a value of type '!fsdp.sharded<tensor<4xf32>
module attributes {fsdp.level = #fsdp.level<planned>} {
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 1.0e-1}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {frozen}
fsdp.program @train_step(%x: tensor<4xf32> {fsdp.name = "x"}) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.free %x : tensor<4xf32>
  fsdp.free %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
}
