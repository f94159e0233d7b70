// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// Each case breaks one invariant of the attributes that the planned level adds.

fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Stream-1: expected the name of a stream, got: 1 : i64}}
  %loss = aten.call "aten::sum"(%x, none) {fsdp.stream = 1} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Stream-1: expected an array<i32> of events, got: array<i32: -1>}}
  %loss = aten.call "aten::sum"(%x, none) {fsdp.waits = array<i32: -1>} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Stream-1: expected the number of an event as an i32, got: 3 : i64}}
  %loss = aten.call "aten::sum"(%x, none) {fsdp.records = 3} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Offset-1: expected a byte offset for each result, or -1, got: array<i64: 0, 64>}}
  %loss = aten.call "aten::sum"(%x, none) {fsdp.offsets = array<i64: 0, 64>} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{Offset-1: expected a byte offset as fsdp.offset of argument 0, got: -1 : i64}}
fsdp.program @train_step(%x: tensor<4xf32> {fsdp.offset = -1}) -> tensor<f32> {
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{Input-1: expected a string as fsdp.name of argument 0, got: 1 : i64}}
fsdp.program @train_step(%x: tensor<4xf32> {fsdp.name = 1}) -> tensor<f32> {
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{Input-1: expected an integer as fsdp.high of argument 0, got: "9"}}
fsdp.program @train_step(%x: tensor<4xi64> {fsdp.high = "9"}) -> tensor<f32> {
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xi64>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{Input-1: expected a number for each dimension as fsdp.strides of argument 0, got: array<i64: 1, 4>}}
fsdp.program @train_step(%x: tensor<4xf32> {fsdp.strides = array<i64: 1, 4>}) -> tensor<f32> {
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
