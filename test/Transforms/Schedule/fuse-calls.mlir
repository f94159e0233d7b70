// RUN: fsdp-opt --fsdp-fuse-calls --split-input-file %s | FileCheck %s
// RUN: fsdp-opt --fsdp-fuse-calls --split-input-file --remarks-filter=fsdp-fuse %s 2>&1 | FileCheck %s --check-prefix=REMARK
// RUN: fsdp-opt --fsdp-fuse-calls --split-input-file %s 2>&1 | FileCheck %s --check-prefix=UNPROVEN

// UNPROVEN: warning: fsdp-fuse-calls: kernels were compared with ATen's for sm_90 under torch 2.11 alone, not for sm_80 under torch 2.11.0: compare them there (test/parity/kernel_bits.py)

// The chain runs where its last call stood, and only what others use is
// written. The second layer has the kernel of the first.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[A:.*]]:2 = fsdp.fused @mul_add_neg(%arg0, %[[W:.*]]) : (tensor<8x4xf32>, tensor<4xf32>) -> (tensor<8x4xf32>, tensor<8x4xf32>)
// CHECK-NEXT:    %[[M:.*]] = aten.call "aten::mm"(%[[A]]#1, %{{.*}})
// CHECK-NEXT:    %[[B:.*]]:2 = fsdp.fused @mul_add_neg(%[[M]], %[[W]])
// CHECK-NEXT:    aten.call "aten::sum"(%[[B]]#1
// CHECK-NEXT:    aten.call "aten::sum"(%[[A]]#0
// CHECK-LABEL: fsdp.kernel @mul_add_neg {
// CHECK-NEXT:  ^bb0(%[[X:.*]]: tensor<8x4xf32>, %[[Y:.*]]: tensor<4xf32>):
// CHECK-NEXT:    %[[MUL:.*]] = aten.call "aten::mul.Tensor"(%[[X]], %[[Y]])
// CHECK-NEXT:    %[[ADD:.*]] = aten.call "aten::add.Tensor"(%[[MUL]], %[[X]], 1)
// CHECK-NEXT:    %[[NEG:.*]] = aten.call "aten::neg"(%[[ADD]])
// CHECK-NEXT:    fsdp.kernel_return %[[ADD]], %[[NEG]]
// CHECK-NOT:   fsdp.kernel
// REMARK:      mul_add_neg: 3 calls as one, 128 B are not written
// REMARK:      6 calls run as 2 kernels, which do not write 256 B
fsdp.mesh @world <["shard"=1]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<8x4xf32>, %k: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %a = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<8x4xf32>, tensor<4xf32>) -> tensor<8x4xf32>
  %b = aten.call "aten::add.Tensor"(%a, %x, 1) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  %c = aten.call "aten::neg"(%b) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %m = aten.call "aten::mm"(%c, %k) : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %d = aten.call "aten::mul.Tensor"(%m, %w) : (tensor<8x4xf32>, tensor<4xf32>) -> tensor<8x4xf32>
  %e = aten.call "aten::add.Tensor"(%d, %m, 1) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  %f = aten.call "aten::neg"(%e) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %loss = aten.call "aten::sum"(%f, none) : (tensor<8x4xf32>) -> tensor<f32>
  %l1 = aten.call "aten::sum"(%b, none) : (tensor<8x4xf32>) -> tensor<f32>
  %l2 = aten.call "aten::sum"(%e, none) : (tensor<8x4xf32>) -> tensor<f32>
  fsdp.reshard @u %w : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A chain ends at a collective, where another call uses what it makes before
// its end, where something writes what it reads, and at a call of another
// shape. Operators that ATen computes in other ways are left as they are.

// REMARK-DAG:  [Missed] NotFused {{.*}}Remark="aten::mul.Tensor does not join the chain of aten::neg: something before it uses what the chain makes"
// REMARK-DAG:  Remark="aten::abs does not join the chain of aten::neg: something before it writes what the chain reads"
// CHECK-LABEL: fsdp.program @ends
// CHECK-NOT:     fsdp.fused
// CHECK:         fsdp.fused @neg_abs(%arg0)
// CHECK-NOT:     fsdp.fused
fsdp.mesh @world <["shard"=1]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @ends(%x: tensor<8x4xf32>, %i: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  // A collective.
  %a = aten.call "aten::neg"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %b = aten.call "aten::abs"(%a) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  fsdp.reshard @u %w : tensor<4xf32>
  // Another use.
  %c = aten.call "aten::neg"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %t = aten.call "aten::tanh"(%c) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %d = aten.call "aten::mul.Tensor"(%c, %t) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  // A write.
  %y = aten.call "aten::exp"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %e = aten.call "aten::neg"(%y) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %z = aten.call "aten::add_.Scalar"(%y, 1, 1) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %f = aten.call "aten::abs"(%e) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  // Another shape.
  %g = aten.call "aten::neg"(%i) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %v = aten.call "aten::select.int"(%g, 0, 0) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4xf32>
  %h = aten.call "aten::add.Tensor"(%b, %v, 1) : (tensor<8x4xf32>, tensor<4xf32>) -> tensor<8x4xf32>
  // Another dtype, a factor, and a layout in which neighbours are apart.
  %j = aten.call "aten::add.Tensor"(%h, %d, 2) : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  %n = aten.call "aten::t"(%i) {strides = [array<i64: 1, 4>], views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %o = aten.call "aten::mul.Tensor"(%n, %g) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  // The last is a chain: the view is no obstacle.
  %p = aten.call "aten::neg"(%x) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %q = aten.call "aten::t"(%i) {strides = [array<i64: 1, 4>], views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = aten.call "aten::abs"(%p) : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %l1 = aten.call "aten::mm"(%r, %q) : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %loss = aten.call "aten::sum"(%l1, none) : (tensor<8x4xf32>) -> tensor<f32>
  %l2 = aten.call "aten::sum"(%j, none) : (tensor<8x4xf32>) -> tensor<f32>
  %l3 = aten.call "aten::sum"(%o, none) : (tensor<4x4xf32>) -> tensor<f32>
  %l4 = aten.call "aten::sum"(%f, none) : (tensor<8x4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// silu needs full vectors: 60 elements leave some, 64 do not, and broadcasting
// makes rows. Layouts other than row-major are kept.

// REMARK-DAG:  Remark="aten::mul.Tensor does not join the chain of aten::silu: one of the calls needs tensors that are laid out alike"
// CHECK-LABEL: fsdp.program @layouts
// CHECK:         aten.call "aten::silu"
// CHECK:         aten.call "aten::mul.Tensor"
// CHECK:         fsdp.fused @silu_mul(
// CHECK:         aten.call "aten::silu"
// CHECK-NEXT:    aten.call "aten::mul.Tensor"
// CHECK:         fsdp.fused @neg_abs(
// CHECK-LABEL: fsdp.kernel @silu_mul
// CHECK:       } {whole}
// CHECK-LABEL: fsdp.kernel @neg_abs
// CHECK:       } {operand_strides = [array<i64: 1, 4>], strides = array<i64: 1, 4>}
fsdp.mesh @world <["shard"=1]>
fsdp.program @layouts(%x: tensor<60xf32>, %y: tensor<64xf32>, %z: tensor<1x64xf32>, %i: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::silu"(%x) : (tensor<60xf32>) -> tensor<60xf32>
  %b = aten.call "aten::mul.Tensor"(%a, %x) : (tensor<60xf32>, tensor<60xf32>) -> tensor<60xf32>
  %c = aten.call "aten::silu"(%y) : (tensor<64xf32>) -> tensor<64xf32>
  %d = aten.call "aten::mul.Tensor"(%c, %y) : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32>
  %e = aten.call "aten::silu"(%z) : (tensor<1x64xf32>) -> tensor<1x64xf32>
  %f = aten.call "aten::mul.Tensor"(%e, %d) : (tensor<1x64xf32>, tensor<64xf32>) -> tensor<1x64xf32>
  %n = aten.call "aten::t"(%i) {strides = [array<i64: 1, 4>], views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %g = aten.call "aten::neg"(%n) {strides = [array<i64: 1, 4>]} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h = aten.call "aten::abs"(%g) {strides = [array<i64: 1, 4>]} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%f, none) : (tensor<1x64xf32>) -> tensor<f32>
  %l1 = aten.call "aten::sum"(%b, none) : (tensor<60xf32>) -> tensor<f32>
  %l2 = aten.call "aten::sum"(%h, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// For a GPU of no known architecture nothing changes.

// CHECK-LABEL: fsdp.program @on_a_gpu
// CHECK-NOT:     fsdp.fused
// CHECK:         fsdp.return
module attributes {fsdp.captured_for = {device = "cuda", torch = "2.15.0"}} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.program @on_a_gpu(%x: tensor<8xf32>) -> tensor<f32> {
    fsdp.phase forward
    %a = aten.call "aten::neg"(%x) : (tensor<8xf32>) -> tensor<8xf32>
    %b = aten.call "aten::abs"(%a) : (tensor<8xf32>) -> tensor<8xf32>
    %loss = aten.call "aten::sum"(%b, none) : (tensor<8xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

// ATen's kernels for a GPU round in other ways: there a tail is as the rest is,
// a number of a bf16 call is a float, and an inverse square root is an
// approximation, as is the quotient by a number.

// CHECK-LABEL: fsdp.program @on_an_h100
// CHECK:         %[[A:.*]] = fsdp.fused @silu_mul(%arg0)
// CHECK:         %[[B:.*]] = aten.call "aten::rsqrt"(%[[A]])
// CHECK:         %[[C:.*]] = aten.call "aten::div.Scalar"(%[[B]], 3)
// CHECK:         aten.call "aten::relu"(%[[C]])
// CHECK:       fsdp.kernel @silu_mul
// CHECK:         aten.call "aten::mul.Tensor"(%{{.*}}, 5.000000e-01)
// CHECK:         fsdp.kernel_return
// CHECK-NOT:     whole
module attributes {fsdp.captured_for = {arch = "sm_90", device = "cuda", torch = "2.11.0"}} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.program @on_an_h100(%x: tensor<7xbf16>) -> tensor<bf16> {
    fsdp.phase forward
    %a = aten.call "aten::silu"(%x) : (tensor<7xbf16>) -> tensor<7xbf16>
    %b = aten.call "aten::mul.Tensor"(%a, 0.5) : (tensor<7xbf16>) -> tensor<7xbf16>
    %c = aten.call "aten::rsqrt"(%b) : (tensor<7xbf16>) -> tensor<7xbf16>
    %d = aten.call "aten::div.Scalar"(%c, 3) : (tensor<7xbf16>) -> tensor<7xbf16>
    %e = aten.call "aten::relu"(%d) : (tensor<7xbf16>) -> tensor<7xbf16>
    %loss = aten.call "aten::sum"(%e, none) : (tensor<7xbf16>) -> tensor<bf16>
    fsdp.return %loss : tensor<bf16>
  }
}

// -----

// Where the bits of kernels have not been compared with ATen's, they are not
// taken for equal.

// CHECK-LABEL: fsdp.program @not_compared
// CHECK-NOT:     fsdp.fused
// CHECK:         fsdp.return
// REMARK-DAG:  [Missed] Unproven | Category:fsdp-fuse | Remark="kernels were compared with ATen's for sm_90 under torch 2.11 alone, not for sm_80 under torch 2.11.0: nothing is fused without `fuse: unproven`"
module attributes {fsdp.captured_for = {arch = "sm_80", device = "cuda", torch = "2.11.0"}} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.program @not_compared(%x: tensor<8xf32>) -> tensor<f32> {
    fsdp.phase forward
    %a = aten.call "aten::neg"(%x) : (tensor<8xf32>) -> tensor<8xf32>
    %b = aten.call "aten::abs"(%a) : (tensor<8xf32>) -> tensor<8xf32>
    %loss = aten.call "aten::sum"(%b, none) : (tensor<8xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

// CHECK-LABEL: fsdp.program @for_another_torch
// CHECK-NOT:     fsdp.fused
// CHECK:         fsdp.return
// REMARK-DAG:  Remark="kernels were compared with ATen's for the CPU under torch 2.15 alone, not under torch 2.11.0: nothing is fused without `fuse: unproven`"
module attributes {fsdp.captured_for = {device = "cpu", torch = "2.11.0"}} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.program @for_another_torch(%x: tensor<8xf32>) -> tensor<f32> {
    fsdp.phase forward
    %a = aten.call "aten::neg"(%x) : (tensor<8xf32>) -> tensor<8xf32>
    %b = aten.call "aten::abs"(%a) : (tensor<8xf32>) -> tensor<8xf32>
    %loss = aten.call "aten::sum"(%b, none) : (tensor<8xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

// CHECK-LABEL: fsdp.program @not_compared_but_wanted
// CHECK:         fsdp.fused @neg_abs
module attributes {fsdp.captured_for = {arch = "sm_80", device = "cuda", torch = "2.11.0"}} {
  fsdp.mesh @world <["shard"=1]>
  fsdp.schedule {fuse = "unproven"}
  fsdp.program @not_compared_but_wanted(%x: tensor<8xf32>) -> tensor<f32> {
    fsdp.phase forward
    %a = aten.call "aten::neg"(%x) : (tensor<8xf32>) -> tensor<8xf32>
    %b = aten.call "aten::abs"(%a) : (tensor<8xf32>) -> tensor<8xf32>
    %loss = aten.call "aten::sum"(%b, none) : (tensor<8xf32>) -> tensor<f32>
    fsdp.return %loss : tensor<f32>
  }
}

// -----

// What a reduction reads is written by a call, in place; and so is an
// activation that goes to the host.

// CHECK-LABEL: fsdp.program @taken
// CHECK:         fsdp.fused @neg_abs(%arg0)
// CHECK:         %[[A:.*]] = aten.call "aten::neg"
// CHECK:         fsdp.offload_activation %[[A]]
// CHECK:         fsdp.fused @abs_neg
// CHECK:         %[[G:.*]] = aten.call "aten::neg"
// CHECK:         fsdp.reduce_scatter @u avg [@w] %[[G]]
fsdp.mesh @world <["shard"=1]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @taken(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::abs"(%a) : (tensor<4xf32>) -> tensor<4xf32>
  %c = aten.call "aten::neg"(%b) : (tensor<4xf32>) -> tensor<4xf32>
  %h = fsdp.offload_activation %c : tensor<4xf32> to !fsdp.host<tensor<4xf32>>
  %loss = aten.call "aten::sum"(%b, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %d = fsdp.reload_activation %h : !fsdp.host<tensor<4xf32>> to tensor<4xf32>
  %e = aten.call "aten::abs"(%d) : (tensor<4xf32>) -> tensor<4xf32>
  %f = aten.call "aten::neg"(%e) : (tensor<4xf32>) -> tensor<4xf32>
  %g = aten.call "aten::neg"(%f) : (tensor<4xf32>) -> tensor<4xf32>
  %r = fsdp.reduce_scatter @u avg [@w] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
