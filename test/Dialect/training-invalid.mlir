// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Optimizer-1: expected a string for "library", got: 1.000000e+00 : f64}}
fsdp.optimizer "plugin" {library = 1.0}

// -----

// expected-error @below {{Optimizer-1: expected a "library" for "plugin", got none}}
fsdp.optimizer "plugin" {lr = 1.0}

// -----

// expected-error @below {{Optimizer-2: expected at most one of "fused" and "foreach", got both}}
fsdp.optimizer "adam" {foreach = true, fused = true}

// -----

// expected-error @below {{Optimizer-2: expected a "momentum" and no "dampening" with "nesterov"}}
fsdp.optimizer "sgd" {nesterov = true}

// -----

// expected-error @below {{Optimizer-2: expected a "momentum" and no "dampening" with "nesterov"}}
fsdp.optimizer "sgd" {dampening = 0.5, momentum = 0.9, nesterov = true}

// -----

fsdp.optimizer "sgd" {lr = 0.1}
// expected-error @below {{ParamGroup-1: "sgd" has no hyperparameter "beta1"}}
fsdp.param_group "**.bias" {beta1 = 0.9}

// -----

fsdp.optimizer "adamw" {lr = 0.1}
// expected-error @below {{ParamGroup-1: "lr" is out of range: -1.000000e+00 : f64}}
fsdp.param_group "**.bias" {lr = -1.0}

// -----

fsdp.optimizer "adamw" {lr = 0.1}
// expected-error @below {{ParamGroup-1: "fused" holds for all groups: expected it in the optimizer}}
fsdp.param_group "**.bias" {fused = true}

// -----

// expected-error @below {{ParamGroup-2: expected at least one pattern, got none}}
"fsdp.param_group"() <{hyperparameters = {lr = 0.1}, patterns = []}> : () -> ()

// -----

// expected-error @below {{GradientClipping-1: expected a positive max_norm, got: 0.000000e+00 : f64}}
fsdp.gradient_clipping {max_norm = 0.0, norm_type = 2.0}

// -----

// expected-error @below {{GradientClipping-1: expected a norm_type of 1, 2 or inf, got: 3.000000e+00 : f64}}
fsdp.gradient_clipping {max_norm = 1.0, norm_type = 3.0}

// -----

fsdp.gradient_clipping {max_norm = 1.0, norm_type = 2.0}
// expected-error @below {{GradientClipping-2: expected at most one in the module}}
fsdp.gradient_clipping {max_norm = 2.0, norm_type = 2.0}

// -----

// expected-error @below {{LRSchedule-1: expected a decay "cosine", "linear" or "constant", got: "square"}}
fsdp.lr_schedule {decay = "square", min_lr_ratio = 0.0, total_steps = 9, warmup_steps = 2}

// -----

// expected-error @below {{LRSchedule-1: expected 0 <= warmup_steps < total_steps, got: 9 and 9}}
fsdp.lr_schedule {decay = "linear", min_lr_ratio = 0.0, total_steps = 9, warmup_steps = 9}

// -----

// expected-error @below {{LRSchedule-1: expected a min_lr_ratio in [0, 1], got: 2.000000e+00 : f64}}
fsdp.lr_schedule {decay = "linear", min_lr_ratio = 2.0, total_steps = 9, warmup_steps = 0}

// -----

fsdp.lr_schedule {decay = "linear", min_lr_ratio = 0.0, total_steps = 9, warmup_steps = 0}
// expected-error @below {{LRSchedule-2: expected at most one in the module}}
fsdp.lr_schedule {decay = "linear", min_lr_ratio = 0.0, total_steps = 9, warmup_steps = 0}

// -----

// expected-error @below {{Accumulation-1: expected steps in [1, 1048576], got: 0}}
fsdp.accumulation {reduce_each_microbatch = true, steps = 0}

// -----

fsdp.accumulation {reduce_each_microbatch = true, steps = 2}
// expected-error @below {{Accumulation-2: expected at most one in the module}}
fsdp.accumulation {reduce_each_microbatch = true, steps = 3}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.param @v : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.param @w : tensor<5xf32> sharding <@world, [{"shard"}]>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @v : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{ClipGradNorm-1: expected '!fsdp.sharded<tensor<5xf32>, <@world, [{"shard"}]>>' for @w, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' to '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>'}}
  %c = fsdp.clip_grad_norm [@w] %s {max_norm = 1.0, norm_type = 2.0} : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.param_group "w" {lr = 0.1}
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{OptimizerStep-3: expected 1 groups from 0 to 1, got: array<i64: 2>}}
  fsdp.optimizer_step [@w] %s {groups = array<i64: 2>} : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

// expected-error @below {{ChunkedLoss-1: expected 2 chunks at least, got: 1}}
fsdp.chunked_loss {chunks = 1}

// -----

fsdp.chunked_loss {chunks = 2}
// expected-error @below {{ChunkedLoss-2: expected at most one in the module}}
fsdp.chunked_loss {chunks = 2}

// -----

// expected-error @below {{GradScaler-1: expected a positive init_scale, got: 0}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 2000, init_scale = 0.0}

// -----

// expected-error @below {{GradScaler-1: expected a growth_factor above 1, got: 1}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 1.0, growth_interval = 2000, init_scale = 1.0}

// -----

// expected-error @below {{GradScaler-1: expected a backoff_factor between 0 and 1, got: 1}}
fsdp.grad_scaler {backoff_factor = 1.0, growth_factor = 2.0, growth_interval = 2000, init_scale = 1.0}

// -----

// expected-error @below {{GradScaler-1: expected a positive growth_interval, got: 0}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 0, init_scale = 1.0}

// -----

fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 1, init_scale = 1.0}
// expected-error @below {{GradScaler-2: expected at most one in the module}}
fsdp.grad_scaler {backoff_factor = 0.5, growth_factor = 2.0, growth_interval = 1, init_scale = 1.0}

// -----

fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{LossScale-1: expected a tensor<f32>, got: 'tensor<1xf32>'}}
  %scale = fsdp.loss_scale : tensor<1xf32>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.param @v : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Unscale-1: expected 2 operands and results, got: 1 and 1}}
  %u = fsdp.unscale [@v, @w] %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.param @w : tensor<4xf16> sharding <@world, [{"shard"}]>
fsdp.program @train_step(%loss: tensor<f32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}]>>
  // expected-error @below {{Unscale-1: expected no gradient in f16 (GradScaler divides none), got that of @w}}
  %u = fsdp.unscale [@w] %s : (!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}]>>
  fsdp.return %loss : tensor<f32>
}
