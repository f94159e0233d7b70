// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-1: expected @a as operand 0 of unit @u, got: @b}}
  %w:2 = fsdp.all_gather @u %b, %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-1: expected @b as operand 1 of unit @u, got: none}}
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-2: expected a result of 'tensor<4xf32>', got: 'tensor<2xf32>'}}
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<2xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.unit @u
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{Reshard-1: expected all results of one fsdp.all_gather, in order}}
  fsdp.reshard @u %x : tensor<f32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  // expected-error @below {{Reshard-1: expected unit @u, like its gather, got: @v}}
  fsdp.reshard @v %w : tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @v sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-1: expected @a in unit @u}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-1: expected parameters in unit order, got @a too late}}
  %r:2 = fsdp.reduce_scatter @u avg [@b, @a] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-2: expected 'tensor<4xf32>' for @a, got: 'tensor<f32>'}}
  %r = fsdp.reduce_scatter @u avg [@a] %x : (tensor<f32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-3: expected @a to have a sharding, it has none}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-error @below {{AllReduce-1: expected 1 operands and results, got: 2 and 2}}
  %s:2 = fsdp.all_reduce @u avg over "replicate" [@a] %r#0, %r#1 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-error @below {{AllReduce-1: expected parameters in unit order, got @a too late}}
  %s:2 = fsdp.all_reduce @u avg over "replicate" [@b, @a] %r#1, %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-error @below {{AllReduce-1: expected @a in unit @v}}
  %s = fsdp.all_reduce @v avg over "replicate" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-error @below {{AllReduce-2: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' for @a, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{}]>>'}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-error @below {{AllReduce-2: expected a part of @a that is partial along "shard", in the dtype of the reduction, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>'}}
  %s = fsdp.all_reduce @u avg over "shard" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>)
  // expected-error @below {{AllReduce-3: expected an axis of #fsdp.mesh<["shard"=2]>, got: "replicate"}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.unit @v
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r:2 = fsdp.reduce_scatter @u avg [@a, @b] %g, %g : (tensor<4xf32>, tensor<4xf32>) -> (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>)
  // expected-note @below {{all-reduced here}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{Program-4: expected the gradient of @a to be all-reduced at most once}}
  %t = fsdp.all_reduce @u avg over "replicate" [@a] %r#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w:2 = fsdp.all_gather @u %a, %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  %k:2 = fsdp.reshard @u %w#0, %w#1 : tensor<4xf32>, tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
  // expected-error @below {{AllGather-1: expected all results of one fsdp.reshard of unit @u, in order}}
  %v:2 = fsdp.all_gather @u %k#1, %k#0 : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w:2 = fsdp.all_gather @u %a, %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  // expected-error @below {{Reshard-2: expected 2 results, got: 1}}
  %k = fsdp.reshard @u %w#0, %w#1 : tensor<4xf32>, tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 2}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w:2 = fsdp.all_gather @u %a, %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  // expected-error @below {{Reshard-2: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>' for @b, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>'}}
  %k:2 = fsdp.reshard @u %w#0, %w#1 : tensor<4xf32>, tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u {post_forward_size = 3}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w:2 = fsdp.all_gather @u %a, %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  // expected-error @below {{Reshard-2: expected a post_forward_size that divides the 4 ranks of axis "shard" and is less than that, got: 3}}
  %k:2 = fsdp.reshard @u %w#0, %w#1 : tensor<4xf32>, tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":3}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":3}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=4]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.param @b : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %b = fsdp.read @b : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w:2 = fsdp.all_gather @u %a, %b : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> (tensor<4xf32>, tensor<4xf32>)
  // expected-error @below {{Reshard-2: expected 0 results, got: 2}}
  %k:2 = fsdp.reshard @u %w#0, %w#1 : tensor<4xf32>, tensor<4xf32> to !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard":2}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  %a = fsdp.read @a : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  // expected-error @below {{AllGather-2: expected a result of 'tensor<4xbf16>', got: 'tensor<4xf32>'}}
  %w = fsdp.all_gather @u %a : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-2: expected 'tensor<4xbf16>' for @a, got: 'tensor<4xf32>'}}
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = f32} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xbf16>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-4: expected reduce_dtype 'f32' as unit @u says}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xbf16>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-4: expected a positive divisor, got: 0.000000e+00 : f64}}
  %r = fsdp.reduce_scatter @u sum [@a] %g {reduce_dtype = f32, predivide = 0.0} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]> {compute_dtype = bf16}
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xbf16>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-4: expected divisors with sum only, got: avg}}
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = f32, postdivide = 2.0} : (tensor<4xbf16>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = bf16>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-3: expected '!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>' for @a, got: '!fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>'}}
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf16>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.return %x : tensor<f32>
}

// -----

// The all-reduce over the replicas is missing.
fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-3: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>' for @a, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>'}}
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.optimizer "sgd" {}
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  fsdp.phase backward
  %r = fsdp.reduce_scatter @u avg [@a] %g : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.phase optimizer
  // expected-error @below {{OptimizerStep-1: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' for @a, got: '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>'}}
  fsdp.optimizer_step [@a] %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["replicate"]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = bf16>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
  // expected-error @below {{AllReduce-2: expected '!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>' for @a, got: '!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}]>>'}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r {reduce_dtype = bf16} : (!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = bf16>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
  // expected-error @below {{AllReduce-2: expected a part of @a that is partial along "replicate", in the dtype of the reduction, got: '!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>'}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r {reduce_dtype = f16} : (!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["replicate"=2, "shard"=2]>
fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = bf16>}
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: tensor<4xf32>) -> tensor<f32> {
  %r = fsdp.reduce_scatter @u avg [@a] %g {reduce_dtype = bf16} : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>
  // expected-error @below {{AllReduce-4: expected divisors with sum only, got: avg}}
  %s = fsdp.all_reduce @u avg over "replicate" [@a] %r {reduce_dtype = bf16, postdivide = 2.0} : (!fsdp.sharded<tensor<4xbf16>, <@world, [{"shard"}], partial ["replicate"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @a : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @p(%x: tensor<f32>, %g: !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["stage"]>>) -> tensor<f32> {
  // expected-error @below {{AllReduce-3: expected an axis of #fsdp.mesh<["shard"=2]>, got: "stage"}}
  %s = fsdp.all_reduce @u avg over "stage" [@a] %g : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}], partial ["stage"]>>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{ReduceScatter-1: expected parameters, got none}}
  fsdp.reduce_scatter @u avg [] : () -> ()
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{AllReduce-1: expected parameters, got none}}
  fsdp.all_reduce @u avg over "shard" [] : () -> ()
  fsdp.return %x : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.program @p(%x: tensor<f32>) -> tensor<f32> {
  // expected-error @below {{AllGather-1: expected the parameters of a unit, got none}}
  fsdp.all_gather @u : () -> ()
  fsdp.return %x : tensor<f32>
}
