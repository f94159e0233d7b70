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

// -----

// A placement names another dimension, the first that matches wins.

// CHECK-NOT: fsdp.shard_placement
// CHECK:     fsdp.param @a.wo : tensor<4x6xf32> unit @u sharding <@world, [{}, {"shard"}]>
// CHECK:     fsdp.param @a.conv : tensor<3x4x2xf32> unit @u sharding <@world, [{}, {}, {"shard"}]>
// CHECK:     fsdp.param @a.bias : tensor<3xf32> unit @u sharding <@world, [{"shard"}]>
// CHECK:     fsdp.param @a.wq : tensor<3x3xf32> unit @u sharding <@world, [{"shard"}, {}]>
fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.shard_placement "a.wo" {dim = 1}
fsdp.shard_placement "a.conv" {dim = -1}
fsdp.shard_placement "a.bias" {dim = 0}
fsdp.shard_placement "a.*o*" {dim = 0}
fsdp.param @a.wo : tensor<4x6xf32> unit @u
fsdp.param @a.conv : tensor<3x4x2xf32> unit @u
fsdp.param @a.bias : tensor<3xf32> unit @u
fsdp.param @a.wq : tensor<3x3xf32> unit @u
