// RUN: fsdp-opt --fsdp-offload-activations --split-input-file %s | FileCheck %s
// RUN: fsdp-opt --fsdp-offload-activations --cse --canonicalize --split-input-file %s | FileCheck %s --check-prefix=CSE
// RUN: fsdp-opt --fsdp-offload-activations --split-input-file %s --remarks-filter='fsdp-.*' --remark-format=emitRemark 2>&1 >/dev/null | FileCheck %s --check-prefix=REMARK

// Out after the last use in forward, back before the first in backward. Kept on
// the device: what is small, what another module made, and what backward does
// not use.

// CSE: fsdp.offload_activation
// CSE: fsdp.reload_activation

// REMARK: remark: [Passed] OffloadActivation
// REMARK-SAME: "layer": 1 activations, 2048 bytes, are kept on the host until backward

// CHECK-NOT:   fsdp.offload_pattern
// CHECK-LABEL: fsdp.program @train_step
// CHECK:       %[[A:.*]] = aten.call "aten::exp"(%[[X:.*]]) {fsdp.module = {{.*}}} :
// CHECK-NEXT:  %[[B:.*]] = aten.call "aten::silu"(%[[A]])
// CHECK-NEXT:  %[[C:.*]] = aten.call "aten::sin"(%[[A]])
// CHECK-NEXT:  %[[H:.*]] = fsdp.offload_activation %[[A]] {{.*}}: tensor<512xf32> to !fsdp.host<tensor<512xf32>>
// CHECK-NEXT:  %[[S:.*]] = aten.call "aten::sum"(%[[B]], none)
// CHECK-NEXT:  %[[D:.*]] = aten.call "aten::exp"(%[[C]])
// CHECK:       fsdp.phase backward
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%[[D]], %[[S]])
// CHECK-NEXT:  %[[R:.*]] = fsdp.reload_activation %[[H]] {{.*}}: !fsdp.host<tensor<512xf32>> to tensor<512xf32>
// CHECK-NEXT:  aten.call "aten::silu_backward"(%{{.*}}, %[[R]])
// CHECK-NEXT:  aten.call "aten::mul.Tensor"(%{{.*}}, %[[R]])
fsdp.offload_pattern "layer"
fsdp.program @train_step(%x: tensor<512xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer.act"} : (tensor<512xf32>) -> tensor<512xf32>
  %b = aten.call "aten::silu"(%a) {fsdp.module = "layer"} : (tensor<512xf32>) -> tensor<512xf32>
  %c = aten.call "aten::sin"(%a) {fsdp.module = "layer"} : (tensor<512xf32>) -> tensor<512xf32>
  %s = aten.call "aten::sum"(%b, none) {fsdp.module = "layer"} : (tensor<512xf32>) -> tensor<f32>
  %d = aten.call "aten::exp"(%c) {fsdp.module = "other"} : (tensor<512xf32>) -> tensor<512xf32>
  %loss = aten.call "aten::sum"(%d, none) {fsdp.module = "layer"} : (tensor<512xf32>) -> tensor<f32>
  fsdp.phase backward
  %dd = aten.call "aten::mul.Tensor"(%d, %s) {fsdp.module = "other"} : (tensor<512xf32>, tensor<f32>) -> tensor<512xf32>
  %db = aten.call "aten::silu_backward"(%dd, %a) {fsdp.module = "layer"} : (tensor<512xf32>, tensor<512xf32>) -> tensor<512xf32>
  %da = aten.call "aten::mul.Tensor"(%db, %a) {fsdp.module = "layer"} : (tensor<512xf32>, tensor<512xf32>) -> tensor<512xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A storage goes and comes once, with all its views that backward uses, those
// that a write in place gave too; a view that backward takes is one of the
// storage that came back.

// REMARK: "layers.*": 1 activations, 2048 bytes

// CHECK-LABEL: fsdp.program @views
// CHECK:       %[[A:.*]] = aten.call "aten::exp"
// CHECK-NEXT:  %[[V:.*]] = aten.call "aten::view"(%[[A]]
// CHECK-NEXT:  %[[W:.*]] = aten.call "aten::relu_"(%[[V]])
// CHECK-NEXT:  aten.call "aten::sum"(%[[W]], none)
// CHECK-NEXT:  %[[H:.*]] = fsdp.offload_activation %[[A]], %[[V]], %[[W]] {{.*}}: tensor<512xf32>, tensor<2x256xf32>, tensor<2x256xf32> to !fsdp.host<tensor<512xf32>, tensor<2x256xf32>, tensor<2x256xf32>>
// CHECK-NEXT:  fsdp.phase backward
// CHECK-NEXT:  %[[R:.*]]:3 = fsdp.reload_activation %[[H]]
// CHECK-NEXT:  %[[T:.*]] = aten.call "aten::t"(%[[R]]#1)
// CHECK-NEXT:  aten.call "aten::mm"(%[[R]]#2, %[[T]])
fsdp.offload_pattern "layers.*"
fsdp.program @views(%x: tensor<512xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layers.0"} : (tensor<512xf32>) -> tensor<512xf32>
  %v = aten.call "aten::view"(%a, [2, 256]) {fsdp.module = "layers.0", views = array<i64: 0>} : (tensor<512xf32>) -> tensor<2x256xf32>
  %w = aten.call "aten::relu_"(%v) {fsdp.module = "layers.0", mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<2x256xf32>) -> tensor<2x256xf32>
  %loss = aten.call "aten::sum"(%w, none) : (tensor<2x256xf32>) -> tensor<f32>
  fsdp.phase backward
  %t = aten.call "aten::t"(%v) {fsdp.module = "layers.0", views = array<i64: 0>} : (tensor<2x256xf32>) -> tensor<256x2xf32>
  %m = aten.call "aten::mm"(%w, %t) {fsdp.module = "layers.0"} : (tensor<2x256xf32>, tensor<256x2xf32>) -> tensor<2x2xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// What is held on the device anyway stays there: the loss, a parameter's view,
// a gradient, a buffer. Recomputed calls take what comes back.

// REMARK: remark: [Missed] OffloadActivation
// REMARK-SAME: "**": 0 activations, 0 bytes

// CHECK-LABEL: fsdp.program @held
// CHECK-NOT:   fsdp.offload_activation
fsdp.offload_pattern "**" {min_bytes = 1 : i64}
fsdp.param @w : tensor<4xf32>
fsdp.buffer @b : tensor<4xf32>
fsdp.program @held(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4xf32>
  %b = fsdp.read_buffer @b : tensor<4xf32>
  fsdp.phase forward
  %v = aten.call "aten::view"(%w, [2, 2]) {fsdp.module = "layer", views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  %u = aten.call "aten::view"(%b, [2, 2]) {fsdp.module = "layer", views = array<i64: 0>} : (tensor<4xf32>) -> tensor<2x2xf32>
  %g = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%x, none) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %m = aten.call "aten::mm"(%v, %u) {fsdp.module = "layer"} : (tensor<2x2xf32>, tensor<2x2xf32>) -> tensor<2x2xf32>
  %n = aten.call "aten::mul.Tensor"(%g, %loss) {fsdp.module = "layer"} : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A complex number has two parts.

// CHECK-LABEL: fsdp.program @complex
// CHECK:         fsdp.offload_activation %{{.*}} {{.*}}: tensor<256xcomplex<f32>>
// REMARK: "layers.0": 1 activations, 2048 bytes, are kept on the host until backward
fsdp.offload_pattern "layers.0" {min_bytes = 2048}
fsdp.program @complex(%x: tensor<256xcomplex<f32>>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layers.0"} : (tensor<256xcomplex<f32>>) -> tensor<256xcomplex<f32>>
  %b = aten.call "aten::abs"(%a) : (tensor<256xcomplex<f32>>) -> tensor<256xf32>
  %loss = aten.call "aten::sum"(%b, none) : (tensor<256xf32>) -> tensor<f32>
  fsdp.phase backward
  %c = aten.call "aten::sgn"(%a) {fsdp.module = "layers.0"} : (tensor<256xcomplex<f32>>) -> tensor<256xcomplex<f32>>
  fsdp.return %loss : tensor<f32>
}
