// RUN: fsdp-opt --fsdp-simplify-calls --split-input-file %s | FileCheck %s
// RUN: fsdp-opt --fsdp-simplify-calls --split-input-file %s --remarks-filter='fsdp-.*' --remark-format=emitRemark 2>&1 >/dev/null | FileCheck %s --check-prefix=REMARK

// Two projections that autocast computes in bfloat16, and the transposed
// gradient of one. The view and the cast are made once, and the gradient is the
// product itself.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:       %[[x:.+]] = aten.call "aten::view"(%arg0
// CHECK-NEXT:  %[[cast:.+]] = aten.call "aten::_to_copy"(%[[x]]
// CHECK-NEXT:  aten.call "aten::mm"(%[[cast]], %
// CHECK-NEXT:  aten.call "aten::mm"(%[[cast]], %
// CHECK:       fsdp.phase backward
// CHECK:       %[[grad:.+]] = aten.call "aten::mm"(%{{.+}}, %[[cast]])
// CHECK-NEXT:  fsdp.gradients [@w] %[[grad]]
// REMARK: remark: [Passed] SimplifyCalls | Category:fsdp-simplify | Remark="4 calls and writes of 16 B are not needed"
fsdp.param @w : tensor<4x4xbf16>
fsdp.program @train_step(%in: tensor<8xf32>) -> tensor<bf16> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4x4xbf16>
  %x0 = aten.call "aten::view"(%in, [2, 4]) {views = array<i64: 0>} : (tensor<8xf32>) -> tensor<2x4xf32>
  %b0 = aten.call "aten::_to_copy"(%x0, 15, none, none, none, false, none) : (tensor<2x4xf32>) -> tensor<2x4xbf16>
  %q = aten.call "aten::mm"(%b0, %w) : (tensor<2x4xbf16>, tensor<4x4xbf16>) -> tensor<2x4xbf16>
  %x1 = aten.call "aten::view"(%in, [2, 4]) {views = array<i64: 0>} : (tensor<8xf32>) -> tensor<2x4xf32>
  %b1 = aten.call "aten::_to_copy"(%x1, 15, none, none, none, false, none) : (tensor<2x4xf32>) -> tensor<2x4xbf16>
  %k = aten.call "aten::mm"(%b1, %w) : (tensor<2x4xbf16>, tensor<4x4xbf16>) -> tensor<2x4xbf16>
  %h = aten.call "aten::mul.Tensor"(%q, %k) : (tensor<2x4xbf16>, tensor<2x4xbf16>) -> tensor<2x4xbf16>
  %loss = aten.call "aten::sum"(%h, none) : (tensor<2x4xbf16>) -> tensor<bf16>
  fsdp.phase backward
  %t = aten.call "aten::t"(%q) {views = array<i64: 0>, strides = [array<i64: 1, 4>]} : (tensor<2x4xbf16>) -> tensor<4x2xbf16>
  %g = aten.call "aten::mm"(%t, %b0) : (tensor<4x2xbf16>, tensor<2x4xbf16>) -> tensor<4x4xbf16>
  %gt = aten.call "aten::t"(%g) {views = array<i64: 0>, strides = [array<i64: 1, 4>]} : (tensor<4x4xbf16>) -> tensor<4x4xbf16>
  %gtt = aten.call "aten::t"(%gt) {views = array<i64: 0>} : (tensor<4x4xbf16>) -> tensor<4x4xbf16>
  fsdp.gradients [@w] %gtt : tensor<4x4xbf16>
  fsdp.return %loss : tensor<bf16>
}

// -----

// The derivative of a mean of squares: the first power is its operand, and the
// division comes before the expansion.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:   aten::pow
// CHECK:       %[[div:.+]] = aten.call "aten::div.Scalar"(%{{.+}}, 4) : (tensor<2x1xf32>) -> tensor<2x1xf32>
// CHECK-NEXT:  %[[all:.+]] = aten.call "aten::expand"(%[[div]]
// CHECK-NEXT:  %[[twice:.+]] = aten.call "aten::mul.Scalar"(%{{.+}}, 2.0
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%[[all]], %[[twice]])
// REMARK: remark: [Passed] SimplifyCalls | Category:fsdp-simplify | Remark="1 call and writes of 56 B are not needed"
fsdp.param @w : tensor<2x4xf32>
fsdp.program @train_step(%in: tensor<2x4xf32>, %g: tensor<2x1xf32>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<2x4xf32>
  %x = aten.call "aten::mul.Tensor"(%in, %w) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  %loss = aten.call "aten::sum"(%x, none) : (tensor<2x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %d = aten.call "aten::mul.Tensor"(%g, %g) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
  %e = aten.call "aten::expand"(%d, [2, 4], false) {views = array<i64: 0>, strides = [array<i64: 1, 0>]} : (tensor<2x1xf32>) -> tensor<2x4xf32>
  %n = aten.call "aten::div.Scalar"(%e, 4) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %p = aten.call "aten::pow.Tensor_Scalar"(%x, 1.0) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %t = aten.call "aten::mul.Scalar"(%p, 2.0) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %dx = aten.call "aten::mul.Tensor"(%n, %t) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  %dw = aten.call "aten::mul.Tensor"(%dx, %in) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  fsdp.gradients [@w] %dw : tensor<2x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Views of other sizes, strides or parts stay; so do other powers, and copies
// whose memory matters: of a parameter, of an input, of what is written
// afterwards, and where the copy is written, a gradient or the loss.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-COUNT-16: aten.call
// CHECK:          fsdp.return
// REMARK-NOT: not needed
fsdp.param @w : tensor<4x4xf32>
fsdp.program @train_step(%in: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4x4xf32>
  %wc = aten.call "aten::clone"(%w, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %ic = aten.call "aten::clone"(%in, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %wt = aten.call "aten::t"(%wc) {views = array<i64: 0>, strides = [array<i64: 1, 4>]} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h = aten.call "aten::mm"(%ic, %wt) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %hc = aten.call "aten::clone"(%h, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = aten.call "aten::relu_"(%h) {views = array<i64: 0>, mutates = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %m = aten.call "aten::mul.Tensor"(%r, %hc) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %mc = aten.call "aten::clone"(%m, none) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %ma = aten.call "aten::neg_"(%mc) {views = array<i64: 0>, mutates = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %part = aten.call "aten::slice.Tensor"(%m, 0, 0, 2, 1) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<2x4xf32>
  %short = aten.call "aten::clone"(%part, none) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %s = aten.call "aten::sum"(%short, none) : (tensor<2x4xf32>) -> tensor<f32>
  %loss = aten.call "aten::clone"(%s, none) : (tensor<f32>) -> tensor<f32>
  fsdp.phase backward
  %square = aten.call "aten::pow.Tensor_Scalar"(%m, 2) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %g = aten.call "aten::add.Tensor"(%square, %ma, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %gc = aten.call "aten::pow.Tensor_Scalar"(%g, 1) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %gc : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A second cast stays where the first is not needed any more, and where the
// operand was written in between. A scaled expansion stays where it is not read
// by element: with a factor, in an in-place operator, a sum over it, or beside
// a tensor of another layout.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-COUNT-3: aten.call "aten::_to_copy"
// CHECK-COUNT-4: aten.call "aten::div.Scalar"({{.*}} -> tensor<2x4xf32>
// REMARK-NOT: not needed
fsdp.param @w : tensor<2x4xf32>
fsdp.program @train_step(%in: tensor<2x4xf32>, %g: tensor<2x1xf32>) -> tensor<f64> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<2x4xf32>
  %x = aten.call "aten::mul.Tensor"(%in, %w) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  %c0 = aten.call "aten::_to_copy"(%x, 7, none, none, none, false, none) : (tensor<2x4xf32>) -> tensor<2x4xf64>
  %s0 = aten.call "aten::sum"(%c0, none) : (tensor<2x4xf64>) -> tensor<f64>
  %c1 = aten.call "aten::_to_copy"(%x, 7, none, none, none, false, none) : (tensor<2x4xf32>) -> tensor<2x4xf64>
  %y = aten.call "aten::relu_"(%x) {views = array<i64: 0>, mutates = array<i64: 0>} : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %c2 = aten.call "aten::_to_copy"(%x, 7, none, none, none, false, none) : (tensor<2x4xf32>) -> tensor<2x4xf64>
  %c = aten.call "aten::mul.Tensor"(%c1, %c2) : (tensor<2x4xf64>, tensor<2x4xf64>) -> tensor<2x4xf64>
  %s1 = aten.call "aten::sum"(%c, none) : (tensor<2x4xf64>) -> tensor<f64>
  %loss = aten.call "aten::add.Tensor"(%s0, %s1, 1) : (tensor<f64>, tensor<f64>) -> tensor<f64>
  fsdp.phase backward
  %d = aten.call "aten::mul.Tensor"(%g, %g) : (tensor<2x1xf32>, tensor<2x1xf32>) -> tensor<2x1xf32>
  %de = aten.call "aten::expand"(%d, [2, 4], false) {views = array<i64: 0>, strides = [array<i64: 1, 0>]} : (tensor<2x1xf32>) -> tensor<2x4xf32>
  %n0 = aten.call "aten::div.Scalar"(%de, 4) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %a = aten.call "aten::add.Tensor"(%n0, %y, 3) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  %n1 = aten.call "aten::div.Scalar"(%de, 4) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %b = aten.call "aten::mul_.Tensor"(%n1, %a) {views = array<i64: 0>, mutates = array<i64: 0>} : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  %n2 = aten.call "aten::div.Scalar"(%de, 4) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %r = aten.call "aten::sum.dim_IntList"(%n2, [1], true, none) : (tensor<2x4xf32>) -> tensor<2x1xf32>
  %n3 = aten.call "aten::div.Scalar"(%de, 4) : (tensor<2x4xf32>) -> tensor<2x4xf32>
  %m = aten.call "aten::mul.Tensor"(%b, %r) {strides = [array<i64: 1, 2>]} : (tensor<2x4xf32>, tensor<2x1xf32>) -> tensor<2x4xf32>
  %dw = aten.call "aten::mul.Tensor"(%n3, %m) : (tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<2x4xf32>
  fsdp.gradients [@w] %dw : tensor<2x4xf32>
  fsdp.return %loss : tensor<f64>
}

// -----

// A transposition is none of the other dimensions, whatever strides a call
// says; permutations that undo one another do nothing, nor do reshapes to the
// same sizes. Arguments that no operator takes are left to the operator.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:       %[[w:.+]] = fsdp.read
// CHECK-NEXT:  %[[t:.+]] = aten.call "aten::t"(%[[w]])
// CHECK-NEXT:  aten.call "aten::mm"(%arg0, %[[t]])
// CHECK-NEXT:  %[[p:.+]] = aten.call "aten::permute"
// CHECK-NEXT:  aten.call "aten::permute"(%[[p]], [1, 2, 0])
// CHECK-NEXT:  %[[r:.+]] = aten.call "aten::exp"(%arg1)
// CHECK-NEXT:  aten.call "aten::transpose.int"(%[[r]], 7, 0)
// CHECK-NEXT:  aten.call "aten::permute"(%[[r]], 3)
// CHECK-NEXT:  %[[e:.+]] = aten.call "aten::exp"(%[[r]])
// CHECK-NEXT:  %[[f:.+]] = aten.call "aten::add.Tensor"(%[[e]], %[[r]], 1)
// CHECK-NEXT:  aten.call "aten::sum"(%[[f]]
// REMARK: remark: [Passed] SimplifyCalls | Category:fsdp-simplify | Remark="6 calls and writes of 0 B are not needed"
fsdp.param @w : tensor<4x4xf32>
fsdp.program @train_step(%in: tensor<4x4xf32>, %cube: tensor<2x2x2xf32>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4x4xf32>
  %t = aten.call "aten::t"(%w) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h = aten.call "aten::mm"(%in, %t) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %p0 = aten.call "aten::permute"(%cube, [1, 2, 0]) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %p1 = aten.call "aten::permute"(%p0, [1, 2, 0]) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %r = aten.call "aten::exp"(%cube) : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %q0 = aten.call "aten::permute"(%r, [1, 2, 0]) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %q1 = aten.call "aten::transpose.int"(%q0, 0, -1) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %q2 = aten.call "aten::transpose.int"(%q1, 1, 2) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %bad0 = aten.call "aten::transpose.int"(%r, 7, 0) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %bad1 = aten.call "aten::permute"(%r, 3) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %e = aten.call "aten::exp"(%q2) : (tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %v0 = aten.call "aten::view"(%r, [8]) {views = array<i64: 0>} : (tensor<2x2x2xf32>) -> tensor<8xf32>
  %v1 = aten.call "aten::view"(%v0, [4, 2]) {views = array<i64: 0>} : (tensor<8xf32>) -> tensor<4x2xf32>
  %v2 = aten.call "aten::_unsafe_view"(%v1, [2, 2, 2]) {views = array<i64: 0>} : (tensor<4x2xf32>) -> tensor<2x2x2xf32>
  %f = aten.call "aten::add.Tensor"(%e, %v2, 1) : (tensor<2x2x2xf32>, tensor<2x2x2xf32>) -> tensor<2x2x2xf32>
  %loss = aten.call "aten::sum"(%f, none, %p1, %bad0, %bad1) : (tensor<2x2x2xf32>, tensor<2x2x2xf32>, tensor<2x2x2xf32>, tensor<2x2x2xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.gradients [@w] %h : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A copy of a conjugated view stays: it has the elements, which the view only
// marks, and not every call takes a view that does so. So does one of a view of
// that view.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:       %[[conj:.+]] = aten.call "aten::_conj"
// CHECK-NEXT:  %[[copy:.+]] = aten.call "aten::clone"(%[[conj]]
// CHECK-NEXT:  aten.call "aten::view_as_real"(%[[copy]])
// CHECK:       %[[neg:.+]] = aten.call "aten::_neg_view"
// CHECK-NEXT:  %[[part:.+]] = aten.call "aten::view"(%[[neg]]
// CHECK-NEXT:  %[[own:.+]] = aten.call "aten::clone"(%[[part]]
// CHECK-NEXT:  aten.call "aten::sum"(%[[own]]
// REMARK-NOT: not needed
fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%in: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4xf32>
  %z = aten.call "aten::complex"(%w, %in) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xcomplex<f32>>
  %conj = aten.call "aten::_conj"(%z) {views = array<i64: 0>} : (tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>>
  %copy = aten.call "aten::clone"(%conj, none) : (tensor<4xcomplex<f32>>) -> tensor<4xcomplex<f32>>
  %pairs = aten.call "aten::view_as_real"(%copy) {views = array<i64: 0>} : (tensor<4xcomplex<f32>>) -> tensor<4x2xf32>
  %sin = aten.call "aten::sin"(%w) : (tensor<4xf32>) -> tensor<4xf32>
  %neg = aten.call "aten::_neg_view"(%sin) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
  %part = aten.call "aten::view"(%neg, [2, 2]) {views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  %own = aten.call "aten::clone"(%part, none) : (tensor<2x2xf32>) -> tensor<2x2xf32>
  %half = aten.call "aten::sum"(%own, none) : (tensor<2x2xf32>) -> tensor<f32>
  %other = aten.call "aten::sum"(%pairs, none) : (tensor<4x2xf32>) -> tensor<f32>
  %loss = aten.call "aten::add.Tensor"(%half, %other, 1) : (tensor<f32>, tensor<f32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::cos"(%w) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
