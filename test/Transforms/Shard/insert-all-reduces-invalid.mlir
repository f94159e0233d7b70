// RUN: fsdp-opt %s --fsdp-insert-all-reduces --verify-diagnostics

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %loss: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %g = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @below {{expected a result for each gradient: run before fsdp-split-collectives}}
  %f = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %s = fsdp.wait %f : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  fsdp.gradients [@w] %s : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.return %loss : tensor<f32>
}
