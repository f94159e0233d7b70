// RUN: fsdp-opt --fsdp-assign-units --split-input-file %s | FileCheck %s

// Each module that the pattern matches is a unit of its own; what no pattern
// claims belongs to the root.

// CHECK:       fsdp.unit @"(root)" {reshard_after_forward = false}
// CHECK-NEXT:  fsdp.param @embed.weight : tensor<8x4xf32> unit @"(root)"
// CHECK-NEXT:  fsdp.unit @layers.0{{$}}
// CHECK-NEXT:  fsdp.param @layers.0.weight : tensor<4x4xf32> unit @layers.0
// CHECK-NEXT:  fsdp.unit @layers.1{{$}}
// CHECK-NEXT:  fsdp.param @layers.1.weight : tensor<4x4xf32> unit @layers.1
// CHECK-NOT:   fsdp.unit_pattern
fsdp.unit_pattern "layers.*"
fsdp.param @embed.weight : tensor<8x4xf32>
fsdp.param @layers.0.weight : tensor<4x4xf32>
fsdp.param @layers.1.weight : tensor<4x4xf32>

// -----

// `*` stays within one segment, `**` crosses them; the innermost module wins,
// whatever the order of the patterns, and of two patterns the first.

// CHECK:       fsdp.unit @blocks.0 {reshard_after_forward = false}
// CHECK-NEXT:  fsdp.param @blocks.0.norm.weight : tensor<4xf32> unit @blocks.0
// CHECK-NEXT:  fsdp.unit @blocks.0.mlp.up{{$}}
// CHECK-NEXT:  fsdp.param @blocks.0.mlp.up.weight : tensor<4x4xf32> unit @blocks.0.mlp.up
// CHECK-NEXT:  fsdp.param @blocks.0.mlp.down.weight : tensor<4x4xf32> unit @blocks.0
fsdp.unit_pattern "blocks.*" {reshard_after_forward = false}
fsdp.unit_pattern "**.up" {reshard_after_forward = true}
fsdp.unit_pattern "blocks.0.mlp.u?" {reshard_after_forward = false}
fsdp.param @blocks.0.norm.weight : tensor<4xf32>
fsdp.param @blocks.0.mlp.up.weight : tensor<4x4xf32>
fsdp.param @blocks.0.mlp.down.weight : tensor<4x4xf32>

// -----

// A pattern whose modules own parameters only through inner units matches all
// the same.

// CHECK:       fsdp.unit @h.0.mlp{{$}}
// CHECK-NEXT:  fsdp.param @h.0.mlp.weight : tensor<4x4xf32> unit @h.0.mlp
// CHECK-NOT:   fsdp.unit @h.0{{$}}
fsdp.unit_pattern "h.*"
fsdp.unit_pattern "h.*.mlp"
fsdp.param @h.0.mlp.weight : tensor<4x4xf32>

// -----

// A tied parameter has one unit.

// CHECK: fsdp.param @wte.weight : tensor<8x4xf32> unit @"(root)" {aliases = ["lm_head.weight"]}
fsdp.param @wte.weight : tensor<8x4xf32> {aliases = ["lm_head.weight"]}
