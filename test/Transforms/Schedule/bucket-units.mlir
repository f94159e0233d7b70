// RUN: fsdp-opt --fsdp-bucket-units --split-input-file %s | FileCheck %s

// Each parameter by itself.

// CHECK:      fsdp.unit @"a[0]"
// CHECK:      fsdp.unit @"a[1]"
// CHECK:      fsdp.param @a.w : tensor<4x4xf32> unit @"a[0]" {reduced_with = "a"}
// CHECK-NEXT: fsdp.param @a.b : tensor<4xf32> unit @"a[1]" {reduced_with = "a"}
// CHECK:      fsdp.unit @b
// CHECK:      fsdp.unit @c {reshard_after_forward = false}
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {bucket = "parameter"}
fsdp.unit @a
fsdp.param @a.w : tensor<4x4xf32> unit @a
fsdp.param @a.b : tensor<4xf32> unit @a
fsdp.unit @b
fsdp.param @b.w : tensor<4x4xf32> unit @b
fsdp.unit @c {reshard_after_forward = false}
fsdp.param @c.w : tensor<4x4xf32> unit @c

// -----

// Small neighbours of the same policy together.

// CHECK:      fsdp.unit @"a+b"
// CHECK-NEXT: fsdp.param @a.w : tensor<4x4xf32> unit @"a+b" {reduced_with = "a"}
// CHECK-NEXT: fsdp.param @a.b : tensor<4xf32> unit @"a+b"
// CHECK-NEXT: fsdp.param @b.w : tensor<4x4xf32> unit @"a+b" {reduced_with = "b"}
// CHECK-NEXT: fsdp.unit @c {reshard_after_forward = false}
// CHECK-NEXT: fsdp.param @c.w : tensor<4x4xf32> unit @c{{$}}
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {bucket = "saturation"}
fsdp.unit @a
fsdp.param @a.w : tensor<4x4xf32> unit @a
fsdp.param @a.b : tensor<4xf32> unit @a
fsdp.unit @b
fsdp.param @b.w : tensor<4x4xf32> unit @b
fsdp.unit @c {reshard_after_forward = false}
fsdp.param @c.w : tensor<4x4xf32> unit @c

// -----

// A unit of two dtypes is reduced in their common one: it stays whole.

// CHECK:      fsdp.unit @a
// CHECK-NEXT: fsdp.param @a.w : tensor<4x4xf32> unit @a
// CHECK-NEXT: fsdp.param @a.b : tensor<4xf64> unit @a
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {bucket = "parameter"}
fsdp.unit @a
fsdp.param @a.w : tensor<4x4xf32> unit @a
fsdp.param @a.b : tensor<4xf64> unit @a

// -----

// CHECK:      fsdp.unit @a
// CHECK-NEXT: fsdp.param @a.w : tensor<4x4xf32> unit @a
// CHECK-NEXT: fsdp.param @a.b : tensor<4xf32> unit @a
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {bucket = "unit"}
fsdp.unit @a
fsdp.param @a.w : tensor<4x4xf32> unit @a
fsdp.param @a.b : tensor<4xf32> unit @a
fsdp.unit @b
fsdp.param @b.w : tensor<4x4xf32> unit @b
fsdp.unit @c {reshard_after_forward = false}
fsdp.param @c.w : tensor<4x4xf32> unit @c
