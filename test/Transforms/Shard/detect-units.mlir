// RUN: fsdp-opt --fsdp-detect-units --split-input-file %s 2>/dev/null | FileCheck %s
// RUN: fsdp-opt --fsdp-detect-units --split-input-file --verify-diagnostics %s

// The layers are the units: not what is in them, though it is repeated too.

// CHECK-NOT:   fsdp.auto_units
// CHECK:       fsdp.unit_pattern "layers.0"
// CHECK-NEXT:  fsdp.unit_pattern "layers.1"
// CHECK-NOT:   fsdp.unit_pattern
// CHECK:       fsdp.param
// expected-remark @below {{chose as units: 2 modules "layers.*"}}
fsdp.auto_units
fsdp.param @embed.weight : tensor<4x4xf32>
fsdp.param @layers.0.attn.q.weight : tensor<4x4xf32>
fsdp.param @layers.0.attn.k.weight : tensor<4x4xf32>
fsdp.param @layers.0.mlp.up.weight : tensor<4x4xf32>
fsdp.param @layers.0.mlp.down.weight : tensor<4x4xf32>
fsdp.param @layers.1.attn.q.weight : tensor<4x4xf32>
fsdp.param @layers.1.attn.k.weight : tensor<4x4xf32>
fsdp.param @layers.1.mlp.up.weight : tensor<4x4xf32>
fsdp.param @layers.1.mlp.down.weight : tensor<4x4xf32>
fsdp.param @output.weight : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %e = fsdp.read @embed.weight : tensor<4x4xf32>
  %l0q = fsdp.read @layers.0.attn.q.weight : tensor<4x4xf32>
  %l0k = fsdp.read @layers.0.attn.k.weight : tensor<4x4xf32>
  %l0p = fsdp.read @layers.0.mlp.up.weight : tensor<4x4xf32>
  %l0n = fsdp.read @layers.0.mlp.down.weight : tensor<4x4xf32>
  %l1q = fsdp.read @layers.1.attn.q.weight : tensor<4x4xf32>
  %l1k = fsdp.read @layers.1.attn.k.weight : tensor<4x4xf32>
  %l1p = fsdp.read @layers.1.mlp.up.weight : tensor<4x4xf32>
  %l1n = fsdp.read @layers.1.mlp.down.weight : tensor<4x4xf32>
  %w = fsdp.read @output.weight : tensor<4x4xf32>
  fsdp.phase forward
  %h0 = aten.call "aten::mm"(%x, %e) {fsdp.module = "embed"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %q0 = aten.call "aten::mm"(%h0, %l0q) {fsdp.module = "layers.0.attn.q"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %k0 = aten.call "aten::mm"(%h0, %l0k) {fsdp.module = "layers.0.attn.k"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %a0 = aten.call "aten::mul.Tensor"(%q0, %k0) {fsdp.module = "layers.0.attn"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %u0 = aten.call "aten::mm"(%a0, %l0p) {fsdp.module = "layers.0.mlp.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r0 = aten.call "aten::relu"(%u0) {fsdp.module = "layers.0.mlp"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d0 = aten.call "aten::mm"(%r0, %l0n) {fsdp.module = "layers.0.mlp.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o0 = aten.call "aten::mul.Tensor"(%h0, %d0) {fsdp.module = "layers.0"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %q1 = aten.call "aten::mm"(%o0, %l1q) {fsdp.module = "layers.1.attn.q"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %k1 = aten.call "aten::mm"(%o0, %l1k) {fsdp.module = "layers.1.attn.k"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %a1 = aten.call "aten::mul.Tensor"(%q1, %k1) {fsdp.module = "layers.1.attn"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %u1 = aten.call "aten::mm"(%a1, %l1p) {fsdp.module = "layers.1.mlp.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r1 = aten.call "aten::relu"(%u1) {fsdp.module = "layers.1.mlp"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d1 = aten.call "aten::mm"(%r1, %l1n) {fsdp.module = "layers.1.mlp.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o1 = aten.call "aten::mul.Tensor"(%o0, %d1) {fsdp.module = "layers.1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%o1, %w) {fsdp.module = "output"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@embed.weight, @layers.0.attn.q.weight, @layers.0.attn.k.weight, @layers.0.mlp.up.weight, @layers.0.mlp.down.weight, @layers.1.attn.q.weight, @layers.1.attn.k.weight, @layers.1.mlp.up.weight, @layers.1.mlp.down.weight, @output.weight]
  fsdp.return %loss : tensor<f32>
}

// -----

// Rows of blocks are no blocks; a block with a downsampling branch is one.

// CHECK:       fsdp.unit_pattern "layer1.0"
// CHECK-NEXT:  fsdp.unit_pattern "layer1.1"
// CHECK-NEXT:  fsdp.unit_pattern "layer2.0"
// CHECK-NEXT:  fsdp.unit_pattern "layer2.1"
// CHECK-NOT:   fsdp.unit_pattern
// CHECK:       fsdp.param
// expected-remark @below {{chose as units: 4 modules "layer*.*"}}
fsdp.auto_units
fsdp.param @conv1.weight : tensor<4x4xf32>
fsdp.param @layer1.0.conv1.weight : tensor<4x4xf32>
fsdp.param @layer1.0.conv2.weight : tensor<4x4xf32>
fsdp.param @layer1.1.conv1.weight : tensor<4x4xf32>
fsdp.param @layer1.1.conv2.weight : tensor<4x4xf32>
fsdp.param @layer2.0.conv1.weight : tensor<4x4xf32>
fsdp.param @layer2.0.conv2.weight : tensor<4x4xf32>
fsdp.param @layer2.0.downsample.0.weight : tensor<4x4xf32>
fsdp.param @layer2.1.conv1.weight : tensor<4x4xf32>
fsdp.param @layer2.1.conv2.weight : tensor<4x4xf32>
fsdp.param @fc.weight : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %s = fsdp.read @conv1.weight : tensor<4x4xf32>
  %p0 = fsdp.read @layer1.0.conv1.weight : tensor<4x4xf32>
  %p1 = fsdp.read @layer1.0.conv2.weight : tensor<4x4xf32>
  %p2 = fsdp.read @layer1.1.conv1.weight : tensor<4x4xf32>
  %p3 = fsdp.read @layer1.1.conv2.weight : tensor<4x4xf32>
  %p4 = fsdp.read @layer2.0.conv1.weight : tensor<4x4xf32>
  %p5 = fsdp.read @layer2.0.conv2.weight : tensor<4x4xf32>
  %p6 = fsdp.read @layer2.0.downsample.0.weight : tensor<4x4xf32>
  %p7 = fsdp.read @layer2.1.conv1.weight : tensor<4x4xf32>
  %p8 = fsdp.read @layer2.1.conv2.weight : tensor<4x4xf32>
  %f = fsdp.read @fc.weight : tensor<4x4xf32>
  fsdp.phase forward
  %h = aten.call "aten::mm"(%x, %s) {fsdp.module = "conv1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %c10 = aten.call "aten::mm"(%h, %p0) {fsdp.module = "layer1.0.conv1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r10 = aten.call "aten::relu"(%c10) {fsdp.module = "layer1.0"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d10 = aten.call "aten::mm"(%r10, %p1) {fsdp.module = "layer1.0.conv2"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o10 = aten.call "aten::add.Tensor"(%d10, %h, 1) {fsdp.module = "layer1.0"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %c11 = aten.call "aten::mm"(%o10, %p2) {fsdp.module = "layer1.1.conv1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r11 = aten.call "aten::relu"(%c11) {fsdp.module = "layer1.1"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d11 = aten.call "aten::mm"(%r11, %p3) {fsdp.module = "layer1.1.conv2"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o11 = aten.call "aten::add.Tensor"(%d11, %o10, 1) {fsdp.module = "layer1.1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %c20 = aten.call "aten::mm"(%o11, %p4) {fsdp.module = "layer2.0.conv1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r20 = aten.call "aten::relu"(%c20) {fsdp.module = "layer2.0"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d20 = aten.call "aten::mm"(%r20, %p5) {fsdp.module = "layer2.0.conv2"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %b20 = aten.call "aten::mm"(%o11, %p6) {fsdp.module = "layer2.0.downsample.0"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o20 = aten.call "aten::add.Tensor"(%d20, %b20, 1) {fsdp.module = "layer2.0"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %c21 = aten.call "aten::mm"(%o20, %p7) {fsdp.module = "layer2.1.conv1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r21 = aten.call "aten::relu"(%c21) {fsdp.module = "layer2.1"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d21 = aten.call "aten::mm"(%r21, %p8) {fsdp.module = "layer2.1.conv2"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o21 = aten.call "aten::add.Tensor"(%d21, %o20, 1) {fsdp.module = "layer2.1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%o21, %f) {fsdp.module = "fc"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@conv1.weight, @layer1.0.conv1.weight, @layer1.0.conv2.weight, @layer1.1.conv1.weight, @layer1.1.conv2.weight, @layer2.0.conv1.weight, @layer2.0.conv2.weight, @layer2.0.downsample.0.weight, @layer2.1.conv1.weight, @layer2.1.conv2.weight, @fc.weight]
  fsdp.return %loss : tensor<f32>
}

// -----

// Modules that compute something else are no repetition, and neither are layers.

// CHECK-NOT: fsdp.unit_pattern
// CHECK:     fsdp.program
// expected-warning @below {{found no repeated modules: the root unit has all parameters}}
fsdp.auto_units
fsdp.param @net.0.a.weight : tensor<4x4xf32>
fsdp.param @net.1.b.weight : tensor<4x4xf32>
fsdp.param @net.2.weight : tensor<4x4xf32>
fsdp.param @net.3.weight : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %a = fsdp.read @net.0.a.weight : tensor<4x4xf32>
  %b = fsdp.read @net.1.b.weight : tensor<4x4xf32>
  %c = fsdp.read @net.2.weight : tensor<4x4xf32>
  %d = fsdp.read @net.3.weight : tensor<4x4xf32>
  fsdp.phase forward
  %h0 = aten.call "aten::mm"(%x, %a) {fsdp.module = "net.0.a"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %h1 = aten.call "aten::relu"(%h0) {fsdp.module = "net.0"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h2 = aten.call "aten::mm"(%h1, %b) {fsdp.module = "net.1.b"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %h3 = aten.call "aten::tanh"(%h2) {fsdp.module = "net.1"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %h4 = aten.call "aten::mm"(%h3, %c) {fsdp.module = "net.2"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%h4, %d) {fsdp.module = "net.3"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@net.0.a.weight, @net.1.b.weight, @net.2.weight, @net.3.weight]
  fsdp.return %loss : tensor<f32>
}

// -----

// Two stacks are two families.

// CHECK:       fsdp.unit_pattern "encoder.blocks.0"
// CHECK-NEXT:  fsdp.unit_pattern "encoder.blocks.1"
// CHECK-NEXT:  fsdp.unit_pattern "decoder.blocks.0"
// CHECK-NEXT:  fsdp.unit_pattern "decoder.blocks.1"
// expected-remark @below {{chose as units: 2 modules "encoder.blocks.*", 2 modules "decoder.blocks.*"}}
fsdp.auto_units
fsdp.param @encoder.blocks.0.up.weight : tensor<4x4xf32>
fsdp.param @encoder.blocks.0.down.weight : tensor<4x4xf32>
fsdp.param @encoder.blocks.1.up.weight : tensor<4x4xf32>
fsdp.param @encoder.blocks.1.down.weight : tensor<4x4xf32>
fsdp.param @decoder.blocks.0.up.weight : tensor<4x4xf32>
fsdp.param @decoder.blocks.0.down.weight : tensor<4x4xf32>
fsdp.param @decoder.blocks.1.up.weight : tensor<4x4xf32>
fsdp.param @decoder.blocks.1.down.weight : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %ue0 = fsdp.read @encoder.blocks.0.up.weight : tensor<4x4xf32>
  %ve0 = fsdp.read @encoder.blocks.0.down.weight : tensor<4x4xf32>
  %ue1 = fsdp.read @encoder.blocks.1.up.weight : tensor<4x4xf32>
  %ve1 = fsdp.read @encoder.blocks.1.down.weight : tensor<4x4xf32>
  %ud0 = fsdp.read @decoder.blocks.0.up.weight : tensor<4x4xf32>
  %vd0 = fsdp.read @decoder.blocks.0.down.weight : tensor<4x4xf32>
  %ud1 = fsdp.read @decoder.blocks.1.up.weight : tensor<4x4xf32>
  %vd1 = fsdp.read @decoder.blocks.1.down.weight : tensor<4x4xf32>
  fsdp.phase forward
  %he0 = aten.call "aten::mm"(%x, %ue0) {fsdp.module = "encoder.blocks.0.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %ae0 = aten.call "aten::relu"(%he0) {fsdp.module = "encoder.blocks.0"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %oe0 = aten.call "aten::mm"(%ae0, %ve0) {fsdp.module = "encoder.blocks.0.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %he1 = aten.call "aten::mm"(%oe0, %ue1) {fsdp.module = "encoder.blocks.1.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %ae1 = aten.call "aten::relu"(%he1) {fsdp.module = "encoder.blocks.1"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %oe1 = aten.call "aten::mm"(%ae1, %ve1) {fsdp.module = "encoder.blocks.1.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %hd0 = aten.call "aten::mm"(%oe1, %ud0) {fsdp.module = "decoder.blocks.0.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %ad0 = aten.call "aten::tanh"(%hd0) {fsdp.module = "decoder.blocks.0"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %od0 = aten.call "aten::mm"(%ad0, %vd0) {fsdp.module = "decoder.blocks.0.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %hd1 = aten.call "aten::mm"(%od0, %ud1) {fsdp.module = "decoder.blocks.1.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %ad1 = aten.call "aten::tanh"(%hd1) {fsdp.module = "decoder.blocks.1"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %od1 = aten.call "aten::mm"(%ad1, %vd1) {fsdp.module = "decoder.blocks.1.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%od1, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@encoder.blocks.0.up.weight, @encoder.blocks.0.down.weight, @encoder.blocks.1.up.weight, @encoder.blocks.1.down.weight, @decoder.blocks.0.up.weight, @decoder.blocks.0.down.weight, @decoder.blocks.1.up.weight, @decoder.blocks.1.down.weight]
  fsdp.return %loss : tensor<f32>
}

// -----

// A layer for which it makes a difference whether it is a unit is none.

// CHECK:       module attributes {fsdp.entries
// CHECK-NOT:   fsdp.unit_pattern "layers.0"
// CHECK:       fsdp.unit_pattern "layers.1"
module attributes {fsdp.entries = {layers.0 = "x"}} {
// expected-remark @below {{chose as units: 1 modules "layers.*"}}
fsdp.auto_units
fsdp.param @embed.weight : tensor<4x4xf32>
fsdp.param @layers.0.attn.q.weight : tensor<4x4xf32>
fsdp.param @layers.0.attn.k.weight : tensor<4x4xf32>
fsdp.param @layers.0.mlp.up.weight : tensor<4x4xf32>
fsdp.param @layers.0.mlp.down.weight : tensor<4x4xf32>
fsdp.param @layers.1.attn.q.weight : tensor<4x4xf32>
fsdp.param @layers.1.attn.k.weight : tensor<4x4xf32>
fsdp.param @layers.1.mlp.up.weight : tensor<4x4xf32>
fsdp.param @layers.1.mlp.down.weight : tensor<4x4xf32>
fsdp.param @output.weight : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %e = fsdp.read @embed.weight : tensor<4x4xf32>
  %l0q = fsdp.read @layers.0.attn.q.weight : tensor<4x4xf32>
  %l0k = fsdp.read @layers.0.attn.k.weight : tensor<4x4xf32>
  %l0p = fsdp.read @layers.0.mlp.up.weight : tensor<4x4xf32>
  %l0n = fsdp.read @layers.0.mlp.down.weight : tensor<4x4xf32>
  %l1q = fsdp.read @layers.1.attn.q.weight : tensor<4x4xf32>
  %l1k = fsdp.read @layers.1.attn.k.weight : tensor<4x4xf32>
  %l1p = fsdp.read @layers.1.mlp.up.weight : tensor<4x4xf32>
  %l1n = fsdp.read @layers.1.mlp.down.weight : tensor<4x4xf32>
  %w = fsdp.read @output.weight : tensor<4x4xf32>
  fsdp.phase forward
  %h0 = aten.call "aten::mm"(%x, %e) {fsdp.module = "embed"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %q0 = aten.call "aten::mm"(%h0, %l0q) {fsdp.module = "layers.0.attn.q"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %k0 = aten.call "aten::mm"(%h0, %l0k) {fsdp.module = "layers.0.attn.k"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %a0 = aten.call "aten::mul.Tensor"(%q0, %k0) {fsdp.module = "layers.0.attn"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %u0 = aten.call "aten::mm"(%a0, %l0p) {fsdp.module = "layers.0.mlp.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r0 = aten.call "aten::relu"(%u0) {fsdp.module = "layers.0.mlp"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d0 = aten.call "aten::mm"(%r0, %l0n) {fsdp.module = "layers.0.mlp.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o0 = aten.call "aten::mul.Tensor"(%h0, %d0) {fsdp.module = "layers.0"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %q1 = aten.call "aten::mm"(%o0, %l1q) {fsdp.module = "layers.1.attn.q"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %k1 = aten.call "aten::mm"(%o0, %l1k) {fsdp.module = "layers.1.attn.k"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %a1 = aten.call "aten::mul.Tensor"(%q1, %k1) {fsdp.module = "layers.1.attn"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %u1 = aten.call "aten::mm"(%a1, %l1p) {fsdp.module = "layers.1.mlp.up"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %r1 = aten.call "aten::relu"(%u1) {fsdp.module = "layers.1.mlp"} : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %d1 = aten.call "aten::mm"(%r1, %l1n) {fsdp.module = "layers.1.mlp.down"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %o1 = aten.call "aten::mul.Tensor"(%o0, %d1) {fsdp.module = "layers.1"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %y = aten.call "aten::mm"(%o1, %w) {fsdp.module = "output"} : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%y, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@embed.weight, @layers.0.attn.q.weight, @layers.0.attn.k.weight, @layers.0.mlp.up.weight, @layers.0.mlp.down.weight, @layers.1.attn.q.weight, @layers.1.attn.k.weight, @layers.1.mlp.up.weight, @layers.1.mlp.down.weight, @output.weight]
  fsdp.return %loss : tensor<f32>
}
}
