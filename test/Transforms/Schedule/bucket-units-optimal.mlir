// RUN: fsdp-opt --fsdp-bucket-units --split-input-file --remarks-filter=fsdp-bucket --remark-format=emitRemark %s 2> %t.remarks | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t.remarks

// Over eight hosts the latency of a gather is longer than what hides it: one
// bucket is better than three units.

// CHECK:      fsdp.unit @"b0+b1+b2"
// CHECK-NOT:  fsdp.unit
// CHECK:      fsdp.param @b0.w : tensor<64x64xf32> unit @"b0+b1+b2"
// CHECK-NEXT: fsdp.param @b1.w : tensor<64x64xf32> unit @"b0+b1+b2"
// CHECK-NEXT: fsdp.param @b2.w : tensor<64x64xf32> unit @"b0+b1+b2"

// REMARK-DAG: [Analysis] BucketCandidate | Category:fsdp-bucket | Remark="unit, 3 buckets: {{.*}} ms, {{.*}} ms of it exposed, {{.*}} MiB"
// REMARK-DAG: [Passed] Buckets | Category:fsdp-bucket | Remark="saturation, 1 bucket: {{.*}} ms, {{.*}} ms of it exposed, {{.*}} MiB; {{.*}} % above the least time of its instructions
fsdp.mesh @world <["shard"=64]>
fsdp.schedule {bucket = "optimal", device = "h100"}
fsdp.optimizer "sgd" {}
fsdp.unit @b0
fsdp.unit @b1
fsdp.unit @b2
fsdp.param @b0.w : tensor<64x64xf32> unit @b0
fsdp.param @b1.w : tensor<64x64xf32> unit @b1
fsdp.param @b2.w : tensor<64x64xf32> unit @b2
fsdp.program @train_step(%x: tensor<65536x64xf32>) -> tensor<f32> {
  %w0 = fsdp.read @b0.w : tensor<64x64xf32>
  %w1 = fsdp.read @b1.w : tensor<64x64xf32>
  %w2 = fsdp.read @b2.w : tensor<64x64xf32>
  fsdp.phase forward
  %m0 = aten.call "aten::mm"(%x, %w0) : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %m1 = aten.call "aten::mm"(%m0, %w1) : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %m2 = aten.call "aten::mm"(%m1, %w2) : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %loss = aten.call "aten::sum"(%m2, none) : (tensor<65536x64xf32>) -> tensor<f32>
  fsdp.phase backward
  %p2 = aten.call "aten::t"(%m1) {views = array<i64: 0>} : (tensor<65536x64xf32>) -> tensor<64x65536xf32>
  %g2 = aten.call "aten::mm"(%p2, %m2) : (tensor<64x65536xf32>, tensor<65536x64xf32>) -> tensor<64x64xf32>
  %d1 = aten.call "aten::mm"(%m2, %w2) : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %p1 = aten.call "aten::t"(%m0) {views = array<i64: 0>} : (tensor<65536x64xf32>) -> tensor<64x65536xf32>
  %g1 = aten.call "aten::mm"(%p1, %d1) : (tensor<64x65536xf32>, tensor<65536x64xf32>) -> tensor<64x64xf32>
  %d0 = aten.call "aten::mm"(%d1, %w1) : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %p0 = aten.call "aten::t"(%x) {views = array<i64: 0>} : (tensor<65536x64xf32>) -> tensor<64x65536xf32>
  %g0 = aten.call "aten::mm"(%p0, %d0) : (tensor<64x65536xf32>, tensor<65536x64xf32>) -> tensor<64x64xf32>
  fsdp.gradients [@b0.w, @b1.w, @b2.w] %g0, %g1, %g2 : tensor<64x64xf32>, tensor<64x64xf32>, tensor<64x64xf32>
  fsdp.return %loss : tensor<f32>
}
