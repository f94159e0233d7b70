// RUN: fsdp-opt --fsdp-choose-memory --split-input-file --verify-diagnostics %s

fsdp.mesh @world <["shard"=2]>
// expected-error @below {{expected a step of at most 1.00 MiB a rank, got: }}
fsdp.schedule {device = "h100", memory_budget = 1048576 : i64}
fsdp.optimizer "sgd" {}
fsdp.unit @b0
fsdp.unit @b1
fsdp.param @b0.w : tensor<64x64xf32> unit @b0
fsdp.param @b1.w : tensor<64x64xf32> unit @b1
fsdp.program @train_step(%x: tensor<65536x64xf32>) -> tensor<f32> {
  %w0 = fsdp.read @b0.w : tensor<64x64xf32>
  %w1 = fsdp.read @b1.w : tensor<64x64xf32>
  fsdp.phase forward
  %m0 = aten.call "aten::mm"(%x, %w0) {fsdp.module = "b0"} : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %t0 = aten.call "aten::tanh"(%m0) {fsdp.module = "b0"} : (tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %u0 = aten.call "aten::mul.Tensor"(%t0, %t0) {fsdp.module = "b0"} : (tensor<65536x64xf32>, tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %m1 = aten.call "aten::mm"(%u0, %w1) {fsdp.module = "b1"} : (tensor<65536x64xf32>, tensor<64x64xf32>) -> tensor<65536x64xf32>
  %t1 = aten.call "aten::tanh"(%m1) {fsdp.module = "b1"} : (tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %u1 = aten.call "aten::mul.Tensor"(%t1, %t1) {fsdp.module = "b1"} : (tensor<65536x64xf32>, tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %loss = aten.call "aten::sum"(%u1, none) : (tensor<65536x64xf32>) -> tensor<f32>
  fsdp.phase backward
  %d1 = aten.call "aten::mul.Tensor"(%t1, %t1) {fsdp.module = "b1"} : (tensor<65536x64xf32>, tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %p1 = aten.call "aten::t"(%u0) {fsdp.module = "b1", views = array<i64: 0>} : (tensor<65536x64xf32>) -> tensor<64x65536xf32>
  %g1 = aten.call "aten::mm"(%p1, %d1) {fsdp.module = "b1"} : (tensor<64x65536xf32>, tensor<65536x64xf32>) -> tensor<64x64xf32>
  %d0 = aten.call "aten::mul.Tensor"(%d1, %t0) {fsdp.module = "b0"} : (tensor<65536x64xf32>, tensor<65536x64xf32>) -> tensor<65536x64xf32>
  %p0 = aten.call "aten::t"(%x) {fsdp.module = "b0", views = array<i64: 0>} : (tensor<65536x64xf32>) -> tensor<64x65536xf32>
  %g0 = aten.call "aten::mm"(%p0, %d0) {fsdp.module = "b0"} : (tensor<64x65536xf32>, tensor<65536x64xf32>) -> tensor<64x64xf32>
  fsdp.gradients [@b0.w, @b1.w] %g0, %g1 : tensor<64x64xf32>, tensor<64x64xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// What the schedule says stays, though one in flight would fit.

fsdp.mesh @world <["shard"=2]>
// expected-error @below {{expected a step of at most 26.70 MiB a rank, got: 34.50 MiB; at its peak gradients 12.00 MiB, }}
fsdp.schedule {device = "h100", memory = "auto", memory_budget = 28000000 : i64, reduce_scatters_in_flight = 2 : i64}
fsdp.optimizer "sgd" {}
fsdp.unit @b0
fsdp.unit @b1
fsdp.unit @b2
fsdp.unit @b3
fsdp.param @b0.w : tensor<1024x1024xf32> unit @b0
fsdp.param @b1.w : tensor<1024x1024xf32> unit @b1
fsdp.param @b2.w : tensor<1024x1024xf32> unit @b2
fsdp.param @b3.w : tensor<1024x1024xf32> unit @b3
fsdp.program @train_step(%x0: tensor<64x1024xf32>, %t: tensor<1024x64xf32>) -> tensor<f32> {
  %w0 = fsdp.read @b0.w : tensor<1024x1024xf32>
  %w1 = fsdp.read @b1.w : tensor<1024x1024xf32>
  %w2 = fsdp.read @b2.w : tensor<1024x1024xf32>
  %w3 = fsdp.read @b3.w : tensor<1024x1024xf32>
  fsdp.phase forward
  %x1 = aten.call "aten::mm"(%x0, %w0) {fsdp.module = "b0"} : (tensor<64x1024xf32>, tensor<1024x1024xf32>) -> tensor<64x1024xf32>
  %x2 = aten.call "aten::mm"(%x1, %w1) {fsdp.module = "b1"} : (tensor<64x1024xf32>, tensor<1024x1024xf32>) -> tensor<64x1024xf32>
  %x3 = aten.call "aten::mm"(%x2, %w2) {fsdp.module = "b2"} : (tensor<64x1024xf32>, tensor<1024x1024xf32>) -> tensor<64x1024xf32>
  %x4 = aten.call "aten::mm"(%x3, %w3) {fsdp.module = "b3"} : (tensor<64x1024xf32>, tensor<1024x1024xf32>) -> tensor<64x1024xf32>
  %loss = aten.call "aten::sum"(%x4, none) : (tensor<64x1024xf32>) -> tensor<f32>
  fsdp.phase backward
  %g3 = aten.call "aten::mm"(%t, %x3) {fsdp.module = "b3"} : (tensor<1024x64xf32>, tensor<64x1024xf32>) -> tensor<1024x1024xf32>
  %g2 = aten.call "aten::mm"(%t, %x2) {fsdp.module = "b2"} : (tensor<1024x64xf32>, tensor<64x1024xf32>) -> tensor<1024x1024xf32>
  %g1 = aten.call "aten::mm"(%t, %x1) {fsdp.module = "b1"} : (tensor<1024x64xf32>, tensor<64x1024xf32>) -> tensor<1024x1024xf32>
  %g0 = aten.call "aten::mm"(%t, %x0) {fsdp.module = "b0"} : (tensor<1024x64xf32>, tensor<64x1024xf32>) -> tensor<1024x1024xf32>
  fsdp.gradients [@b0.w, @b1.w, @b2.w, @b3.w] %g0, %g1, %g2, %g3 : tensor<1024x1024xf32>, tensor<1024x1024xf32>, tensor<1024x1024xf32>, tensor<1024x1024xf32>
  fsdp.return %loss : tensor<f32>
}
