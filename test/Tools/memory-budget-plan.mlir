// The budget is in the plan, and who reads a plan proves it. The peak of this
// one is 6336 bytes, 192 of them the arena's.

// RUN: rm -rf %t && mkdir -p %t
// RUN: fsdp-opt %s --world-size 2 --emit plan -o %t/plan.json
// RUN: FileCheck %s --check-prefix=PLAN < %t/plan.json
// PLAN:      "arena": {"bytes": [[#ARENA:]], "lower_bound"
// PLAN-NEXT: "memory_budget": 8192,

// RUN: fsdp-opt %s --world-size 2 --emit stats | FileCheck %s --check-prefix=STATS
// STATS: memory budget {{ *}}8.00 KiB, {{.*}} of it left

// RUN: sed 's/"memory_budget": 8192/"memory_budget": 129/' %t/plan.json > %t/less.json
// RUN: not fsdp-opt --diff %t/plan.json %t/less.json 2>&1 | FileCheck %s --check-prefix=LESS
// RUN: not fsdp-run %t/less.json --steps 1 2>&1 | FileCheck %s --check-prefix=LESS
// LESS: less.json: expected a peak of at most the memory_budget of 129 bytes a rank, got 6336, 192 of them the arena's; at the peak {{.*}} (P31)
fsdp.mesh @world <["shard"=2]>
fsdp.schedule {memory_budget = 8192 : i64}
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.param @bias : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @bias : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@bias] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
