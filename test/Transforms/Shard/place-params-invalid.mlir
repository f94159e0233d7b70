// RUN: fsdp-opt --fsdp-place-params --split-input-file --verify-diagnostics %s

// expected-error @below {{expected one fsdp.mesh in the module, got: 0}}
module {
  fsdp.param @weight : tensor<4x4xf32>
}

// -----

// expected-error @below {{expected an axis "shard", got: #fsdp.mesh<["replicate"=2]>}}
fsdp.mesh @world <["replicate"=2]>
fsdp.param @weight : tensor<4x4xf32>

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
// expected-error @below {{expected dimension 1 of parameter "w" to divide evenly over 2 ranks, got size: 3}}
fsdp.shard_placement "w" {dim = 1}
fsdp.param @w : tensor<4x3xf32> unit @u

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
// expected-error @below {{expected a dimension of parameter "w", which has 2, got: 2}}
fsdp.shard_placement "w" {dim = 2}
fsdp.param @w : tensor<4x4xf32> unit @u

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
// expected-error @below {{expected a dimension of parameter "w", which has 2, got: -3}}
fsdp.shard_placement "w" {dim = -3}
fsdp.param @w : tensor<4x4xf32> unit @u

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
// expected-error @below {{pattern "v" matches no sharded parameter}}
fsdp.shard_placement "v" {dim = 1}
fsdp.param @w : tensor<4x4xf32> unit @u
fsdp.param @v : tensor<4x4xf32> {ignored}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
// expected-error @below {{expected dimension 0 for parameter "w" of unit "u", which has an integer "reshard_after_forward", got: -1}}
fsdp.shard_placement "w" {dim = -1}
fsdp.param @w : tensor<4x4xf32> unit @u
