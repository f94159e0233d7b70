// The steps are too short for the passes between.
// RUN: fsdp-opt --fsdp-offload-activations --split-input-file %s | sed 's/fsdp.level = #fsdp.level<grouped>//' > %t.mlir
// RUN: fsdp-opt --fsdp-split-collectives --fsdp-overlap-activation-copies --split-input-file --remarks-filter=fsdp-offload --remark-format=emitRemark %t.mlir 2>%t | FileCheck %s
// RUN: FileCheck %s --check-prefix=REMARK < %t

// One product hides a copy: the copy out is awaited after one, and the copy back
// launched before one.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         aten.call "aten::sin"
// CHECK-NEXT:    %[[F:.*]] = fsdp.offload_activation %{{.*}} to !fsdp.future
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    %[[H:.*]] = fsdp.wait %[[F]]
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    aten.call "aten::sum"
// CHECK-NEXT:    fsdp.phase backward
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    %[[B:.*]] = fsdp.reload_activation %[[H]]
// CHECK-NEXT:    aten.call "aten::mm"
// CHECK-NEXT:    %[[R:.*]] = fsdp.wait %[[B]]
// CHECK-NEXT:    aten.call "aten::mul.Tensor"(%{{.*}}, %[[R]])
// REMARK: {{\[Passed\]}} OffloadActivation{{.*}}an activation of 4194304 bytes: out takes 0.094 ms with {{.*}} ms of computation beside it, back 0.094 ms with
fsdp.mesh @world <["shard"=1]>
fsdp.schedule {device = "h100"}
fsdp.offload_pattern "layer"
fsdp.program @train_step(%x: tensor<1024x1024xf32>, %y: tensor<2048x2048xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %b = aten.call "aten::sin"(%a) : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %c1 = aten.call "aten::mm"(%y, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %c2 = aten.call "aten::mm"(%c1, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %c3 = aten.call "aten::mm"(%c2, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %loss = aten.call "aten::sum"(%c3, none) : (tensor<2048x2048xf32>) -> tensor<f32>
  fsdp.phase backward
  %d1 = aten.call "aten::mm"(%c3, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %d2 = aten.call "aten::mm"(%d1, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %g = aten.call "aten::mul.Tensor"(%x, %a) {fsdp.module = "layer"} : (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// Nothing to hide it behind: it stays.

// CHECK-LABEL: fsdp.program @train_step
// CHECK-NOT:     fsdp.offload_activation
// CHECK-NOT:     fsdp.wait
// CHECK:         fsdp.return
// REMARK: {{\[Missed\]}} OffloadActivation{{.*}}an activation of 4194304 bytes stays: it would have to come back {{.*}} ms before its copy out ends
fsdp.mesh @world <["shard"=1]>
fsdp.schedule {device = "h100"}
fsdp.offload_pattern "layer"
fsdp.program @train_step(%x: tensor<1024x1024xf32>, %y: tensor<2048x2048xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %b = aten.call "aten::sin"(%a) : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %c3 = aten.call "aten::neg"(%y) : (tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %loss = aten.call "aten::sum"(%c3, none) : (tensor<2048x2048xf32>) -> tensor<f32>
  fsdp.phase backward
  %g = aten.call "aten::mul.Tensor"(%x, %a) {fsdp.module = "layer"} : (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// A budget in which it has no room beside the first product: awaited at once.

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F:.*]] = fsdp.offload_activation
// CHECK-NEXT:    fsdp.wait %[[F]]
// CHECK-NEXT:    aten.call "aten::mm"
// REMARK: {{\[Missed\]}} OffloadActivation{{.*}}out takes 0.094 ms with 0.000 ms of computation beside it
fsdp.mesh @world <["shard"=1]>
fsdp.schedule {device = "h100", memory_budget = 224395264 : i64}
fsdp.offload_pattern "layer"
fsdp.program @train_step(%x: tensor<1024x1024xf32>, %y: tensor<2048x2048xf32>, %w: tensor<2048x8192xf32>, %v: tensor<8192x2048xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %b = aten.call "aten::sin"(%a) : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %c1 = aten.call "aten::mm"(%y, %w) : (tensor<2048x2048xf32>, tensor<2048x8192xf32>) -> tensor<2048x8192xf32>
  %c2 = aten.call "aten::mm"(%c1, %v) : (tensor<2048x8192xf32>, tensor<8192x2048xf32>) -> tensor<2048x2048xf32>
  %c3 = aten.call "aten::mm"(%c2, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %loss = aten.call "aten::sum"(%c3, none) : (tensor<2048x2048xf32>) -> tensor<f32>
  fsdp.phase backward
  %d1 = aten.call "aten::mm"(%c3, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %d2 = aten.call "aten::mm"(%d1, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %g = aten.call "aten::mul.Tensor"(%x, %a) {fsdp.module = "layer"} : (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

// CHECK-LABEL: fsdp.program @train_step
// CHECK:         %[[F:.*]] = fsdp.offload_activation
// CHECK-NEXT:    %[[H:.*]] = fsdp.wait %[[F]]
// CHECK:         %[[B:.*]] = fsdp.reload_activation %[[H]]
// CHECK-NEXT:    fsdp.wait %[[B]]
fsdp.mesh @world <["shard"=1]>
fsdp.schedule {device = "h100", prefetch = "none"}
fsdp.offload_pattern "layer"
fsdp.program @train_step(%x: tensor<1024x1024xf32>, %y: tensor<2048x2048xf32>) -> tensor<f32> {
  fsdp.phase forward
  %a = aten.call "aten::exp"(%x) {fsdp.module = "layer"} : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %b = aten.call "aten::sin"(%a) : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  %c1 = aten.call "aten::mm"(%y, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %c2 = aten.call "aten::mm"(%c1, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %c3 = aten.call "aten::mm"(%c2, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %loss = aten.call "aten::sum"(%c3, none) : (tensor<2048x2048xf32>) -> tensor<f32>
  fsdp.phase backward
  %d1 = aten.call "aten::mm"(%c3, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %d2 = aten.call "aten::mm"(%d1, %y) : (tensor<2048x2048xf32>, tensor<2048x2048xf32>) -> tensor<2048x2048xf32>
  %g = aten.call "aten::mul.Tensor"(%x, %a) {fsdp.module = "layer"} : (tensor<1024x1024xf32>, tensor<1024x1024xf32>) -> tensor<1024x1024xf32>
  fsdp.return %loss : tensor<f32>
}
