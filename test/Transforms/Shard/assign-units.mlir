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

// -----

// A list of patterns is one unit of all modules that they match.

// CHECK:       fsdp.unit @"norm+output" {reshard_after_forward = false}
// CHECK-NEXT:  fsdp.param @norm.weight : tensor<4xf32> unit @"norm+output"
// CHECK-NEXT:  fsdp.param @output.weight : tensor<8x4xf32> unit @"norm+output"
fsdp.unit_pattern "output", "norm" {reshard_after_forward = false}
fsdp.param @norm.weight : tensor<4xf32>
fsdp.param @output.weight : tensor<8x4xf32>

// -----

// Units by the class of their module.

// CHECK-NOT:   fsdp.module_classes
// CHECK:       fsdp.unit @h.0{{$}}
// CHECK-NEXT:  fsdp.param @h.0.up.weight : tensor<4x4xf32> unit @h.0
// CHECK:       fsdp.unit @"(root)"
// CHECK-NEXT:  fsdp.param @out.weight : tensor<4x4xf32> unit @"(root)"
module attributes {fsdp.module_classes = {h.0 = "Block", h.0.up = "Linear", out = "Linear"}} {
  fsdp.unit_pattern "Bl*" {by_class}
  fsdp.param @h.0.up.weight : tensor<4x4xf32>
  fsdp.param @out.weight : tensor<4x4xf32>
}

// -----

// Ignored parameters have no unit.

// CHECK:       fsdp.param @h.0.router : tensor<4xf32> {ignored}
// CHECK-NEXT:  fsdp.unit @h.0{{$}}
// CHECK-NEXT:  fsdp.param @h.0.up : tensor<4xf32> unit @h.0
// CHECK-NOT:   fsdp.ignore
fsdp.unit_pattern "h.*"
fsdp.ignore "**.router"
fsdp.param @h.0.router : tensor<4xf32>
fsdp.param @h.0.up : tensor<4xf32>

// -----

// A module that has no others is no unit, also of a list.

// CHECK:       fsdp.param @emb.weight : tensor<4xf32> {aliases = ["head.weight"], ignored}
// CHECK-NEXT:  fsdp.unit @layers.0{{$}}
// CHECK-NEXT:  fsdp.param @layers.0.up : tensor<4xf32> unit @layers.0
// CHECK-NOT:   fsdp.unit
fsdp.unit_pattern "layers.*", "head"
fsdp.unit_pattern "emb"
fsdp.ignore "head.weight"
fsdp.param @emb.weight : tensor<4xf32> {aliases = ["head.weight"]}
fsdp.param @layers.0.up : tensor<4xf32>

// -----

// An integer reshard_after_forward is one of groups, or what it amounts to;
// that of the root unit too.

// CHECK:       fsdp.unit @a {post_forward_size = 2 : i64}
// CHECK:       fsdp.unit @b{{$}}
// CHECK:       fsdp.unit @c {reshard_after_forward = false}
// CHECK:       fsdp.unit @"(root)" {post_forward_size = 2 : i64}
fsdp.mesh @world <["replicate"=2, "shard"=4]>
fsdp.unit_pattern "a" {post_forward_size = 2}
fsdp.unit_pattern "b" {post_forward_size = 4}
fsdp.unit_pattern "c" {post_forward_size = 1}
fsdp.unit_pattern "" {post_forward_size = 2}
fsdp.param @a.weight : tensor<4xf32>
fsdp.param @b.weight : tensor<4xf32>
fsdp.param @c.weight : tensor<4xf32>
fsdp.param @weight : tensor<4xf32>

// -----

// The root unit is gathered until backward unless the policy says otherwise.

// CHECK: fsdp.unit @"(root)"{{$}}
fsdp.mesh @world <["shard"=4]>
fsdp.unit_pattern "" {reshard_after_forward = true}
fsdp.param @weight : tensor<4xf32>

// -----

// Each unit has the policy of its pattern, the root unit that of "".

// CHECK-NOT: fsdp.unit_pattern
// CHECK:     fsdp.unit @layers.0 {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, reduce_dtype = f32>}
// CHECK:     fsdp.unit @"(root)" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>, reshard_after_forward = false}
module attributes {fsdp.captured_precision = {
    "(root)" = #fsdp.mixed_precision<param_dtype = bf16>,
    layers.0 = #fsdp.mixed_precision<param_dtype = f16, reduce_dtype = f32>}} {
  fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.unit_pattern "layers.*" {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, reduce_dtype = f32>}
  fsdp.param @layers.0.weight : tensor<4x4xf32> {compute_dtype = f16}
  fsdp.param @scale : tensor<4xf32> {compute_dtype = bf16}
}

// -----

// The units of the capture are those of the policy, or make no difference.

// CHECK-NOT: fsdp.captured_units
// CHECK-NOT: fsdp.entries
// CHECK:     fsdp.unit @"b+c"
// CHECK:     fsdp.unit @a
module attributes {fsdp.captured_units = [["c", "b"], ["d"]],
                   fsdp.entries = {b = "memory", "(root)" = "x"}} {
  fsdp.unit_pattern "b", "c"
  fsdp.unit_pattern "a"
  fsdp.param @b.weight : tensor<4x4xf32>
  fsdp.param @c.weight : tensor<4x4xf32>
  fsdp.param @a.weight : tensor<4x4xf32>
  fsdp.param @d.weight : tensor<4x4xf32>
}

// -----

// What was captured is compared module by module, also of units of several.

// CHECK-NOT: fsdp.captured_precision
// CHECK:     fsdp.unit @"norm+output" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
module attributes {fsdp.captured_precision = {
    norm = #fsdp.mixed_precision<param_dtype = bf16>,
    output = #fsdp.mixed_precision<param_dtype = bf16>}} {
  fsdp.unit_pattern "norm", "output" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.param @norm.weight : tensor<4xf32> {compute_dtype = bf16}
  fsdp.param @output.weight : tensor<8x4xf32> {compute_dtype = bf16}
}

// -----

// A unit is offloaded where its pattern says so, the root by the pattern "".

// CHECK:      fsdp.unit @a {cpu_offload}
// CHECK:      fsdp.unit @b{{$}}
// CHECK:      fsdp.unit @"(root)" {cpu_offload, reshard_after_forward = false}
fsdp.unit_pattern "" {cpu_offload}
fsdp.unit_pattern "a" {cpu_offload}
fsdp.unit_pattern "b"
fsdp.param @a.w : tensor<4xf32>
fsdp.param @b.w : tensor<4xf32>
fsdp.param @c : tensor<4xf32>

// -----

// And divides gradients by its own factor.

// CHECK:      fsdp.unit @a {gradient_division = #fsdp.gradient_division<factor = 4.000000e+00 : f64>}
// CHECK:      fsdp.unit @b{{$}}
// CHECK:      fsdp.unit @"(root)" {gradient_division = #fsdp.gradient_division<force_sum = true>, reshard_after_forward = false}
fsdp.unit_pattern "" {gradient_division = #fsdp.gradient_division<force_sum = true>}
fsdp.unit_pattern "a" {gradient_division = #fsdp.gradient_division<factor = 4.0 : f64>}
fsdp.unit_pattern "b"
fsdp.param @a.w : tensor<4xf32>
fsdp.param @b.w : tensor<4xf32>
fsdp.param @c : tensor<4xf32>
