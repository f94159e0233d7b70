// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Axis-1: expected fsdp.model_parallel on the module, with the numbers ranks and data_stride, and axes of a name, ranks and stride, got: {ranks = 2 : i64}}}
module attributes {fsdp.model_parallel = {ranks = 2 : i64}} {
}

// -----

// expected-error @below {{Axis-1: expected axes with names of their own, got "tensor"}}
module attributes {fsdp.model_parallel = {ranks = 4 : i64, data_stride = 4 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}, {name = "tensor", ranks = 2 : i64, stride = 2 : i64}]}} {
}

// -----

// expected-error @below {{Axis-1: expected ranks and stride of the axis "tensor" in [1, 1048576], got 0 and 1}}
module attributes {fsdp.model_parallel = {ranks = 4 : i64, data_stride = 4 : i64, axes = [{name = "tensor", ranks = 0 : i64, stride = 1 : i64}]}} {
}

// -----

// expected-error @below {{Axis-1: expected ranks and data_stride in [1, 1048576], got 4 and 0}}
module attributes {fsdp.model_parallel = {ranks = 4 : i64, data_stride = 0 : i64, axes = []}} {
}

// -----

// An axis that nobody declared.
fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Axis-2: expected an axis of the model's mesh (it has none), got "tensor"}}
  %y = aten.call "_c10d_functional::all_reduce"(%x, "sum", "tensor") {schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}

// -----

module attributes {fsdp.model_parallel = {ranks = 2 : i64, data_stride = 2 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}]}} {
fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Axis-2: expected an axis of the model's mesh ("tensor"), got "context"}}
  %y = aten.call "_c10d_functional::all_reduce"(%x, "sum", "context") {schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}
}

// -----

module attributes {fsdp.model_parallel = {ranks = 2 : i64, data_stride = 2 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}]}} {
fsdp.program @p(%x: tensor<4xf32>) -> tensor<8xf32> {
  // expected-error @below {{Axis-2: expected the 2 ranks of the axis "tensor", got 4}}
  %y = aten.call "_c10d_functional::all_gather_into_tensor"(%x, 4, "tensor") {schema = "_c10d_functional::all_gather_into_tensor(Tensor input, int group_size, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<8xf32>
  fsdp.return %y : tensor<8xf32>
}
}

// -----

module attributes {fsdp.model_parallel = {ranks = 2 : i64, data_stride = 2 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}]}} {
fsdp.program @p(%x: tensor<4x3xf32>) -> tensor<4x6xf32> {
  // expected-error @below {{Axis-2: expected over the 2 ranks of the axis "tensor" the result [8, 3], got [4, 6]}}
  %y = aten.call "_c10d_functional::all_gather_into_tensor"(%x, 2, "tensor") {schema = "_c10d_functional::all_gather_into_tensor(Tensor input, int group_size, Any group_name) -> Tensor"} : (tensor<4x3xf32>) -> tensor<4x6xf32>
  fsdp.return %y : tensor<4x6xf32>
}
}

// -----

module attributes {fsdp.model_parallel = {ranks = 2 : i64, data_stride = 2 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}]}} {
fsdp.program @p(%x: tensor<5xf32>) -> tensor<2xf32> {
  // expected-error @below {{Axis-2: expected rows that the 2 ranks of the axis "tensor" can share evenly, got the operand [5]}}
  %y = aten.call "_c10d_functional::reduce_scatter_tensor"(%x, "sum", 2, "tensor") {schema = "_c10d_functional::reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, Any group_name) -> Tensor"} : (tensor<5xf32>) -> tensor<2xf32>
  fsdp.return %y : tensor<2xf32>
}
}

// -----

// What is not known is neither checked nor priced, so it is no part of a plan.
module attributes {fsdp.model_parallel = {ranks = 2 : i64, data_stride = 2 : i64, axes = [{name = "tensor", ranks = 2 : i64, stride = 1 : i64}]}} {
fsdp.program @p(%x: tensor<4xf32>) -> tensor<4xf32> {
  // expected-error @below {{Axis-2: expected a collective that is known, got another over the axis "tensor"}}
  %y = aten.call "_c10d_functional::all_permute"(%x, "tensor") {schema = "_c10d_functional::all_permute(Tensor input, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.return %y : tensor<4xf32>
}
}
