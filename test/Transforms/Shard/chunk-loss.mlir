// RUN: fsdp-opt --fsdp-chunk-loss --split-input-file %s --remarks-filter='fsdp-.*' --remark-format=emitRemark 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK <%t

// A mean over the targets that are not ignored. Backward begins before the
// section; the products that give the weight's gradient are added in place.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         fsdp.phase forward
// CHECK:         %[[WT:.+]] = aten.call "aten::t"(%[[W:.+]]) {
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NEXT:    %[[ONE:.+]] = aten.call "aten::full"([], 1, 6, 0, device, false)
// CHECK-NEXT:    %[[WTT:.+]] = aten.call "aten::t"(%[[WT]])
// CHECK-NEXT:    %[[USED:.+]] = aten.call "aten::ne.Scalar"(%[[Y:.+]], -100) {{.*}} -> tensor<7xi1>
// CHECK-NEXT:    %[[SUM:.+]] = aten.call "aten::sum"(%[[USED]], none) {{.*}} -> tensor<i64>
// CHECK-NEXT:    %[[COUNT:.+]] = aten.call "aten::_to_copy"(%[[SUM]], 6,
// CHECK-NEXT:    %[[X0:.+]] = aten.call "aten::slice.Tensor"(%[[X:.+]], 0, 0, 4, 1) {{.*}} -> tensor<4x3xf32>
// CHECK-NEXT:    %[[LOGITS0:.+]] = aten.call "aten::mm"(%[[X0]], %[[WT]]) {{.*}} -> tensor<4x5xf32>
// CHECK-NEXT:    %[[LOG0:.+]] = aten.call "aten::_log_softmax"(%[[LOGITS0]], 1, false)
// CHECK-NEXT:    %[[Y0:.+]] = aten.call "aten::slice.Tensor"(%[[Y]], 0, 0, 4, 1)
// CHECK-NEXT:    %[[NLL0:.+]]:2 = aten.call "aten::nll_loss_forward"(%[[LOG0]], %[[Y0]], none, 2, -100)
// CHECK-NEXT:    %[[D0:.+]] = aten.call "aten::nll_loss_backward"(%[[ONE]], %[[LOG0]], %[[Y0]], none, 1, -100, %[[COUNT]])
// CHECK-NEXT:    %[[G0:.+]] = aten.call "aten::_log_softmax_backward_data"(%[[D0]], %[[LOG0]], 1, 6)
// CHECK-NEXT:    %[[GT0:.+]] = aten.call "aten::t"(%[[G0]]) {strides = [array<i64: 1, 5>], views = array<i64: 0>} : (tensor<4x5xf32>) -> tensor<5x4xf32>
// CHECK-NEXT:    %[[DW0:.+]] = aten.call "aten::mm"(%[[GT0]], %[[X0]]) {{.*}} -> tensor<5x3xf32>
// CHECK-NEXT:    %[[DX0:.+]] = aten.call "aten::mm"(%[[G0]], %[[WTT]]) {{.*}} -> tensor<4x3xf32>
// CHECK-NEXT:    %[[X1:.+]] = aten.call "aten::slice.Tensor"(%[[X]], 0, 4, 7, 1) {{.*}} -> tensor<3x3xf32>
// CHECK:         %[[LOSS:.+]] = aten.call "aten::add.Tensor"(%[[NLL0]]#0, %{{.+}}#0, 1)
// CHECK:         %[[DW:.+]] = aten.call "aten::addmm_"(%[[DW0]], %{{.+}}, %[[X1]], 1, 1) {mutates = array<i64: 0>, views = array<i64: 0>}
// CHECK-NEXT:    %[[DX1:.+]] = aten.call "aten::mm"
// CHECK-NEXT:    %[[MEAN:.+]] = aten.call "aten::div.Tensor"(%[[LOSS]], %[[COUNT]])
// CHECK-NEXT:    %[[DX:.+]] = aten.call "aten::cat"([%[[DX0]], %[[DX1]]], 0)
// CHECK-NEXT:    %[[GX:.+]] = aten.call "aten::mul.Tensor"(%{{.+}}, %[[DX]])
// CHECK-NEXT:    fsdp.gradients [@w, @v] %[[DW]], %[[GX]]
// CHECK-NEXT:    fsdp.return %[[MEAN]]
// REMARK: remark: [Passed] Chunked | Category:fsdp-chunk | Remark="2 chunks of 7 rows of 5, of 560 B in all"
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<5x3xf32>
fsdp.param @v : tensor<7x3xf32>
fsdp.program @train_step(%x: tensor<7x3xf32>, %y: tensor<7xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<5x3xf32>
  %v = fsdp.read @v : tensor<7x3xf32>
  %h = aten.call "aten::mul.Tensor"(%x, %v) : (tensor<7x3xf32>, tensor<7x3xf32>) -> tensor<7x3xf32>
  %wt = aten.call "aten::t"(%w) {strides = [array<i64: 1, 3>], views = array<i64: 0>} : (tensor<5x3xf32>) -> tensor<3x5xf32>
  %logits = aten.call "aten::mm"(%h, %wt) : (tensor<7x3xf32>, tensor<3x5xf32>) -> tensor<7x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<7x5xf32>) -> tensor<7x5xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 1, -100) : (tensor<7x5xf32>, tensor<7xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 1, -100, %nll#1) : (tensor<f32>, tensor<7x5xf32>, tensor<7xi64>, tensor<f32>) -> tensor<7x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<7x5xf32>, tensor<7x5xf32>) -> tensor<7x5xf32>
  %gt = aten.call "aten::t"(%g) {strides = [array<i64: 1, 5>], views = array<i64: 0>} : (tensor<7x5xf32>) -> tensor<5x7xf32>
  %dw = aten.call "aten::mm"(%gt, %h) : (tensor<5x7xf32>, tensor<7x3xf32>) -> tensor<5x3xf32>
  %wtt = aten.call "aten::t"(%wt) {views = array<i64: 0>} : (tensor<3x5xf32>) -> tensor<5x3xf32>
  %dx = aten.call "aten::mm"(%g, %wtt) : (tensor<7x5xf32>, tensor<5x3xf32>) -> tensor<7x3xf32>
  %gx = aten.call "aten::mul.Tensor"(%x, %dx) : (tensor<7x3xf32>, tensor<7x3xf32>) -> tensor<7x3xf32>
  fsdp.gradients [@w, @v] %dw, %gx : tensor<5x3xf32>, tensor<7x3xf32>
  fsdp.return %nll#0 : tensor<f32>
}

// -----

// A sum, of logits with a bias: the bias's gradient is a sum of the chunks'.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::addmm"(%[[B:.+]], %{{.+}}, %[[WT:.+]], 1, 1) {{.*}} -> tensor<2x5xf32>
// CHECK:         %[[NLL0:.+]]:2 = aten.call "aten::nll_loss_forward"(%{{.+}}, %{{.+}}, none, 2, -100)
// CHECK-NEXT:    aten.call "aten::nll_loss_backward"(%{{.+}}, %{{.+}}, %{{.+}}, none, 2, -100, %[[NLL0]]#1)
// CHECK:         %[[DB0:.+]] = aten.call "aten::sum.dim_IntList"(%{{.+}}, [0], false, none) {{.*}} -> tensor<5xf32>
// CHECK:         %[[LOSS:.+]] = aten.call "aten::add.Tensor"(%[[NLL0]]#0, %{{.+}}#0, 1)
// CHECK:         %[[DB1:.+]] = aten.call "aten::sum.dim_IntList"
// CHECK-NEXT:    %[[DB:.+]] = aten.call "aten::add.Tensor"(%[[DB0]], %[[DB1]], 1)
// CHECK-NEXT:    %[[DB2:.+]] = aten.call "aten::view"(%[[DB]], [1, 5])
// CHECK-NEXT:    fsdp.gradients [@b] %[[DB2]]
// CHECK-NEXT:    fsdp.return %[[LOSS]]
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<3x5xf32> {frozen}
fsdp.param @b : tensor<1x5xf32>
fsdp.program @train_step(%x: tensor<4x3xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<3x5xf32>
  %b = fsdp.read @b : tensor<1x5xf32>
  %logits = aten.call "aten::addmm"(%b, %x, %w, 1, 1) : (tensor<1x5xf32>, tensor<4x3xf32>, tensor<3x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 2, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 2, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %db = aten.call "aten::sum.dim_IntList"(%g, [0], true, none) : (tensor<4x5xf32>) -> tensor<1x5xf32>
  fsdp.gradients [@b] %db : tensor<1x5xf32>
  fsdp.return %nll#0 : tensor<f32>
}

// -----

// A matrix of as many columns as rows, of which the products take a chunk's rows
// and a chunk's columns.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[ROWS:.+]] = aten.call "aten::slice.Tensor"(%[[X:.+]], 0, 0, 2, 1) {{.*}} -> tensor<2x4xf32>
// CHECK-NEXT:    aten.call "aten::mm"(%[[ROWS]], %{{.+}}) {{.*}} -> tensor<2x5xf32>
// CHECK:         %[[COLUMNS:.+]] = aten.call "aten::slice.Tensor"(%[[X]], 1, 0, 2, 1) {strides = [array<i64: 4, 1>], views = array<i64: 0>} : (tensor<4x4xf32>) -> tensor<4x2xf32>
// CHECK-NEXT:    aten.call "aten::mm"(%[[COLUMNS]], %{{.+}}) {{.*}} -> tensor<4x5xf32>
fsdp.chunked_loss {chunks = 2}
fsdp.param @w : tensor<4x5xf32>
fsdp.param @v : tensor<4x4xf32> {frozen}
fsdp.program @train_step(%x: tensor<4x4xf32>, %y: tensor<4xi64>) -> tensor<f32> {
  fsdp.phase forward
  %w = fsdp.read @w : tensor<4x5xf32>
  %v = fsdp.read @v : tensor<4x4xf32>
  %h = aten.call "aten::mul.Tensor"(%x, %v) : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %logits = aten.call "aten::mm"(%h, %w) : (tensor<4x4xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %log = aten.call "aten::_log_softmax"(%logits, 1, false) : (tensor<4x5xf32>) -> tensor<4x5xf32>
  %nll:2 = aten.call "aten::nll_loss_forward"(%log, %y, none, 2, -100) : (tensor<4x5xf32>, tensor<4xi64>) -> (tensor<f32>, tensor<f32>)
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%nll#0, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %d = aten.call "aten::nll_loss_backward"(%one, %log, %y, none, 2, -100, %nll#1) : (tensor<f32>, tensor<4x5xf32>, tensor<4xi64>, tensor<f32>) -> tensor<4x5xf32>
  %g = aten.call "aten::_log_softmax_backward_data"(%d, %log, 1, 6) : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  %dw = aten.call "aten::mm"(%h, %g) : (tensor<4x4xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
  fsdp.gradients [@w] %dw : tensor<4x5xf32>
  fsdp.return %nll#0 : tensor<f32>
}
