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
  %h0 = aten.call "aten::mm"(%x, %e) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("embed")
  %q0 = aten.call "aten::mm"(%h0, %l0q) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.attn.q")
  %k0 = aten.call "aten::mm"(%h0, %l0k) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.attn.k")
  %a0 = aten.call "aten::mul.Tensor"(%q0, %k0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.attn")
  %u0 = aten.call "aten::mm"(%a0, %l0p) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.mlp.up")
  %r0 = aten.call "aten::relu"(%u0) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.mlp")
  %d0 = aten.call "aten::mm"(%r0, %l0n) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0.mlp.down")
  %o0 = aten.call "aten::mul.Tensor"(%h0, %d0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.0")
  %q1 = aten.call "aten::mm"(%o0, %l1q) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.attn.q")
  %k1 = aten.call "aten::mm"(%o0, %l1k) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.attn.k")
  %a1 = aten.call "aten::mul.Tensor"(%q1, %k1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.attn")
  %u1 = aten.call "aten::mm"(%a1, %l1p) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.mlp.up")
  %r1 = aten.call "aten::relu"(%u1) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.mlp")
  %d1 = aten.call "aten::mm"(%r1, %l1n) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1.mlp.down")
  %o1 = aten.call "aten::mul.Tensor"(%o0, %d1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layers.1")
  %y = aten.call "aten::mm"(%o1, %w) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("output")
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
  %h = aten.call "aten::mm"(%x, %s) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("conv1")
  %c10 = aten.call "aten::mm"(%h, %p0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.0.conv1")
  %r10 = aten.call "aten::relu"(%c10) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.0")
  %d10 = aten.call "aten::mm"(%r10, %p1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.0.conv2")
  %o10 = aten.call "aten::add.Tensor"(%d10, %h, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.0")
  %c11 = aten.call "aten::mm"(%o10, %p2) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.1.conv1")
  %r11 = aten.call "aten::relu"(%c11) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.1")
  %d11 = aten.call "aten::mm"(%r11, %p3) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.1.conv2")
  %o11 = aten.call "aten::add.Tensor"(%d11, %o10, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer1.1")
  %c20 = aten.call "aten::mm"(%o11, %p4) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.0.conv1")
  %r20 = aten.call "aten::relu"(%c20) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.0")
  %d20 = aten.call "aten::mm"(%r20, %p5) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.0.conv2")
  %b20 = aten.call "aten::mm"(%o11, %p6) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.0.downsample.0")
  %o20 = aten.call "aten::add.Tensor"(%d20, %b20, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.0")
  %c21 = aten.call "aten::mm"(%o20, %p7) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.1.conv1")
  %r21 = aten.call "aten::relu"(%c21) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.1")
  %d21 = aten.call "aten::mm"(%r21, %p8) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.1.conv2")
  %o21 = aten.call "aten::add.Tensor"(%d21, %o20, 1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("layer2.1")
  %y = aten.call "aten::mm"(%o21, %f) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("fc")
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
  %h0 = aten.call "aten::mm"(%x, %a) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.0.a")
  %h1 = aten.call "aten::relu"(%h0) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.0")
  %h2 = aten.call "aten::mm"(%h1, %b) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.1.b")
  %h3 = aten.call "aten::tanh"(%h2) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.1")
  %h4 = aten.call "aten::mm"(%h3, %c) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.2")
  %y = aten.call "aten::mm"(%h4, %d) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("net.3")
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
  %he0 = aten.call "aten::mm"(%x, %ue0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.0.up")
  %ae0 = aten.call "aten::relu"(%he0) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.0")
  %oe0 = aten.call "aten::mm"(%ae0, %ve0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.0.down")
  %he1 = aten.call "aten::mm"(%oe0, %ue1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.1.up")
  %ae1 = aten.call "aten::relu"(%he1) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.1")
  %oe1 = aten.call "aten::mm"(%ae1, %ve1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("encoder.blocks.1.down")
  %hd0 = aten.call "aten::mm"(%oe1, %ud0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.0.up")
  %ad0 = aten.call "aten::tanh"(%hd0) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.0")
  %od0 = aten.call "aten::mm"(%ad0, %vd0) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.0.down")
  %hd1 = aten.call "aten::mm"(%od0, %ud1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.1.up")
  %ad1 = aten.call "aten::tanh"(%hd1) : (tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.1")
  %od1 = aten.call "aten::mm"(%ad1, %vd1) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32> loc("decoder.blocks.1.down")
  %loss = aten.call "aten::sum"(%od1, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@encoder.blocks.0.up.weight, @encoder.blocks.0.down.weight, @encoder.blocks.1.up.weight, @encoder.blocks.1.down.weight, @decoder.blocks.0.up.weight, @decoder.blocks.0.down.weight, @decoder.blocks.1.up.weight, @decoder.blocks.1.down.weight]
  fsdp.return %loss : tensor<f32>
}
