// Places in the arena. Unscaled and clipped gradients are of the storage of the
// reduced ones, whole ones lie where peers read them; on a device, which peers
// cannot read, they and gathered parameters have places too, and the flat
// tensor of the reduction. A rank alone in its replica keeps the gradient as
// its shard.

// RUN: fsdp-opt %s --world-size 2 --emit plan | FileCheck %s --check-prefixes=CHECK,SHARED
// RUN: fsdp-opt %s --world-size 2 --emit plan --memory device | FileCheck %s --check-prefixes=CHECK,DEVICE
// RUN: sed 's/"shard"=2/"shard"=1/' %s | fsdp-opt - --emit plan | FileCheck %s --check-prefix=ALONE

// CHECK:       "values": [
// CHECK-NEXT:  {"shape": [4], "dtype": "float32", "offset": 64},
// SHARED-NEXT: {"shape": [4], "dtype": "float32"},
// DEVICE-NEXT: {"shape": [4], "dtype": "float32", "offset": 128},
// CHECK-NEXT:  {"shape": [], "dtype": "float32", "offset": 0},
// CHECK-NEXT:  {"shape": [], "dtype": "float32"},
// SHARED-NEXT: {"shape": [4], "dtype": "float32"},
// DEVICE-NEXT: {"shape": [4], "dtype": "float32", "offset": 128},
// DEVICE-NEXT: {"shape": [4], "dtype": "float32", "offset": 192},
// CHECK-NEXT:  {"shape": [2], "dtype": "float32", "offset": 64},
// SHARED-NEXT: {"shape": [2], "dtype": "float32", "storage": 5},
// SHARED-NEXT: {"shape": [2], "dtype": "float32", "storage": 5}
// DEVICE-NEXT: {"shape": [2], "dtype": "float32", "storage": 6},
// DEVICE-NEXT: {"shape": [2], "dtype": "float32", "storage": 6}
// CHECK-NEXT:  ],
// SHARED-NEXT: "arena": {"bytes": 128, "lower_bound": 128},
// DEVICE-NEXT: "arena": {"bytes": 256, "lower_bound": 256},
// DEVICE:      {"reduce_scatter": 0,{{.*}} "buffer": 5
// DEVICE-NEXT: {"wait": [2],{{.*}} "frees": [4, 5]

// ALONE:      {"shape": [4], "dtype": "float32", "offset": 128},
// ALONE-NEXT: {"shape": [4], "dtype": "float32", "storage": 4},
// ALONE-NEXT: {"shape": [4], "dtype": "float32", "offset": 64},
// ALONE-NEXT: {"shape": [4], "dtype": "float32", "offset": 128}
// ALONE-NEXT: ],
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.gradient_clipping {max_norm = 0.5, norm_type = 2.0 : f64}
fsdp.grad_scaler {backoff_factor = 0.25, growth_factor = 4.0, growth_interval = 10, init_scale = 1024.0}
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
