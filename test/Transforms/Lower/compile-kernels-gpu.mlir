// RUN: fsdp-opt --fsdp-compile-kernels=print %s -o %t 2>&1 | FileCheck %s
// RUN: FileCheck %s --check-prefix=CODE < %t
// RUN: not fsdp-opt --fsdp-compile-kernels=targets=x86-64-v4 %s 2>&1 | FileCheck %s --check-prefix=BAD

// BAD: fsdp-compile-kernels: expected sm_90 as a target, got: x86-64-v4

module attributes {fsdp.captured_for = {arch = "sm_90", device = "cuda", torch = "2.15.0"}} {

// A thread takes the eight elements of bf16 that 16 bytes hold: 2 x 3 x 2 of
// them. The operand that has one element a row is read once.

// CHECK-LABEL: // sm_90
// CHECK:       func.func @fsdp_kernel(%[[X:.*]]: !llvm.ptr<1>, %[[N:.*]]: !llvm.ptr<1>, %[[Y:.*]]: !llvm.ptr<1>)
// CHECK-DAG:     llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.ctaid.x"()
// CHECK-DAG:     llvm.call_intrinsic "llvm.nvvm.read.ptx.sreg.tid.x"()
// CHECK:         %[[IN:.*]] = arith.cmpi ult, %{{.*}}, %c12_i64
// CHECK:         scf.if %[[IN]]
// CHECK:           llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<1> -> vector<8xi16>
// CHECK:           llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK-COUNT-8:   arith.mulf
// CHECK:           llvm.store %{{.*}}, %{{.*}} {alignment = 16 : i64} : vector<8xi16>, !llvm.ptr<1>
// CODE-LABEL:  fsdp.kernel @scale
// CODE:          code = {sm_90 = {entry = 0 : i64, image = "{{[0-9a-f]+}}", imports = []}}, trips = 12 : i64
fsdp.kernel @scale {
^bb0(%x: tensor<2x3x16xbf16>, %n: tensor<2x3x1xbf16>):
  %0 = aten.call "aten::mul.Tensor"(%x, %n) : (tensor<2x3x16xbf16>, tensor<2x3x1xbf16>) -> tensor<2x3x16xbf16>
  fsdp.kernel_return %0 : tensor<2x3x16xbf16>
}

// 35 elements are one a thread. The function of exp is libdevice's; rounding to
// bf16 is one instruction.

// CHECK-LABEL: // sm_90
// CHECK:         llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr<1> -> i16
// CHECK:         func.call @__nv_expf(%{{.*}}) : (f32) -> f32
// CHECK:         arith.divf
// CHECK:         arith.truncf %{{.*}} : f32 to bf16
// CHECK:       func.func private @__nv_expf(f32) -> f32
// CODE-LABEL:  fsdp.kernel @silu
// CODE:          trips = 35 : i64
fsdp.kernel @silu {
^bb0(%x: tensor<35xbf16>):
  %0 = aten.call "aten::silu"(%x) : (tensor<35xbf16>) -> tensor<35xbf16>
  fsdp.kernel_return %0 : tensor<35xbf16>
}

// The halves of a rotary embedding: four elements of float32 a thread, in rows
// of 32 that are 64 apart.

// CHECK-LABEL: // sm_90
// CHECK:         arith.divui %{{.*}}, %{{.*}} : i32
// CHECK:         llvm.load %{{.*}} {alignment = 16 : i64} : !llvm.ptr<1> -> vector<4xf32>
// CODE-LABEL:  fsdp.kernel @half
// CODE:          trips = 128 : i64
fsdp.kernel @half {
^bb0(%a: tensor<2x8x32xf32>, %c: tensor<8x32xf32>):
  %0 = aten.call "aten::mul.Tensor"(%a, %c) : (tensor<2x8x32xf32>, tensor<8x32xf32>) -> tensor<2x8x32xf32>
  fsdp.kernel_return %0 : tensor<2x8x32xf32>
} {operand_strides = [array<i64: 512, 64, 1>, array<i64>]}

}
