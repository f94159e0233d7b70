// RUN: fsdp-opt --split-input-file --verify-diagnostics %s

// Each case breaks one invariant of the loop over microbatches.

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Microbatches-1: expected at least two, got: 1}}
  %loss = fsdp.microbatches 1(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Microbatches-1: expected a block that takes the inputs, two i1 and carried values, got: }}
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-error @below {{Microbatches-2: expected the results of the loop, a scalar loss first, got: 'tensor<4xf32>'}}
    fsdp.yield %x : tensor<4xf32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-error @below {{Microbatches-2: expected to carry a value for each of the block's arguments}}
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Accumulate-1: expected @w to name an fsdp.param, found none}}
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<5xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Accumulate-1: expected 'tensor<5xf32>' or its sharded type for @w, got: 'tensor<4xf32>' to 'tensor<4xf32>'}}
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Accumulate-1: expected 1 gradients, sums before and sums, got: 2, 1 and 1}}
    %a = fsdp.accumulate [@w] %x, %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.unit @u {mixed_precision = #fsdp.mixed_precision<reduce_dtype = f16>}
fsdp.param @w : tensor<4xf32> unit @u
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Accumulate-1: expected a sum of 'tensor<4xf16>' for @w, got: 'tensor<4xf32>'}}
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Accumulate-2: expected the gradient of @w to be added to the sum that is carried}}
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %x : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{AllGather-3: expected a condition, and to keep}}
    %w = fsdp.all_gather @u %s when %first : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %w when %last : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %w : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{Program-9: expected conditions of the first gather and of the last reshard of unit @u to go together, got one}}
    %w = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %w : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %x : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %w = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    // expected-error @below {{Program-9: expected the first gather of unit @u in the first microbatch and its last reshard in the last, and all others in every one}}
    fsdp.reshard @u %w when %last : tensor<4xf32>
    %v = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %v : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %x : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %v = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %v : tensor<4xf32>
    // expected-error @below {{Program-9: expected the first gather of unit @u in the first microbatch and its last reshard in the last, and all others in every one}}
    %w = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %w when %last : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %w : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{Program-9: expected the first gather of unit @u in the first microbatch and its last reshard in the last, and all others in every one}}
    %w = fsdp.all_gather @u %s when %last else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %w when %last : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %w : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{Program-9: expected it to keep the results of the unit's last gather}}
    %w = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %w : tensor<4xf32>
    %v = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    fsdp.reshard @u %v when %last : tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %x : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    %w = fsdp.all_gather @u %s when %first else %before : !fsdp.carried<tensor<4xf32>> : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
    // expected-note @below {{resharded here}}
    fsdp.reshard @u %w when %last : tensor<4xf32>
    // expected-error @below {{Program-2: uses a parameter of unit @u after its reshard}}
    %y = aten.call "aten::neg"(%w) : (tensor<4xf32>) -> tensor<4xf32>
    fsdp.yield %l : tensor<f32> carry %w : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-note @below {{made here}}
    %r = fsdp.reduce_scatter @u avg [@w] %a when %last : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{Program-19: uses in every microbatch what is made in only one}}
    fsdp.free %r : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>, %other: !fsdp.carried<!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-note @below {{made here}}
    %r = fsdp.reduce_scatter @u avg [@w] %a when %last : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    // expected-error @below {{Program-19: uses in every microbatch what is made in only one}}
    fsdp.yield %l : tensor<f32> carry %a, %r : tensor<4xf32>, !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %a = fsdp.accumulate [@w] %x onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-note @below {{freed here}}
    fsdp.free %a : tensor<4xf32>
    // expected-error @below {{Program-5: uses a value after its end}}
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %h = aten.call "aten::neg"(%x) : (tensor<4xf32>) -> tensor<4xf32>
    %a = fsdp.accumulate [@w] %h onto %before : !fsdp.carried<tensor<4xf32>> : (tensor<4xf32>) -> tensor<4xf32>
    // expected-error @below {{Program-20: expected forward and backward in the loop over microbatches, the optimizer phase after it}}
    fsdp.phase optimizer
    fsdp.yield %l : tensor<f32> carry %a : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.param @w : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Program-20: expected forward and backward in the loop over microbatches, the optimizer phase after it}}
  fsdp.phase forward
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  // expected-error @below {{Program-20: expected one loop over microbatches, which gives the loss, got one that does not}}
  %more = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
    // expected-error @below {{operand #0 must be variadic of ranked tensor of any type values, but got '!fsdp.carried<tensor<4xf32>>'}}
    %l = "aten.call"(%before) {callee = "aten::sum", args = [unit, #aten.none]} : (!fsdp.carried<tensor<4xf32>>) -> tensor<f32>
    fsdp.yield %l : tensor<f32> carry %x : tensor<4xf32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %made = aten.call "aten::neg"(%arg) : (tensor<4xf32>) -> tensor<4xf32>
  // expected-error @below {{Microbatches-1: expected arguments of the program as inputs, got: }}
  %loss = fsdp.microbatches 2(%made) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    // expected-error @below {{Microbatches-3: expected the first or last microbatch only as a condition}}
    fsdp.free %first : i1
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.buffer @b : tensor<4xf32>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Program-20: expected it in the loop over microbatches or in the optimizer phase}}
  %b = fsdp.read_buffer @b : tensor<4xf32>
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::dot"(%x, %b) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.phase optimizer
  // expected-error @below {{Program-20: expected it in the loop over microbatches}}
  %log = aten.call "aten::log"(%loss) : (tensor<f32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

// -----

// What is returned is not what the loop gives.
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  // expected-error @below {{Program-20: expected one loop over microbatches, which gives the loss, got one that does not}}
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    fsdp.yield %l : tensor<f32>
  }
  %log = aten.call "aten::log"(%loss) : (tensor<f32>) -> tensor<f32>
  fsdp.return %log : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%arg: tensor<4xf32>) -> tensor<f32> {
  %loss = fsdp.microbatches 2(%arg) : (tensor<4xf32>) -> tensor<f32> {
  ^bb0(%x: tensor<4xf32>, %first: i1, %last: i1):
    %l = aten.call "aten::sum"(%x, none) : (tensor<4xf32>) -> tensor<f32>
    %c = builtin.unrealized_conversion_cast %l : tensor<f32> to i1
    // expected-error @below {{Program-19: expected as its condition the first or last microbatch of the loop that it is in}}
    %r = fsdp.reduce_scatter @u avg [@w] %x when %c : (tensor<4xf32>) -> !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
    fsdp.yield %l : tensor<f32>
  }
  fsdp.return %loss : tensor<f32>
}

// -----

fsdp.mesh @world <["shard"=2]>
fsdp.unit @u
fsdp.param @w : tensor<4xf32> unit @u sharding <@world, [{"shard"}]>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %s = fsdp.read @w : !fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>
  %w = fsdp.all_gather @u %s : (!fsdp.sharded<tensor<4xf32>, <@world, [{"shard"}]>>) -> tensor<4xf32>
  %l = aten.call "aten::sum"(%w, none) : (tensor<4xf32>) -> tensor<f32>
  %c = builtin.unrealized_conversion_cast %l : tensor<f32> to i1
  // expected-error @below {{Program-19: expected as its condition the first or last microbatch of the loop that it is in}}
  fsdp.reshard @u %w when %c : tensor<4xf32>
  fsdp.return %l : tensor<f32>
}
