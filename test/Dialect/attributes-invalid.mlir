// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// expected-error @below {{Mesh-1: expected unique axis names, got "shard" twice}}
fsdp.mesh @world <["shard"=2, "shard"=4]>

// -----

// expected-error @below {{Mesh-2: expected the size of axis "shard" to be at least 1, got: 0}}
fsdp.mesh @world <["shard"=0]>

// -----

// expected-error @below {{Sharding-1: expected each axis at most once, got "shard" twice}}
fsdp.param @w : tensor<4x4xf32> sharding <@world, [{"shard"}, {"shard"}]>

// -----

fsdp.program @p(%x: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Sharded-1: expected a sharding of 1 dimensions, got: 2}}
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}, {}]>>
}

// -----

fsdp.mesh @world <["shard"=2]>
// expected-error @below {{Sharded-1: expected a sharding of 2 dimensions, got: 1}}
fsdp.param @w : tensor<4x4xf32> sharding <@world, [{"shard"}]>

// -----

// expected-error @below {{MixedPrecision-1: expected f32, f64, f16 or bf16, got: 'i32'}}
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = i32>}

// -----

// expected-error @below {{GradientDivision-1: expected a positive factor, got: 0.000000e+00}}
fsdp.unit @u {gradient_division = #fsdp.gradient_division<factor = 0.0 : f64>}

// -----

// expected-error @below {{GradientDivision-1: expected a positive factor, got: none}}
fsdp.unit @u {gradient_division = #fsdp.gradient_division<force_sum = false>}
