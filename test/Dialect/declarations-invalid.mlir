// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Param-1: expected @u to name an fsdp.unit, found none}}
fsdp.param @w : tensor<4xf32> unit @u

// -----

// expected-error @below {{Param-2: expected @world to name an fsdp.mesh, found none}}
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>

// -----

fsdp.mesh @world <["replicate"=2]>
// expected-error @below {{Param-2: expected axis "shard" in mesh @world, which has: #fsdp.mesh<["replicate"=2]>}}
fsdp.param @w : tensor<4xf32> sharding <@world, [{"shard"}]>

// -----

// expected-error @below {{Param-3: expected a static shape with at least one dimension, got: 'tensor<f32>'}}
fsdp.param @scale : tensor<f32> unit @unit

// -----

// expected-error @below {{Param-3: expected a static shape with at least one dimension, got: 'tensor<?xf32>'}}
fsdp.param @w : tensor<?xf32>

// -----

// expected-error @below {{Optimizer-1: expected "adam", "adamw", "sgd", "plugin" or "external", got: "lion"}}
fsdp.optimizer "lion" {lr = 1.0e-3}

// -----

// expected-error @below {{Optimizer-1: "sgd" has no hyperparameter "beta1"}}
fsdp.optimizer "sgd" {beta1 = 0.9}

// -----

// expected-error @below {{Optimizer-1: expected an f64 for "lr", got: 1 : i64}}
fsdp.optimizer "adamw" {lr = 1}

// -----

// expected-error @below {{Optimizer-1: expected true or false for "fused", got: 1.000000e+00 : f64}}
fsdp.optimizer "adamw" {fused = 1.0}

// -----

// expected-error @below {{Optimizer-1: "beta2" is out of range: 1.000000e+00 : f64}}
fsdp.optimizer "adamw" {beta2 = 1.0}

// -----

// expected-error @below {{Optimizer-1: "lr" is out of range: -1.000000e+00 : f64}}
fsdp.optimizer "adamw" {lr = -1.0}

// -----

// expected-error @below {{CheckpointPattern-1: expected a pattern, got: ""}}
fsdp.checkpoint_pattern ""

// -----

// expected-error @below {{CheckpointPattern-1: expected an operator of the form "namespace::name" in save, got: "mm"}}
fsdp.checkpoint_pattern "layers.*" {save = ["aten::add.Tensor", "mm"]}

// -----

// expected-error @below {{CheckpointPattern-1: expected a positive number after "/" in save, got: "aten::mm/0"}}
fsdp.checkpoint_pattern "layers.*" {save = ["aten::mm/2", "aten::mm/0"]}

// -----

fsdp.unit @u
// expected-error @below {{Param-4: expected no unit and no sharding of an ignored parameter}}
fsdp.param @a : tensor<4xf32> unit @u {ignored}

// -----

// expected-error @below {{UnitPattern-1: expected one pattern of class names, got: 2}}
fsdp.unit_pattern "Norm", "Linear" {by_class}

// -----

// expected-error @below {{UnitPattern-1: expected at least one pattern, got none}}
"fsdp.unit_pattern"() {patterns = []} : () -> ()

// -----

// expected-error @below {{UnitPattern-2: expected reshard_after_forward or post_forward_size, got both}}
fsdp.unit_pattern "layers.*" {post_forward_size = 2, reshard_after_forward = true}

// -----

// expected-error @below {{Unit-1: expected a post_forward_size of at least 2, in a unit that is resharded after forward, got: 1}}
fsdp.unit @u {post_forward_size = 1}

// -----

// expected-error @below {{Unit-1: expected a post_forward_size of at least 2, in a unit that is resharded after forward, got: 2}}
fsdp.unit @u {post_forward_size = 2, reshard_after_forward = false}

// -----

// A parameter lies over a whole axis.
fsdp.mesh @world <["shard"=4]>
fsdp.unit @u
// expected-error @below {{Param-2: expected axis}}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard":2}]>

// -----

fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
// expected-error @below {{Param-5: expected compute_dtype 'bf16' as unit @u says, got: 'f32'}}
fsdp.param @w : tensor<4xf32> unit @u

// -----

fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
// Integers are not cast.
fsdp.param @codes : tensor<4xi8> unit @u {frozen}
// expected-error @below {{Param-5: expected compute_dtype 'bf16' as unit @u says, got: 'f16'}}
fsdp.param @w : tensor<4xf32> unit @u {compute_dtype = f16}

// -----

fsdp.unit @u
// expected-error @below {{Param-5: expected compute_dtype 'f32' as unit @u says, got: 'bf16'}}
fsdp.param @w : tensor<4xf32> unit @u {compute_dtype = bf16}

// -----

// expected-error @below {{UnitPattern-3: expected the pattern "" alone, not by class}}
fsdp.unit_pattern "", "output"

// -----

// expected-error @below {{UnitPattern-3: expected the pattern "" alone, not by class}}
fsdp.unit_pattern "" {by_class}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
// expected-error @below {{Param-6: expected a sharding that is partial along no axis, got: #fsdp.sharding<@world, [{"shard"}], partial ["replicate"]>}}
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}], partial ["replicate"]>

// -----

// expected-error @below {{Buffer-1: expected dense strides of 'tensor<4x2xf32>', got: array<i64: 1, 5>}}
fsdp.buffer @b : tensor<4x2xf32> {strides = array<i64: 1, 5>}

// -----

// expected-error @below {{Buffer-1: expected dense strides of 'tensor<4x2xf32>', got: array<i64: 1>}}
fsdp.buffer @b : tensor<4x2xf32> {strides = array<i64: 1>}
