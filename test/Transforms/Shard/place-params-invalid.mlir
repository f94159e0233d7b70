// RUN: fsdp-opt --fsdp-place-params --split-input-file --verify-diagnostics %s

// expected-error @below {{expected one fsdp.mesh in the module, got: 0}}
module {
  fsdp.param @weight : tensor<4x4xf32>
}

// -----

// expected-error @below {{expected an axis "shard", got: #fsdp.mesh<["replicate"=2]>}}
fsdp.mesh @world <["replicate"=2]>
fsdp.param @weight : tensor<4x4xf32>
