// RUN: fsdp-opt --fsdp-chunk-loss --split-input-file --verify-diagnostics %s

// expected-warning @below {{the loss stays whole: expected a cross-entropy of logits, found none}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4xf32>
  %p = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::sum"(%p, none) : (tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@w] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// The largest of the logits is read by itself.

// expected-warning @below {{the loss stays whole: aten::max needs the logits whole}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x5xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x5xf32>
  %logits = aten.call "aten::mm"(%x, %w) : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  // expected-note @below {{here}}
  %max = aten.call "aten::max"(%logits) : (tensor<4x5xf32>) -> tensor<f32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 1, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 1, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %xt = aten.call "aten::t"(%x) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<4x3xf32>) -> tensor<3x4xf32>
  %dw = aten.call "aten::mm"(%xt, %g) : (tensor<3x4xf32>, tensor<4x5xf32>) -> tensor<3x5xf32>
  fsdp.gradients [@w] %dw : tensor<3x5xf32>
  fsdp.return %nll#0 : tensor<f32>
}

// -----

// The gradient of the loss depends on the loss.

// expected-warning @below {{the loss stays whole: aten::nll_loss_backward needs what is computed from the loss}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x5xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x5xf32>
  %logits = aten.call "aten::mm"(%x, %w) : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 1, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  %loss = aten.call "aten::exp"(%nll#0) : (tensor<f32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %scaled = aten.call "aten::mul.Tensor"(%one, %loss) : (tensor<f32>, tensor<f32>) -> tensor<f32>
  // expected-note @below {{here}}
  %d = aten.call "aten::nll_loss_backward"(%scaled, %log, %y, none, 1, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %xt = aten.call "aten::t"(%x) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<4x3xf32>) -> tensor<3x4xf32>
  %dw = aten.call "aten::mm"(%xt, %g) : (tensor<3x4xf32>, tensor<4x5xf32>) -> tensor<3x5xf32>
  fsdp.gradients [@w] %dw : tensor<3x5xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A projection of the logits is computed before the loss, and of all rows.

// expected-warning @below {{the loss stays whole: aten::sum needs all rows before the loss}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x5xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %v: tensor<5x2xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x5xf32>
  %logits = aten.call "aten::mm"(%x, %w) : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  %p = aten.call "aten::mm"(%log, %v) : (tensor<4x5xf32>, tensor<5x2xf32>) -> tensor<4x2xf32>
  // expected-note @below {{here}}
  %metric = aten.call "aten::sum"(%p, none) : (tensor<4x2xf32>) -> tensor<f32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 1, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  %loss = aten.call "aten::add.Tensor"(%nll#0, %metric, 1) : (tensor<f32>, tensor<f32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 1, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %xt = aten.call "aten::t"(%x) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<4x3xf32>) -> tensor<3x4xf32>
  %dw = aten.call "aten::mm"(%xt, %g) : (tensor<3x4xf32>, tensor<4x5xf32>) -> tensor<3x5xf32>
  fsdp.gradients [@w] %dw : tensor<3x5xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// The gradient of the loss is the loss.

// expected-warning @below {{the loss stays whole: aten::nll_loss_backward needs all rows before}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x5xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x5xf32>
  %logits = aten.call "aten::mm"(%x, %w) : (tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 1, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  // expected-note @below {{here}}
  %d = aten.call "aten::nll_loss_backward"(%nll#0, %log, %y, none, 1, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %xt = aten.call "aten::t"(%x) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<4x3xf32>) -> tensor<3x4xf32>
  %dw = aten.call "aten::mm"(%xt, %g) : (tensor<3x4xf32>, tensor<4x5xf32>) -> tensor<3x5xf32>
  fsdp.gradients [@w] %dw : tensor<3x5xf32>
  fsdp.return %nll#0 : tensor<f32>
}

// -----

// As many rows as classes: the shapes do not tell what a product sums over.

// expected-warning @below {{the loss stays whole: aten::mm multiplies the logits by themselves}}
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x4xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x4xf32>
  %logits = aten.call "aten::mm"(%x, %w) : (tensor<4x3xf32>, tensor<3x4xf32>) -> tensor<4x4xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 2, -100) : (tensor<4x4xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 2, -100, %nll#1) : (tensor<f32>, tensor<4x4xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x4xf32>
  // expected-note @below {{here}}
  %p = aten.call "aten::mm"(%d, %log) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %xt = aten.call "aten::t"(%x) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<4x3xf32>) -> tensor<3x4xf32>
  %dw = aten.call "aten::mm"(%xt, %p) : (tensor<3x4xf32>, tensor<4x4xf32>) -> tensor<3x4xf32>
  fsdp.gradients [@w] %dw : tensor<3x4xf32>
  fsdp.return %nll#0 : tensor<f32>
}
