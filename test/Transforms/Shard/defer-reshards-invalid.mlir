// RUN: fsdp-opt --fsdp-defer-reshards --verify-diagnostics %s

// The policy would be lost in silence: the pass is the last that reads it.
// expected-error @below {{Program-16: expected a loop over microbatches: run fsdp-insert-accumulation first}}
fsdp.accumulation {reduce_each_microbatch = true, steps = 4}
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %loss = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}
