module {
fsdp.param @w : tensor<4x4xf32>
fsdp.program @train_step(%x: tensor<4x4xf32>) -> tensor<f32> {
  %w = fsdp.read @w : tensor<4x4xf32>
  fsdp.phase forward
  %a = aten.call "aten::mm"(%x, %w) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %b = aten.call "aten::relu"(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %c = aten.call "aten::tanh"(%b) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %loss = aten.call "aten::sum"(%c, none) : (tensor<4x4xf32>) -> tensor<f32>
  fsdp.phase backward
  fsdp.no_gradient [@w]
  fsdp.return %loss : tensor<f32>
}
}
