// The unit of the last gather before backward; not one gathered in backward.

// CHECK:      fsdp.unit @a{{$}}
// CHECK-NEXT: fsdp.unit @b {reshard_after_forward = false}
// CHECK-NEXT: fsdp.unit @c{{$}}
fsdp.mesh @world <["shard"=2]>
fsdp.unit @a
fsdp.unit @b
fsdp.unit @c
fsdp.param @a.w : tensor<4xf32> unit @a sharding <@world, [{"shard"}]>
fsdp.param @b.w : tensor<4xf32> unit @b sharding <@world, [{"shard"}]>
fsdp.param @c.w : tensor<4xf32> unit @c sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = fsdp.read @a.w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %aw = fsdp.all_gather @a %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %h = aten.call "aten::mul.Tensor"(%x, %aw) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %b = fsdp.read @b.w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %bw = fsdp.all_gather @b %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%h, %bw) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %c = fsdp.read @c.w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %cw = fsdp.all_gather @c %c : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.no_gradient [@a.w, @b.w, @c.w]
  fsdp.return %loss : tensor<f32>
}

// -----

// A program that gathers nothing stays as it is.

// CHECK: fsdp.unit @a{{$}}
fsdp.unit @a
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.return %loss : tensor<f32>
}
