// RUN: fsdp-opt --fsdp-compile-kernels %s | FileCheck %s
// RUN: fsdp-opt --fsdp-compile-kernels="targets=x86-64-v4 print" %s -o %t 2>&1 | FileCheck %s --check-prefix=LOOP
// RUN: FileCheck %s --check-prefix=ONE < %t
// RUN: not fsdp-opt --fsdp-compile-kernels=targets=z80 %s 2>&1 | FileCheck %s --check-prefix=BAD

// All dimensions are one, but for the operand that is broadcast: a loop over
// rows, in them one over vectors and one over what is left.

// CHECK-LABEL: fsdp.kernel @scale
// CHECK:       code = {"x86-64-v3" = {entry = 0 : i64, image = "[[IMAGE:[0-9a-f]+]]", imports = []}, "x86-64-v4" = {entry = 0 : i64, image = "{{[0-9a-f]+}}", imports = []}}, trips = 6 : i64
// ONE-LABEL:   fsdp.kernel @scale
// ONE-NOT:     x86-64-v3
// LOOP-LABEL:  func.func @scale(%arg0: !llvm.ptr, %arg1: !llvm.ptr, %arg2: i64, %arg3: i64)
// LOOP:          scf.for %[[ROW:.*]] = %arg2 to %arg3 step
// LOOP:            %[[N:.*]] = llvm.load %{{.*}} {alignment = 4 : i64} : !llvm.ptr -> f32
// LOOP:            scf.for
// LOOP:              %[[X:.*]] = llvm.load %{{.*}} {alignment = 2 : i64} : !llvm.ptr -> vector<16xi16>
// LOOP:              arith.shli
// LOOP:              %[[ALL:.*]] = vector.broadcast %[[N]] : f32 to vector<16xf32>
// LOOP:              arith.mulf %{{.*}}, %[[ALL]] : vector<16xf32>
// LOOP:            scf.for
// LOOP:              arith.mulf %{{.*}}, %[[N]] : f32
fsdp.kernel @scale {
^bb0(%x: tensor<2x3x20xbf16>, %n: tensor<2x3x1xf32>):
  %0 = aten.call "aten::_to_copy"(%x, 6, none, none, none, false, none) : (tensor<2x3x20xbf16>) -> tensor<2x3x20xf32>
  %1 = aten.call "aten::mul.Tensor"(%0, %n) : (tensor<2x3x20xf32>, tensor<2x3x1xf32>) -> tensor<2x3x20xf32>
  fsdp.kernel_return %1 : tensor<2x3x20xf32>
}

// One row; Sleef's function is called through the table of imports, and no
// elements are left. The multiply-add is one that ATen's compiler forms.

// CHECK-LABEL: fsdp.kernel @silu_backward
// CHECK:       imports = ["Sleef_expf8_u10"]
// CHECK-SAME:  imports = ["Sleef_expf16_u10"]
// CHECK-SAME:  trips = 128 : i64
// LOOP-LABEL:  func.func @silu_backward
// LOOP:          scf.for
// LOOP:            %[[F:.*]] = llvm.load %{{.*}} invariant : !llvm.ptr -> !llvm.ptr
// LOOP:            llvm.call %[[F]](%{{.*}}) : !llvm.ptr, (vector<16xf32>) -> vector<16xf32>
// LOOP:            math.fma
// LOOP-NOT:      scf.for
fsdp.kernel @silu_backward {
^bb0(%g: tensor<2x64xf32>, %x: tensor<2x64xf32>):
  %0 = aten.call "aten::silu_backward"(%g, %x) : (tensor<2x64xf32>, tensor<2x64xf32>) -> tensor<2x64xf32>
  fsdp.kernel_return %0 : tensor<2x64xf32>
} {whole}

// BAD: fsdp-compile-kernels: expected x86-64-v3 or x86-64-v4 as a target, got: z80

// What code cannot compute, or only a part of, has none: an operator that is not
// element-wise, silu with a tail, a whole kernel that does not fill its vectors.

// CHECK-LABEL: fsdp.kernel @no_code
// CHECK-NOT:     code =
// CHECK-LABEL: fsdp.kernel @no_tails
// CHECK-NOT:     code =
// CHECK-LABEL: fsdp.kernel @not_full
// CHECK-NOT:     code =
// LOOP-LABEL:  func.func @last
// CHECK-LABEL: fsdp.kernel @last
// CHECK:         code =
fsdp.kernel @no_code {
^bb0(%x: tensor<64xf32>):
  %0 = aten.call "aten::cumsum"(%x, 0, none) : (tensor<64xf32>) -> tensor<64xf32>
  fsdp.kernel_return %0 : tensor<64xf32>
}
fsdp.kernel @no_tails {
^bb0(%x: tensor<64xf32>):
  %0 = aten.call "aten::silu"(%x) : (tensor<64xf32>) -> tensor<64xf32>
  fsdp.kernel_return %0 : tensor<64xf32>
}
fsdp.kernel @not_full {
^bb0(%x: tensor<60xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<60xf32>) -> tensor<60xf32>
  fsdp.kernel_return %0 : tensor<60xf32>
} {whole}
fsdp.kernel @last {
^bb0(%x: tensor<60xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<60xf32>) -> tensor<60xf32>
  fsdp.kernel_return %0 : tensor<60xf32>
}
