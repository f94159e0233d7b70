// RUN: fsdp-opt --fsdp-delay-reduce-waits --split-input-file --remarks-filter=fsdp-reduce --remark-format=emitRemark %s 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// Two reductions are under way at a time: the third begins when the first is
// there. What the optimizer takes is awaited just before it.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F0:.*]] = fsdp.reduce_scatter @u0 {{.*}} {fsdp.why = "begins when the last gradient is there; awaited before the reduce-scatter of u2 begins, as 2 may be in flight"}
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    %[[F1:.*]] = fsdp.reduce_scatter @u1
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.wait %[[F0]]
// CHECK-NEXT:    %[[F2:.*]] = fsdp.reduce_scatter @u2
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    fsdp.wait %[[F1]]
// CHECK-NEXT:    fsdp.wait %[[F2]]
// CHECK-NEXT:    fsdp.optimizer_step
// REMARK:      remark: [Missed] ReduceScatter {{.*}}unit u0: reduced beside 2 calls, awaited before the reduce-scatter of u2 begins, as 2 may be in flight
// REMARK:      remark: [Passed] ReduceScatter {{.*}}unit u1: reduced beside 1 call, awaited before its first use, the optimizer
// REMARK:      remark: [Passed] ReduceScatter {{.*}}unit u2: reduced beside 0 calls, awaited before its first use, the optimizer
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<4xf32> unit @u0 sharding <@world, [{"shard"}]>
fsdp.param @w1 : tensor<4xf32> unit @u1 sharding <@world, [{"shard"}]>
fsdp.param @w2 : tensor<4xf32> unit @u2 sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %loss: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %g0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f0 = fsdp.reduce_scatter @u0 avg [@w0] %g0 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r0 = fsdp.wait %f0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g1 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f1 = fsdp.reduce_scatter @u1 avg [@w1] %g1 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r1 = fsdp.wait %f1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g2 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f2 = fsdp.reduce_scatter @u2 avg [@w2] %g2 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r2 = fsdp.wait %f2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w0, @w1, @w2] %r0, %r1, %r2 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// One at a time, as FSDP2.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F0:.*]] = fsdp.reduce_scatter @u0
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.wait %[[F0]]
// CHECK-NEXT:    %[[F1:.*]] = fsdp.reduce_scatter @u1
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    fsdp.wait %[[F1]]
// CHECK-NEXT:    %[[F2:.*]] = fsdp.reduce_scatter @u2
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {reduce_scatters_in_flight = 1 : i64}
fsdp.optimizer "sgd" {}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<4xf32> unit @u0 sharding <@world, [{"shard"}]>
fsdp.param @w1 : tensor<4xf32> unit @u1 sharding <@world, [{"shard"}]>
fsdp.param @w2 : tensor<4xf32> unit @u2 sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %loss: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %g0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f0 = fsdp.reduce_scatter @u0 avg [@w0] %g0 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r0 = fsdp.wait %f0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g1 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f1 = fsdp.reduce_scatter @u1 avg [@w1] %g1 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r1 = fsdp.wait %f1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g2 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f2 = fsdp.reduce_scatter @u2 avg [@w2] %g2 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r2 = fsdp.wait %f2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w0, @w1, @w2] %r0, %r1, %r2 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// An all-reduce over the replicas follows its reduce-scatter, and goes on until
// the optimizer.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F0:.*]] = fsdp.reduce_scatter @u0
// CHECK:         fsdp.reduce_scatter @u1 {{.*}} {fsdp.why = "begins when the last gradient is there; awaited where its all-reduce begins"}
// CHECK:         %[[R0:.*]] = fsdp.wait %[[F0]]
// CHECK-NEXT:    %[[H0:.*]] = fsdp.all_reduce @u0 avg over "replicate" [@w0] %[[R0]] {fsdp.why = "begins when the shards are reduced; awaited before its first use, the optimizer"}
// CHECK-NEXT:    fsdp.reduce_scatter @u2
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    fsdp.wait %[[H0]]
// CHECK:         fsdp.optimizer_step
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<4xf32> unit @u0 sharding <@world, [{"shard"}]>
fsdp.param @w1 : tensor<4xf32> unit @u1 sharding <@world, [{"shard"}]>
fsdp.param @w2 : tensor<4xf32> unit @u2 sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %loss: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %g0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f0 = fsdp.reduce_scatter @u0 avg [@w0] %g0 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %r0 = fsdp.wait %f0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %h0 = fsdp.all_reduce @u0 avg over "replicate" [@w0] %r0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %a0 = fsdp.wait %h0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g1 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f1 = fsdp.reduce_scatter @u1 avg [@w1] %g1 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %r1 = fsdp.wait %f1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %h1 = fsdp.all_reduce @u1 avg over "replicate" [@w1] %r1 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %a1 = fsdp.wait %h1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g2 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f2 = fsdp.reduce_scatter @u2 avg [@w2] %g2 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %r2 = fsdp.wait %f2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>>
  %h2 = fsdp.all_reduce @u2 avg over "replicate" [@w2] %r2 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %a2 = fsdp.wait %h2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w0, @w1, @w2] %a0, %a1, %a2 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// A copy to the host begins when the shards are reduced, and goes on until as
// many others begin, or its results are used.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F0:.*]] = fsdp.reduce_scatter @u0
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    %[[R0:.*]] = fsdp.wait %[[F0]]
// CHECK-NEXT:    %[[C0:.*]] = fsdp.copy_to_host @u0 [@w0] %[[R0]] {fsdp.why = "begins when the shards are reduced; awaited before the copy of u1 begins"}
// CHECK-NEXT:    %[[F1:.*]] = fsdp.reduce_scatter @u1
// CHECK-NEXT:    aten.call
// CHECK-NEXT:    %[[R1:.*]] = fsdp.wait %[[F1]]
// CHECK-NEXT:    %[[H0:.*]] = fsdp.wait %[[C0]]
// CHECK-NEXT:    %[[C1:.*]] = fsdp.copy_to_host @u1 [@w1] %[[R1]]
// CHECK-NEXT:    %[[F2:.*]] = fsdp.reduce_scatter @u2
// CHECK-NEXT:    %[[R2:.*]] = fsdp.wait %[[F2]]
// CHECK-NEXT:    %[[H1:.*]] = fsdp.wait %[[C1]]
// CHECK-NEXT:    %[[C2:.*]] = fsdp.copy_to_host @u2 [@w2] %[[R2]] {fsdp.why = "begins when the shards are reduced; awaited before its first use, the optimizer"}
// CHECK-NEXT:    fsdp.phase optimizer
// CHECK-NEXT:    %[[H2:.*]] = fsdp.wait %[[C2]]
// CHECK-NEXT:    fsdp.optimizer_step [@w0, @w1, @w2] %[[H0]], %[[H1]], %[[H2]]
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {reduce_scatters_in_flight = 1 : i64}
fsdp.optimizer "sgd" {}
fsdp.unit @u0 {cpu_offload}
fsdp.unit @u1 {cpu_offload}
fsdp.unit @u2 {cpu_offload}
fsdp.param @w0 : tensor<4xf32> unit @u0 sharding <@world, [{"shard"}]>
fsdp.param @w1 : tensor<4xf32> unit @u1 sharding <@world, [{"shard"}]>
fsdp.param @w2 : tensor<4xf32> unit @u2 sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>, %loss: tensor<f32>) -> tensor<f32> {
  fsdp.phase backward
  %g0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f0 = fsdp.reduce_scatter @u0 avg [@w0] %g0 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r0 = fsdp.wait %f0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g1 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f1 = fsdp.reduce_scatter @u1 avg [@w1] %g1 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r1 = fsdp.wait %f1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %g2 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %f2 = fsdp.reduce_scatter @u2 avg [@w2] %g2 : (tensor<4xf32>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %r2 = fsdp.wait %f2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %d0 = fsdp.copy_to_host @u0 [@w0] %r0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %c0 = fsdp.wait %d0 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %d1 = fsdp.copy_to_host @u1 [@w1] %r1 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %c1 = fsdp.wait %d1 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %d2 = fsdp.copy_to_host @u2 [@w2] %r2 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  %c2 = fsdp.wait %d2 : !fsdp.future<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>
  fsdp.phase optimizer
  fsdp.optimizer_step [@w0, @w1, @w2] %c0, %c1, %c2 : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
