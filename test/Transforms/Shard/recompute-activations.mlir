// RUN: fsdp-opt --fsdp-recompute-activations --split-input-file --remarks-filter=fsdp-recompute --remark-format=emitRemark %s 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t
// RUN: fsdp-opt --fsdp-recompute-activations --cse --split-input-file %s | FileCheck %s --check-prefix=CSE

// What the layer's backward uses is computed again before the first use; the
// input stays, and so does the output: the loss is outside. CSE merges nothing.

// CSE: aten.call "aten::mm"({{.*}}) {{.*}}recompute}

// CHECK-NOT:   fsdp.checkpoint_pattern
// CHECK-LABEL: fsdp.program @train_step
// CHECK:       %[[W:.*]] = fsdp.read @layer.w
// CHECK:       %[[F:.*]] = aten.call "aten::mm"(%[[X:.*]], %[[W]])
// CHECK-NEXT:  %[[S:.*]] = aten.call "aten::silu"(%[[F]])
// CHECK-NEXT:  %[[E:.*]] = aten.call "aten::exp"(%[[S]])
// CHECK-NEXT:  aten.call "aten::sum"(%[[E]], none)
// CHECK-NEXT:  fsdp.phase backward
// CHECK-NEXT:  aten.call "aten::ones_like"
// CHECK-NEXT:  aten.call "aten::expand"
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[E]])
// CHECK-NEXT:  %[[F2:.*]] = aten.call "aten::mm"(%[[X]], %[[W]]) {fsdp.why = "activations of layer are made again where backward first uses them", recompute}
// CHECK-NEXT:  %[[G:.*]] = aten.call "aten::silu_backward"(%{{.*}}, %[[F2]])
// CHECK-NEXT:  aten.call "aten::mm"(%[[X]], %[[G]])
// REMARK:      remark: {{.*}}[Passed] Recompute {{.*}}module layer: 1 call is made again in backward, 64 B are not kept
fsdp.checkpoint_pattern "layer"
fsdp.param @layer.w : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %w = fsdp.read @layer.w : tensor<4x4xf32>
  fsdp.phase forward
  %f = aten.call "aten::mm"(%x, %w) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %s = aten.call "aten::silu"(%f) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer.act")
  %e = aten.call "aten::exp"(%s) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("")
  %loss = aten.call "aten::sum"(%e, none) : (tensor<4x4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::expand"(%one, [4, 4], false) {views = array<i64: 0>} : (tensor<f32>) -> tensor<4x4xf32>
  %ds = aten.call "aten::mul.Tensor"(%d, %e) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("")
  %df = aten.call "aten::silu_backward"(%ds, %f) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer.act")
  %dw = aten.call "aten::mm"(%x, %df) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  fsdp.gradients [@layer.w] %dw : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Two layers: the second's input is kept, the first's chain up to it is not
// recomputed for it. The second layer's calls come before the first's.

// CHECK-LABEL: fsdp.program @two_layers
// CHECK:       %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) :
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::silu"(%[[A]]) :
// CHECK-NEXT:  %[[C:.*]] = aten.call "aten::exp"(%[[B]]) :
// CHECK-NEXT:  aten.call "aten::silu"(%[[C]]) :
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[C2:.*]] = aten.call "aten::exp"(%[[B]]) {{.*}}recompute}
// CHECK-NEXT:  %[[G:.*]] = aten.call "aten::silu_backward"(%[[X]], %[[C2]])
// CHECK-NEXT:  %[[H:.*]] = aten.call "aten::mul.Tensor"(%[[G]], %[[C2]])
// CHECK-NEXT:  %[[A2:.*]] = aten.call "aten::exp"(%[[X]]) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::silu_backward"(%[[H]], %[[A2]])
fsdp.checkpoint_pattern "layers.*"
fsdp.program @two_layers(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("layers.0")
  %b = aten.call "aten::silu"(%a) : (tensor<4xf32>) -> tensor<4xf32> loc("layers.0.act")
  %c = aten.call "aten::exp"(%b) : (tensor<4xf32>) -> tensor<4xf32> loc("layers.1")
  %d = aten.call "aten::silu"(%c) : (tensor<4xf32>) -> tensor<4xf32> loc("layers.1.act")
  %loss = aten.call "aten::sum"(%d, none) : (tensor<4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %dc = aten.call "aten::silu_backward"(%x, %c) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layers.1.act")
  %db = aten.call "aten::mul.Tensor"(%dc, %c) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layers.1")
  %da = aten.call "aten::silu_backward"(%db, %a) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layers.0.act")
  %dx = aten.call "aten::mul_.Tensor"(%da, %a) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layers.0")
  fsdp.return %loss : tensor<f32>
}

// -----

// Operators in `save`, with or without overload, and random ones are not
// called again; their users are.

// CHECK-LABEL: fsdp.program @selective
// CHECK:       %[[E:.*]] = aten.call "aten::exp"(%{{.*}}) :
// CHECK-NEXT:  %[[M:.*]] = aten.call "aten::mm"(%[[E]], %[[E]]) :
// CHECK-NEXT:  %[[A:.*]] = aten.call "aten::add.Tensor"(%[[M]], %[[E]], 1) :
// CHECK-NEXT:  %[[N:.*]] = aten.call "aten::empty_like"
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::bernoulli_.float"(%[[N]]
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[E2:.*]] = aten.call "aten::exp"(%{{.*}}) {{.*}}recompute}
// CHECK-NEXT:  %[[P2:.*]] = aten.call "aten::mul.Tensor"(%[[A]], %[[B]]) {{.*}}recompute}
// CHECK-NEXT:  "aten::foo"([%[[E2]], %[[M]], %[[A]], %[[B]], %[[P2]]])
// REMARK:      remark: {{.*}}[Passed] Recompute {{.*}}module layer: 2 calls are made again in backward, 128 B are not kept, 128 B are, as save says
// REMARK:      remark: {{.*}}[Missed] Recompute {{.*}}module layer: kept for backward all the same: 64 B by a random operator
fsdp.checkpoint_pattern "layer" {save = ["aten::mm", "aten::add.Tensor"]}
fsdp.program @selective(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %e = aten.call "aten::exp"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %m = aten.call "aten::mm"(%e, %e) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %a = aten.call "aten::add.Tensor"(%m, %e, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %n = aten.call "aten::empty_like"(%x, none, none, none, none, none) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %b = aten.call "aten::bernoulli_.float"(%n, 0.5, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %p = aten.call "aten::mul.Tensor"(%a, %b) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %q = aten.call "aten::sin"(%p) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %loss = aten.call "aten::sum"(%q, none) : (tensor<4x4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %g = aten.call "aten::foo"([%e, %m, %a, %b, %p]) : (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  fsdp.return %loss : tensor<f32>
}

// -----

// Writes in place: a chain is recomputed whole, its writers and views
// included, wherever backward reads it. Backward's own view moves along.

// CHECK-LABEL: fsdp.program @in_place
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) {{.*}}recompute}
// CHECK-NEXT:  %[[R:.*]] = aten.call "aten::select.int"(%[[A]], 0, 1) {{.*}}recompute, views = array<i64: 0>}
// CHECK-NEXT:  aten.call "aten::copy_"(%[[R]], %[[Y:.*]], false) {{.*}}mutates = array<i64: 0>, recompute, views = array<i64: 0>}
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::mul_.Tensor"(%[[A]], %[[X]]) {{.*}}mutates = array<i64: 0>, recompute, views = array<i64: 0>}
// CHECK-NEXT:  %[[V:.*]] = aten.call "aten::t"(%[[B]]) {views = array<i64: 0>}
// CHECK-NEXT:  aten.call "aten::mm"(%[[V]], %[[X]])
fsdp.checkpoint_pattern "layer"
fsdp.program @in_place(%x: tensor<4x4xf32>, %y: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %r = aten.call "aten::select.int"(%a, 0, 1) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4xf32> loc("layer")
  %c = aten.call "aten::copy_"(%r, %y, false) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %b = aten.call "aten::mul_.Tensor"(%a, %x) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %m = aten.call "aten::mm"(%b, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %loss = aten.call "aten::sum"(%m, none) : (tensor<4x4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %t = aten.call "aten::t"(%b) {views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %g = aten.call "aten::mm"(%t, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  fsdp.return %loss : tensor<f32>
}

// -----

// What cannot be called again is kept, and with it what read the storage
// before: a write outside the module (%a), a write of what another owns (the
// batch normalisation's statistics), a read of what is written later (%u).

// CHECK-LABEL: fsdp.program @kept
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[M:.*]] = aten.call "aten::mm"({{.*}}) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::foo"(
// CHECK-NOT:   recompute
// REMARK:      remark: {{.*}}[Missed] Recompute {{.*}}module layer: kept for backward all the same: 112 B as operands change later, 128 B as others use them
fsdp.buffer @mean : tensor<4xf32>
fsdp.buffer @var : tensor<4xf32>
fsdp.checkpoint_pattern "layer"
fsdp.program @kept(%x: tensor<4x4xf32>) -> tensor<f32> {
  %mean = fsdp.read_buffer @mean : tensor<4xf32>
  %var = fsdp.read_buffer @var : tensor<4xf32>
  fsdp.phase forward
  %u = aten.call "aten::sin"(%mean) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %a = aten.call "aten::exp"(%x) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %s = aten.call "aten::sin"(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %m = aten.call "aten::mm"(%x, %x) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer")
  %n:3 = aten.call "aten::native_batch_norm"(%m, none, none, %mean, %var, true, 0.1, 1.0e-5) {mutates = array<i64: 1, 2>} : (tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>) loc("layer")
  %b = aten.call "aten::add_.Tensor"(%a, %n#0, 1) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("")
  %loss = aten.call "aten::sum"(%b, none) : (tensor<4x4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %g = aten.call "aten::foo"([%u, %a, %s, %m, %n#0, %n#1, %n#2]) : (tensor<4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4x4xf32> loc("layer")
  fsdp.return %loss : tensor<f32>
}

// -----

// The outermost matching module counts: the inner one is recomputed with it,
// under the outer one's policy. A module called twice is two recomputations.

// CHECK-LABEL: fsdp.program @nested_and_twice
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[I:.*]] = aten.call "aten::exp"(%[[S:.*]]) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::cos"(%[[I]])
// CHECK-NEXT:  aten.call "aten::neg"(%[[S]])
// CHECK-NEXT:  %[[J:.*]] = aten.call "aten::exp"(%{{.*}}) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::cos"(%[[J]])
fsdp.checkpoint_pattern "a.inner" {save = ["aten::exp"]}
fsdp.checkpoint_pattern "b" {save = ["aten::sin"]}
fsdp.program @nested_and_twice(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %k = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("a.inner")
  %j = aten.call "aten::exp"(%k) : (tensor<4xf32>) -> tensor<4xf32> loc("b.c")
  %t = aten.call "aten::sin"(%j) : (tensor<4xf32>) -> tensor<4xf32> loc("b")
  %s = aten.call "aten::neg"(%t) : (tensor<4xf32>) -> tensor<4xf32> loc("")
  %i = aten.call "aten::exp"(%s) : (tensor<4xf32>) -> tensor<4xf32> loc("b.c")
  %h = aten.call "aten::sin"(%i) : (tensor<4xf32>) -> tensor<4xf32> loc("b")
  %loss = aten.call "aten::sum"(%h, none) : (tensor<4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %di = aten.call "aten::cos"(%i) : (tensor<4xf32>) -> tensor<4xf32> loc("b")
  %ds = aten.call "aten::neg"(%s) : (tensor<4xf32>) -> tensor<4xf32> loc("")
  %dj = aten.call "aten::cos"(%j) : (tensor<4xf32>) -> tensor<4xf32> loc("b")
  %dk = aten.call "aten::cos"(%k) : (tensor<4xf32>) -> tensor<4xf32> loc("a.inner")
  fsdp.return %loss : tensor<f32>
}

// -----

// Of every two calls the first is kept: the second is made again, from it.

// CHECK-LABEL: fsdp.program @every_second
// CHECK:       %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) :
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::exp"(%[[A]]) :
// CHECK-NEXT:  %[[C:.*]] = aten.call "aten::exp"(%[[B]]) :
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%[[X]], %[[C]])
// CHECK-NEXT:  %[[B2:.*]] = aten.call "aten::exp"(%[[A]]) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[B2]])
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[A]])
fsdp.checkpoint_pattern "layer" {save = ["aten::exp/2"]}
fsdp.program @every_second(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %b = aten.call "aten::exp"(%a) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %c = aten.call "aten::exp"(%b) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %d = aten.call "aten::silu"(%c) : (tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %loss = aten.call "aten::sum"(%d, none) : (tensor<4xf32>) -> tensor<f32> loc("")
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %c) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %h = aten.call "aten::mul.Tensor"(%g, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layer")
  %i = aten.call "aten::mul.Tensor"(%h, %a) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> loc("layer")
  fsdp.return %loss : tensor<f32>
}
