// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  // expected-error @below {{Kernel-1: expected in a kernel an aten.call that writes no operand, aliases none and draws no random numbers}}
  %0 = aten.call "aten::neg_"(%x) {mutates = array<i64: 0>, views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
}

// -----

fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  // expected-error @below {{Kernel-1: expected in a kernel an aten.call that}}
  %0 = aten.call "aten::rand_like"(%x, none, none, none, none, none) {random} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
}

// -----

fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  // expected-error @below {{Kernel-1: expected in a kernel an aten.call that}}
  %0 = builtin.unrealized_conversion_cast %x : tensor<4xf32> to tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
}

// -----

// expected-error @below {{Kernel-1: expected results of one shape, got: 'tensor<4xf32>', 'tensor<1xf32>'}}
fsdp.kernel @k {
^bb0(%x: tensor<4xf32>, %y: tensor<1xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = aten.call "aten::neg"(%y) : (tensor<1xf32>) -> tensor<1xf32>
  fsdp.kernel_return %0, %1 : tensor<4xf32>, tensor<1xf32>
}

// -----

// expected-error @below {{Kernel-1: expected strides for each of the 1 operands, got: 2}}
fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
} {operand_strides = [array<i64: 1>, array<i64>]}

// -----

// expected-error @below {{Kernel-1: expected no strides of an operand, or one for each of its dimensions, got: array<i64: 1, 1>}}
fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
} {operand_strides = [array<i64: 1, 1>]}

// -----

// expected-error @below {{Kernel-1: expected strides of dense results, got: array<i64: 2>}}
fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
} {strides = array<i64: 2>}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Fused-1: expected @k to name an fsdp.kernel, found none}}
  %0 = fsdp.fused @k(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %0 : tensor<4xf32>
}

// -----

fsdp.kernel @k {
^bb0(%x: tensor<4xf32>):
  %0 = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.kernel_return %0 : tensor<4xf32>
}
fsdp.program @p(%x: tensor<4xbf16>) -> tensor<4xbf16> {
  // expected-error @below {{Fused-1: expected the types of @k, ('tensor<4xf32>') -> ('tensor<4xf32>')}}
  %0 = fsdp.fused @k(%x) : (tensor<4xbf16>) -> tensor<4xbf16>
  fsdp.return %0 : tensor<4xbf16>
}
