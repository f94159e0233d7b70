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
// CHECK-NEXT:  %[[F2:.*]] = aten.call "aten::mm"(%[[X]], %[[W]]) {fsdp.module = "layer", fsdp.why = "activations of layer are made again where backward first uses them", recompute}
// CHECK-NEXT:  %[[G:.*]] = aten.call "aten::silu_backward"(%{{.*}}, %[[F2]])
// CHECK-NEXT:  aten.call "aten::mm"(%[[X]], %[[G]])
// REMARK:      remark: {{.*}}[Passed] Recompute {{.*}}module layer: 1 call is recomputed in backward, 64 B are not kept
fsdp.checkpoint_pattern "layer"
fsdp.param @layer.w : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %w = fsdp.read @layer.w : tensor<4x4xf32>
  fsdp.phase forward
  %f = aten.call "aten::mm"(%x, %w) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %s = aten.call "aten::silu"(%f) {fsdp.module = "layer.act"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %e = aten.call "aten::exp"(%s) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%e, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::expand"(%one, [4, 4], false) {views = array<i64: 0>} : (tensor<f32>) -> tensor<4x4xf32>
  %ds = aten.call "aten::mul.Tensor"(%d, %e) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %df = aten.call "aten::silu_backward"(%ds, %f) {fsdp.module = "layer.act"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %dw = aten.call "aten::mm"(%x, %df) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@layer.w] %dw : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Two layers: the second's input is kept, the first's chain up to it is not
// recomputed for it. The second layer's calls come before the first's.

// CHECK-LABEL: fsdp.program @two_layers
// CHECK:       %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::silu"(%[[A]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[C:.*]] = aten.call "aten::exp"(%[[B]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  aten.call "aten::silu"(%[[C]]) {fsdp.module = {{.*}}} :
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[C2:.*]] = aten.call "aten::exp"(%[[B]]) {{.*}}recompute}
// CHECK-NEXT:  %[[G:.*]] = aten.call "aten::silu_backward"(%[[X]], %[[C2]])
// CHECK-NEXT:  %[[H:.*]] = aten.call "aten::mul.Tensor"(%[[G]], %[[C2]])
// CHECK-NEXT:  %[[A2:.*]] = aten.call "aten::exp"(%[[X]]) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::silu_backward"(%[[H]], %[[A2]])
fsdp.checkpoint_pattern "layers.*"
fsdp.program @two_layers(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layers.0"} : (tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::silu"(%a) {fsdp.module = "layers.0.act"} : (tensor<4xf32>) -> tensor<4xf32>
  %c = aten.call "aten::exp"(%b) {fsdp.module = "layers.1"} : (tensor<4xf32>) -> tensor<4xf32>
  %d = aten.call "aten::silu"(%c) {fsdp.module = "layers.1.act"} : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%d, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %dc = aten.call "aten::silu_backward"(%x, %c) {fsdp.module = "layers.1.act"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %db = aten.call "aten::mul.Tensor"(%dc, %c) {fsdp.module = "layers.1"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %da = aten.call "aten::silu_backward"(%db, %a) {fsdp.module = "layers.0.act"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %dx = aten.call "aten::mul_.Tensor"(%da, %a) {fsdp.module = "layers.0", mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Operators in `save`, with or without overload, and random ones are not
// called again; their users are.

// CHECK-LABEL: fsdp.program @selective
// CHECK:       %[[E:.*]] = aten.call "aten::exp"(%{{.*}}) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[M:.*]] = aten.call "aten::mm"(%[[E]], %[[E]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[A:.*]] = aten.call "aten::add.Tensor"(%[[M]], %[[E]], 1) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[N:.*]] = aten.call "aten::empty_like"
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::bernoulli_.float"(%[[N]]
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  %[[E2:.*]] = aten.call "aten::exp"(%{{.*}}) {{.*}}recompute}
// CHECK-NEXT:  %[[P2:.*]] = aten.call "aten::mul.Tensor"(%[[A]], %[[B]]) {{.*}}recompute}
// CHECK-NEXT:  "aten::foo"([%[[E2]], %[[M]], %[[A]], %[[B]], %[[P2]]])
// REMARK:      remark: {{.*}}[Passed] Recompute {{.*}}module layer: 2 calls are recomputed in backward, 128 B are not kept, 128 B are, because of save
// REMARK:      remark: {{.*}}[Missed] Recompute {{.*}}module layer: kept for backward all the same: 64 B from a random operator
fsdp.checkpoint_pattern "layer" {save = ["aten::mm", "aten::add.Tensor"]}
fsdp.program @selective(%x: tensor<4x4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %e = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %m = aten.call "aten::mm"(%e, %e) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %a = aten.call "aten::add.Tensor"(%m, %e, 1) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %n = aten.call "aten::empty_like"(%x, none, none, none, none, none) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %b = aten.call "aten::bernoulli_.float"(%n, 0.5, none) {fsdp.module = "layer", mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %p = aten.call "aten::mul.Tensor"(%a, %b) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %q = aten.call "aten::sin"(%p) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%q, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::foo"([%e, %m, %a, %b, %p]) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
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
// CHECK-NEXT:  %[[V:.*]] = aten.call "aten::t"(%[[B]]) {fsdp.module = "layer", views = array<i64: 0>}
// CHECK-NEXT:  aten.call "aten::mm"(%[[V]], %[[X]])
fsdp.checkpoint_pattern "layer"
fsdp.program @in_place(%x: tensor<4x4xf32>, %y: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = aten.call "aten::select.int"(%a, 0, 1) {fsdp.module = "layer", views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4xf32>
  %c = aten.call "aten::copy_"(%r, %y, false) {fsdp.module = "layer", mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::mul_.Tensor"(%a, %x) {fsdp.module = "layer", mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %m = aten.call "aten::mm"(%b, %x) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%m, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %t = aten.call "aten::t"(%b) {fsdp.module = "layer", views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %g = aten.call "aten::mm"(%t, %x) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
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
// REMARK:      remark: {{.*}}[Missed] Recompute {{.*}}module layer: kept for backward all the same: 112 B because operands change later, 128 B because others use them
fsdp.buffer @mean : tensor<4xf32>
fsdp.buffer @var : tensor<4xf32>
fsdp.checkpoint_pattern "layer"
fsdp.program @kept(%x: tensor<4x4xf32>) -> tensor<f32> {
  %mean = fsdp.read_buffer @mean : tensor<4xf32>
  %var = fsdp.read_buffer @var : tensor<4xf32>
  fsdp.phase forward
  %u = aten.call "aten::sin"(%mean) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %s = aten.call "aten::sin"(%a) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %m = aten.call "aten::mm"(%x, %x) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %n:3 = aten.call "aten::native_batch_norm"(%m, none, none, %mean, %var, true, 0.1, 1.0e-5) {fsdp.module = "layer", mutates = array<i64: 1, 2>} : (tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>)
  %b = aten.call "aten::add_.Tensor"(%a, %n#0, 1) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%b, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::foo"([%u, %a, %s, %m, %n#0, %n#1, %n#2]) {fsdp.module = "layer"} : (tensor<4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<4x4xf32>
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
  %k = aten.call "aten::exp"(%x) {fsdp.module = "a.inner"} : (tensor<4xf32>) -> tensor<4xf32>
  %j = aten.call "aten::exp"(%k) {fsdp.module = "b.c"} : (tensor<4xf32>) -> tensor<4xf32>
  %t = aten.call "aten::sin"(%j) {fsdp.module = "b"} : (tensor<4xf32>) -> tensor<4xf32>
  %s = aten.call "aten::neg"(%t) : (tensor<4xf32>) -> tensor<4xf32>
  %i = aten.call "aten::exp"(%s) {fsdp.module = "b.c"} : (tensor<4xf32>) -> tensor<4xf32>
  %h = aten.call "aten::sin"(%i) {fsdp.module = "b"} : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%h, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %di = aten.call "aten::cos"(%i) {fsdp.module = "b"} : (tensor<4xf32>) -> tensor<4xf32>
  %ds = aten.call "aten::neg"(%s) : (tensor<4xf32>) -> tensor<4xf32>
  %dj = aten.call "aten::cos"(%j) {fsdp.module = "b"} : (tensor<4xf32>) -> tensor<4xf32>
  %dk = aten.call "aten::cos"(%k) {fsdp.module = "a.inner"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Of every two calls the first is kept: the second is made again, from it.

// CHECK-LABEL: fsdp.program @every_second
// CHECK:       %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::exp"(%[[A]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[C:.*]] = aten.call "aten::exp"(%[[B]]) {fsdp.module = {{.*}}} :
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%[[X]], %[[C]])
// CHECK-NEXT:  %[[B2:.*]] = aten.call "aten::exp"(%[[A]]) {{.*}}recompute}
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[B2]])
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[A]])
fsdp.checkpoint_pattern "layer" {save = ["aten::exp/2"]}
fsdp.program @every_second(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %b = aten.call "aten::exp"(%a) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %c = aten.call "aten::exp"(%b) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %d = aten.call "aten::silu"(%c) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%d, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %c) {fsdp.module = "layer"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %h = aten.call "aten::mul.Tensor"(%g, %b) {fsdp.module = "layer"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %i = aten.call "aten::mul.Tensor"(%h, %a) {fsdp.module = "layer"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// With `products`, what is dear is kept: products, and what ranks added up.
// The parts that an all-gather brings together are gathered again.

// CHECK-LABEL: fsdp.program @products
// CHECK:       %[[P:.*]] = aten.call "aten::mm"
// CHECK:       %[[R:.*]] = aten.call "_c10d_functional::all_reduce"(%[[P]]
// CHECK:       %[[A:.*]] = aten.call "_c10d_functional::all_gather_into_tensor"(%[[R]]
// CHECK:       fsdp.phase backward
// CHECK-NOT:   "aten::mm"
// CHECK-NOT:   "_c10d_functional::all_reduce"
// CHECK:       %[[A2:.*]] = aten.call "_c10d_functional::all_gather_into_tensor"(%[[R]], 2, "tensor") {{.*}}recompute
// CHECK-NEXT:  %[[S2:.*]] = aten.call "aten::silu"(%[[A2]]) {{.*}}recompute
// CHECK-NEXT:  aten.call "aten::silu_backward"(%{{.*}}, %[[S2]])
module attributes {fsdp.model_parallel = {axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}], data_stride = 2 : i64, ranks = 2 : i64}} {
fsdp.checkpoint_pattern "layer" {save = ["products"]}
fsdp.param @w : tensor<4x4xf32>
fsdp.program @products(%x: tensor<4x4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4x4xf32>
  fsdp.phase forward
  %p = aten.call "aten::mm"(%x, %w) {fsdp.module = "layer"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r = aten.call "_c10d_functional::all_reduce"(%p, "sum", "tensor") {fsdp.module = "layer", schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %a = aten.call "_c10d_functional::all_gather_into_tensor"(%r, 2, "tensor") {fsdp.module = "layer", schema = "_c10d_functional::all_gather_into_tensor(Tensor input, int group_size, Any group_name) -> Tensor"} : (tensor<4x4xf32>) -> tensor<8x4xf32>
  %s = aten.call "aten::silu"(%a) {fsdp.module = "layer"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %e = aten.call "aten::silu"(%s) {fsdp.module = "layer"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %loss = aten.call "aten::sum"(%e, none) : (tensor<8x4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::expand"(%one, [8, 4], false) {views = array<i64: 0>} : (tensor<f32>) -> tensor<8x4xf32>
  %g = aten.call "aten::silu_backward"(%d, %s) {fsdp.module = "layer"} : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  %h = aten.call "aten::slice.Tensor"(%g, 0, 0, 4, 1) {fsdp.module = "layer", views = array<i64: 0>} : (tensor<8x4xf32>) -> tensor<4x4xf32>
  %dw = aten.call "aten::clone"(%h, none) {fsdp.module = "layer"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  fsdp.gradients [@w] %dw : tensor<4x4xf32>
  fsdp.return %loss : tensor<f32>
}
}
