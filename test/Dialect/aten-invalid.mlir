// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-1: expected 1 operands in args, got: 2}}
  %y = "aten.call"(%x) <{callee = "aten::add.Tensor", args = [unit, unit, 1]}> : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-2: views name operand 1, expected less than 1}}
  %y = aten.call "aten::alias"(%x) {views = array<i64: 1>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-2: expected views of 1 results, got: 2}}
  %y = aten.call "aten::alias"(%x) {views = array<i64: 0, 0>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-2: mutates names operand 3, expected less than 1}}
  %y = aten.call "aten::relu_"(%x) {mutates = array<i64: 3>} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-3: expected a callee of the form "namespace::name", got: "relu"}}
  %y = aten.call "relu"(%x) : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

// A shard is no operand of compute.
fsdp.mesh @world <["shard"=2]>
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{operand #0 must be variadic of ranked tensor of any type values}}
  %y = aten.call "aten::relu"(%s) : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

fsdp.program @p(%x: tensor<4x2xf32>) -> tensor<4x2xf32> {
  // expected-error @below {{Call-4: expected strides of 1 results, got: 2}}
  %y = aten.call "aten::relu"(%x) {strides = [array<i64: 1, 4>, array<i64>]} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  fsdp.return %y : tensor<4x2xf32>
}

// -----

fsdp.program @p(%x: tensor<4x2xf32>) -> tensor<4x2xf32> {
  // expected-error @below {{Call-4: expected a non-negative stride for each dimension of 'tensor<4x2xf32>', or none, got: array<i64: 1>}}
  %y = aten.call "aten::relu"(%x) {strides = [array<i64: 1>]} : (tensor<4x2xf32>) -> tensor<4x2xf32>
  fsdp.return %y : tensor<4x2xf32>
}

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Call-5: expected the schema of "mine::f.a", got: "mine::f(Tensor x) -> Tensor"}}
  %y = aten.call "mine::f.a"(%x) {schema = "mine::f(Tensor x) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}
