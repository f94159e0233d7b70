// RUN: fsdp-opt --fsdp-insert-optimizer %s | FileCheck %s

// The update comes last, over the parameters in the order of the module.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[R:.*]]:2 = fsdp.reduce_scatter @u avg [@w, @b]
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    fsdp.optimizer_step [@w, @b] %[[R]]#0, %[[R]]#1
// CHECK-NEXT:    fsdp.return
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {lr = 3.0e-4, fused = true}
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %r:2 = fsdp.reduce_scatter @u avg [@w, @b] %x, %x : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.write_grad @b, %r#1 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.write_grad @w, %r#0 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
