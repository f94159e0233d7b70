// RUN: fsdp-opt --fsdp-place-storages --split-input-file --verify-diagnostics %s

// Nothing awaits the reduction before the update takes its result.
// expected-error @below {{is not a valid plan: plan: instructions[2]: reads value 2, which instructions[1] may not have written yet: no event orders them (P28)}}
module {
  fsdp.mesh @world <["shard"=2]>
  fsdp.optimizer "sgd" {}
  fsdp.unit @u
  fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
  fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
    fsdp.phase forward
    %loss = aten.call "aten::sum"(%x, none) {fsdp.records = 0 : i32} : (tensor<4xf32>) -> tensor<f32>
    fsdp.phase backward
    %r = fsdp.reduce_scatter @u avg [@w] %x {fsdp.records = 1 : i32, fsdp.stream = "reduce_scatter", fsdp.waits = array<i32: 0>} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.phase optimizer
    fsdp.optimizer_step [@w] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Stream-1: expected the name of a stream, got: "side"}}
  %loss = aten.call "aten::sum"(%x, none) {fsdp.stream = "side"} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
