// The policy about the update in the plan; groups are written out in full.

// RUN: fsdp-opt %s --world-size 2 --emit plan | FileCheck %s

// CHECK:      "optimizer": {"name": "adamw", "lr": 0.5, {{.*}}"weight_decay": 0.01, {{.*}}"fused": true, "library": "", "options": {}},
// CHECK-NEXT: "param_groups": [
// CHECK-NEXT:   {"name": "adamw", "lr": 0.5, {{.*}}"weight_decay": 0.0, {{.*}}"fused": true, "library": "", "options": {}}
// CHECK-NEXT: ],
// CHECK-NEXT: "lr_schedule": {"warmup_steps": 2, "decay": "cosine", "total_steps": 9, "min_lr_ratio": 0.1},
// CHECK-NEXT: "grad_scaler": {"init_scale": 1024.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 10},
// CHECK-NEXT: "accumulation_steps": 4,
// CHECK:      {"loss_scale": [[SCALE:[0-9]+]], "phase": "backward"
// CHECK:      {"call": "aten::div.Scalar", "args": [{"t": [[SCALE]]}, 4]
// CHECK:      {"accumulate": [0], "ins": [[G:\[[0-9]+\]]], "outs": [[S:\[[0-9]+\]]], "phase": "backward"
// CHECK-NEXT: {"reduce_scatter": 0, "params": [0], "ins": [[S]], "outs": [[R:\[[0-9]+\]]], "phase": "backward", "module": 0, "when": "last"
// CHECK-NEXT: {"wait": {{.*}}"phase": "backward", {{.*}}"when": "last"
// CHECK-NEXT: {"unscale": [0], "ins": [[R]], "outs": [[U:\[[0-9]+\]]], "phase": "optimizer"
// CHECK-NEXT: {"clip_grad_norm": [0], "ins": [[U]], "outs": [[C:\[[0-9]+\]]], "max_norm": 0.5, "norm_type": {"f": "inf"}, "phase": "optimizer"
// CHECK-NEXT: {"optimizer_step": [0], "grads": [[C]], "groups": [1], "phase": "optimizer"
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "adamw" {fused = true, lr = 0.5}
fsdp.param_group "*.bias" {weight_decay = 0.0}
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 0x7FF0000000000000 : f64}
fsdp.grad_scaler {backoff_factor = 0.25, growth_factor = 4.0, growth_interval = 10, init_scale = 1024.0}
fsdp.lr_schedule {decay = "cosine", min_lr_ratio = 0.1, total_steps = 9, warmup_steps = 2}
fsdp.accumulation {reduce_each_microbatch = false, steps = 4}
fsdp.param @a.bias : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @a.bias : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%x, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  fsdp.gradients [@a.bias] %g : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
