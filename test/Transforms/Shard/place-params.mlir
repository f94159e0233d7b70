// RUN: fsdp-opt --fsdp-place-params --split-input-file %s | FileCheck %s

// Dim 0 is cut over the axis "shard", also where it does not divide.

// CHECK: fsdp.param @norm : tensor<5xf32> unit @u sharding <@world, [{"shard"}]>
// CHECK: fsdp.param @weight : tensor<4x2x3xf32> unit @u sharding <@world, [{"shard"}, {}, {}]>
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @norm : tensor<5xf32> unit @u
fsdp.param @weight : tensor<4x2x3xf32> unit @u

// -----

// A sharding that is given stays.

// CHECK: fsdp.param @weight : tensor<4x4xf32> unit @u sharding <@world, [{}, {"shard"}]>
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @weight : tensor<4x4xf32> unit @u sharding <@world, [{}, {"shard"}]>
