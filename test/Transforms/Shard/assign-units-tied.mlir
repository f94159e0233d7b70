// RUN: fsdp-opt --fsdp-assign-units --split-input-file --verify-diagnostics %s | FileCheck %s

// FSDP2 refuses a parameter that is tied across units. Here the units become
// one, and it is said. The root takes what is tied to it.

// CHECK:       fsdp.unit @"(root)" {reshard_after_forward = false}
// CHECK-NEXT:  fsdp.param @wte.weight : tensor<8x4xf32> unit @"(root)" {aliases = ["lm_head.weight"]}
// CHECK-NEXT:  fsdp.param @lm_head.bias : tensor<8xf32> unit @"(root)"
fsdp.unit_pattern "lm_head"
// expected-warning @below {{tied parameter has names in different units: "wte.weight" in "(root)", "lm_head.weight" in "lm_head"; the units are merged}}
fsdp.param @wte.weight : tensor<8x4xf32> {aliases = ["lm_head.weight"]}
fsdp.param @lm_head.bias : tensor<8xf32>

// -----

// CHECK:       fsdp.unit @"a+b"{{$}}
// CHECK-NEXT:  fsdp.param @a.weight : tensor<8x4xf32> unit @"a+b" {aliases = ["b.weight"]}
// CHECK-NEXT:  fsdp.param @b.bias : tensor<8xf32> unit @"a+b"
// CHECK-NEXT:  fsdp.unit @c
fsdp.unit_pattern "?"
// expected-warning @below {{tied parameter has names in different units: "a.weight" in "a", "b.weight" in "b"; the units are merged}}
fsdp.param @a.weight : tensor<8x4xf32> {aliases = ["b.weight"]}
fsdp.param @b.bias : tensor<8xf32>
fsdp.param @c.bias : tensor<8xf32>
