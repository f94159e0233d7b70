// RUN: fsdp-opt --fsdp-prefetch-all-gathers --split-input-file --remarks-filter=fsdp-prefetch --remark-format=emitRemark %s 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// Each gather is launched while the matrix product before its first use runs.
// Backward's gather cannot pass the reshard of its unit.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F0:.*]] = fsdp.all_gather @u0
// CHECK-NEXT:    %[[W0:.*]] = fsdp.wait %[[F0]]
// CHECK-NEXT:    fsdp.read @w1
// CHECK-NEXT:    %[[F1:.*]] = fsdp.all_gather @u1
// CHECK-NEXT:    aten.call "aten::mm"(%{{.*}}, %[[W0]])
// CHECK-NEXT:    fsdp.reshard @u0
// CHECK-NEXT:    %[[W1:.*]] = fsdp.wait %[[F1]]
// CHECK-NEXT:    fsdp.read @w2
// CHECK-NEXT:    %[[F2:.*]] = fsdp.all_gather @u2
// CHECK-NEXT:    aten.call "aten::mm"(%{{.*}}, %[[W1]])
// CHECK:         fsdp.reshard @u2
// CHECK-NEXT:    fsdp.read @w2
// CHECK-NEXT:    fsdp.all_gather @u2
// CHECK-NEXT:    aten.call "aten::sum"
// REMARK-DAG: remark: [Missed] {{.*}}unit u0: launched 0.000 ms of computation before its first use{{.*}}, compute waits {{.*}}; limited by the beginning of the step
// REMARK-DAG: remark: [Analysis] Step {{.*}}step of {{.*}} ms, {{.*}} % above the least time of its instructions, {{.*}} ms of compute
// REMARK-DAG: remark: {{.*}}unit u1: launched {{.*}}limited by its duration
// REMARK-DAG: remark: {{.*}}unit u2: launched {{.*}}limited by what it needs
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {device = "h100"}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<1024x1024xf32> unit @u0 sharding <@world, [{"shard"}, {}]>
fsdp.param @w1 : tensor<1024x1024xf32> unit @u1 sharding <@world, [{"shard"}, {}]>
fsdp.param @w2 : tensor<1024x1024xf32> unit @u2 sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<8192x1024xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s0 = fsdp.read @w0 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f0 = fsdp.all_gather @u0 %s0 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w0 = fsdp.wait %f0 : !fsdp.future<tensor<1024x1024xf32>>
  %h0 = aten.call "aten::mm"(%x, %w0) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u0 %w0 : tensor<1024x1024xf32>
  %s1 = fsdp.read @w1 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f1 = fsdp.all_gather @u1 %s1 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w1 = fsdp.wait %f1 : !fsdp.future<tensor<1024x1024xf32>>
  %h1 = aten.call "aten::mm"(%h0, %w1) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u1 %w1 : tensor<1024x1024xf32>
  %s2 = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2 = fsdp.all_gather @u2 %s2 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2 = fsdp.wait %f2 : !fsdp.future<tensor<1024x1024xf32>>
  %h2 = aten.call "aten::mm"(%h1, %w2) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2 : tensor<1024x1024xf32>
  %loss = aten.call "aten::sum"(%h2, none) : (tensor<8192x1024xf32>) -> tensor<f32>
  fsdp.phase backward
  %s2b = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2b = fsdp.all_gather @u2 %s2b : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2b = fsdp.wait %f2b : !fsdp.future<tensor<1024x1024xf32>>
  %g = aten.call "aten::mm"(%h2, %w2b) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2b : tensor<1024x1024xf32>
  fsdp.no_gradient [@w0, @w1, @w2]
  fsdp.return %loss : tensor<f32>
}

// -----

// A budget that two gathered units exceed: each is launched where it is needed.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.reshard @u0
// CHECK-NEXT:    fsdp.read @w1
// CHECK-NEXT:    fsdp.all_gather @u1
// CHECK-NEXT:    fsdp.wait
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    fsdp.reshard @u1
// CHECK-NEXT:    fsdp.read @w2
// CHECK-NEXT:    fsdp.all_gather @u2
// REMARK: unit u1: launched 0.000 ms {{.*}}limited by the memory budget of 71.53 MiB: launched earlier, {{.*}} MiB would be alive
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {device = "h100", memory_budget = 75000000 : i64}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<1024x1024xf32> unit @u0 sharding <@world, [{"shard"}, {}]>
fsdp.param @w1 : tensor<1024x1024xf32> unit @u1 sharding <@world, [{"shard"}, {}]>
fsdp.param @w2 : tensor<1024x1024xf32> unit @u2 sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<8192x1024xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s0 = fsdp.read @w0 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f0 = fsdp.all_gather @u0 %s0 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w0 = fsdp.wait %f0 : !fsdp.future<tensor<1024x1024xf32>>
  %h0 = aten.call "aten::mm"(%x, %w0) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u0 %w0 : tensor<1024x1024xf32>
  %s1 = fsdp.read @w1 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f1 = fsdp.all_gather @u1 %s1 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w1 = fsdp.wait %f1 : !fsdp.future<tensor<1024x1024xf32>>
  %h1 = aten.call "aten::mm"(%h0, %w1) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u1 %w1 : tensor<1024x1024xf32>
  %s2 = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2 = fsdp.all_gather @u2 %s2 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2 = fsdp.wait %f2 : !fsdp.future<tensor<1024x1024xf32>>
  %h2 = aten.call "aten::mm"(%h1, %w2) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2 : tensor<1024x1024xf32>
  %loss = aten.call "aten::sum"(%h2, none) : (tensor<8192x1024xf32>) -> tensor<f32>
  fsdp.phase backward
  %s2b = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2b = fsdp.all_gather @u2 %s2b : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2b = fsdp.wait %f2b : !fsdp.future<tensor<1024x1024xf32>>
  %g = aten.call "aten::mm"(%h2, %w2b) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2b : tensor<1024x1024xf32>
  fsdp.no_gradient [@w0, @w1, @w2]
  fsdp.return %loss : tensor<f32>
}

// -----

// FSDP2 launches the next gather of a phase when the one before it has come.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.wait
// CHECK-NEXT:    fsdp.read @w1
// CHECK-NEXT:    fsdp.all_gather @u1 %{{[^ ]*}} {fsdp.why = "launched ahead of its first use; limited by FSDP2's order"}
// CHECK:         fsdp.phase backward
// REMARK: unit u1: launched {{.*}}limited by FSDP2's order
// CHECK-NEXT:    fsdp.read @w2
// CHECK-NEXT:    fsdp.all_gather @u2
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {prefetch = "fsdp2"}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<1024x1024xf32> unit @u0 sharding <@world, [{"shard"}, {}]>
fsdp.param @w1 : tensor<1024x1024xf32> unit @u1 sharding <@world, [{"shard"}, {}]>
fsdp.param @w2 : tensor<1024x1024xf32> unit @u2 sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<8192x1024xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s0 = fsdp.read @w0 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f0 = fsdp.all_gather @u0 %s0 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w0 = fsdp.wait %f0 : !fsdp.future<tensor<1024x1024xf32>>
  %h0 = aten.call "aten::mm"(%x, %w0) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u0 %w0 : tensor<1024x1024xf32>
  %s1 = fsdp.read @w1 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f1 = fsdp.all_gather @u1 %s1 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w1 = fsdp.wait %f1 : !fsdp.future<tensor<1024x1024xf32>>
  %h1 = aten.call "aten::mm"(%h0, %w1) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u1 %w1 : tensor<1024x1024xf32>
  %s2 = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2 = fsdp.all_gather @u2 %s2 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2 = fsdp.wait %f2 : !fsdp.future<tensor<1024x1024xf32>>
  %h2 = aten.call "aten::mm"(%h1, %w2) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2 : tensor<1024x1024xf32>
  %loss = aten.call "aten::sum"(%h2, none) : (tensor<8192x1024xf32>) -> tensor<f32>
  fsdp.phase backward
  %s2b = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2b = fsdp.all_gather @u2 %s2b : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2b = fsdp.wait %f2b : !fsdp.future<tensor<1024x1024xf32>>
  %g = aten.call "aten::mm"(%h2, %w2b) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2b : tensor<1024x1024xf32>
  fsdp.no_gradient [@w0, @w1, @w2]
  fsdp.return %loss : tensor<f32>
}

// -----

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.reshard @u0
// CHECK-NEXT:    fsdp.read @w1
// CHECK-NEXT:    fsdp.all_gather @u1 %{{[^ ]*}} {fsdp.why = "launched where it is needed: nothing is prefetched"}
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {prefetch = "none"}
fsdp.unit @u0
fsdp.unit @u1
fsdp.unit @u2
fsdp.param @w0 : tensor<1024x1024xf32> unit @u0 sharding <@world, [{"shard"}, {}]>
fsdp.param @w1 : tensor<1024x1024xf32> unit @u1 sharding <@world, [{"shard"}, {}]>
fsdp.param @w2 : tensor<1024x1024xf32> unit @u2 sharding <@world, [{"shard"}, {}]>
fsdp.program @train_step(%x: tensor<8192x1024xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s0 = fsdp.read @w0 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f0 = fsdp.all_gather @u0 %s0 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w0 = fsdp.wait %f0 : !fsdp.future<tensor<1024x1024xf32>>
  %h0 = aten.call "aten::mm"(%x, %w0) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u0 %w0 : tensor<1024x1024xf32>
  %s1 = fsdp.read @w1 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f1 = fsdp.all_gather @u1 %s1 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w1 = fsdp.wait %f1 : !fsdp.future<tensor<1024x1024xf32>>
  %h1 = aten.call "aten::mm"(%h0, %w1) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u1 %w1 : tensor<1024x1024xf32>
  %s2 = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2 = fsdp.all_gather @u2 %s2 : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2 = fsdp.wait %f2 : !fsdp.future<tensor<1024x1024xf32>>
  %h2 = aten.call "aten::mm"(%h1, %w2) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2 : tensor<1024x1024xf32>
  %loss = aten.call "aten::sum"(%h2, none) : (tensor<8192x1024xf32>) -> tensor<f32>
  fsdp.phase backward
  %s2b = fsdp.read @w2 : !fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>
  %f2b = fsdp.all_gather @u2 %s2b : (!fsdp.sharded<tensor<1024x1024xf32>, <@world, [{"shard"}, {}]>>) -> !fsdp.future<tensor<1024x1024xf32>>
  %w2b = fsdp.wait %f2b : !fsdp.future<tensor<1024x1024xf32>>
  %g = aten.call "aten::mm"(%h2, %w2b) : (tensor<8192x1024xf32>, tensor<1024x1024xf32>) -> tensor<8192x1024xf32>
  fsdp.reshard @u2 %w2b : tensor<1024x1024xf32>
  fsdp.no_gradient [@w0, @w1, @w2]
  fsdp.return %loss : tensor<f32>
}
