// RUN: fsdp-opt --fsdp-recompute-activations --split-input-file --verify-diagnostics %s

// expected-error @below {{pattern "layers.*" matches no module that is called}}
fsdp.checkpoint_pattern "layers.*"
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %loss = aten.call "aten::sum"(%x, none) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{no module that matches "layer" calls the operator "aten::mm"}}
fsdp.checkpoint_pattern "layer" {save = ["aten::sum", "aten::mm"]}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %y = aten.call "aten::mm"(%x, %x) {fsdp.module = "other"} : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%y, none) {fsdp.module = "layer"} : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
