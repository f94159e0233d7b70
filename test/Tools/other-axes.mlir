// A step may have collectives of its own, over ranks that the plan does not
// have. They are calls; their last argument names the axis, one of the module's
// fsdp.model_parallel. Each of the plan's ranks stands for those that share a
// copy of the model with it.

// RUN: fsdp-opt %s --world-size 2 --emit stats | FileCheck %s --check-prefix=STATS
// STATS: ranks                       2
// STATS-NEXT: ranks of the job            16, 8 share each copy of the model (tensor 8)
// STATS: ATen calls                  5
// STATS: reduce-scatters a step      1,
// STATS-NEXT: collectives on tensor       2, 32 B a rank
// STATS-NEXT: reshards a step

// The plan has them too. FSDP's ranks are on two hosts of 8, and so its
// collectives are slower than those of the axis, which stay on one.
// RUN: fsdp-opt %s --world-size 2 --emit plan -o %t.json
// RUN: FileCheck %s --check-prefix=PLAN --input-file %t.json
// PLAN: "model_parallel": {"ranks": 8, "data_stride": 8, "axes": [{"name": "tensor", "ranks": 8, "stride": 1}]}

// RUN: fsdp-opt %s --world-size 2 --emit stats --device h100 | FileCheck %s --check-prefix=TIME
// TIME: simulated on                h100, 2 hosts
// TIME: busy {{.*}}collectives of the model 0.{{[0-9]*[1-9]}}
// TIME: exposed communication {{.*}}collectives of the model 0.{{[0-9]*[1-9]}}

// A hand-written device without latencies shows what is counted: each
// all-reduce sends 7/8 of 16 bytes twice at 1 kB/s; FSDP's pair of ranks is on
// two hosts and shares a link of 10 B/s with nobody.
// RUN: fsdp-opt %s --world-size 2 --emit stats --device %S/Inputs/links.yaml | FileCheck %s --check-prefix=LINKS
// LINKS: busy {{.*}}reduce-scatters 800.000 ms, collectives of the model 56.000 ms
// RUN: not fsdp-run %t.json --steps 1 2>&1 | FileCheck %s --check-prefix=ERROR
// ERROR: _c10d_functional::all_reduce{{.*}}: a plan may not call "_c10d_functional::all_reduce": it communicates with ranks that the plan does not have; only the Python process that captured it can run it
module attributes {fsdp.model_parallel = {axes = [{name = "tensor", ranks = 8 : i64, stride = 1 : i64}], data_stride = 8 : i64, ranks = 8 : i64}} {
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
}
