// A step may have collectives of its own, over ranks that the plan does not
// have. They are calls; their last argument names the axis.

// RUN: fsdp-opt %s --world-size 2 --emit stats | FileCheck %s --check-prefix=STATS
// STATS: ATen calls                  5
// STATS: reduce-scatters a step      1,
// STATS-NEXT: collectives on tensor       2, 32 B a rank
// STATS-NEXT: reshards a step

// RUN: fsdp-opt %s --world-size 2 --emit plan -o %t.json
// RUN: not fsdp-run %t.json --steps 1 2>&1 | FileCheck %s --check-prefix=ERROR
// ERROR: _c10d_functional::all_reduce{{.*}}: a plan may not call "_c10d_functional::all_reduce": it communicates with ranks that the plan does not have; only the Python process that captured it can run it
fsdp.mesh @world <["shard"=2]>
fsdp.optimizer "sgd" {lr = 0.5}
fsdp.param @bias : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @bias : tensor<4xf32>
  fsdp.phase forward
  %sum = aten.call "_c10d_functional::all_reduce"(%x, "sum", "tensor") {schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  %loss = aten.call "aten::dot"(%sum, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.phase backward
  %one = aten.call "aten::ones_like"(%loss, none, none, none, false, 1) : (tensor<f32>) -> tensor<f32>
  %g = aten.call "aten::mul.Tensor"(%sum, %one) : (tensor<4xf32>, tensor<f32>) -> tensor<4xf32>
  %all = aten.call "_c10d_functional::all_reduce"(%g, "sum", "tensor") {schema = "_c10d_functional::all_reduce(Tensor input, Any reduce_op, Any group_name) -> Tensor"} : (tensor<4xf32>) -> tensor<4xf32>
  fsdp.gradients [@bias] %all : tensor<4xf32>
  fsdp.return %loss : tensor<f32>
}
