// The YAML config becomes policy in the IR; what is wrong in it is one error
// with file, line and column, whichever front door it came through.

// RUN: split-file %s %t
// RUN: fsdp-opt %t/model.mlir --config %t/good.yaml --world-size 4 --level captured | FileCheck %s --check-prefix=GOOD
// GOOD:      fsdp.mesh @world <["shard"=4]>
// GOOD-NEXT: fsdp.unit_pattern "layers.*" {reshard_after_forward = false}
// GOOD-NEXT: fsdp.unit_pattern "embed"
// GOOD-NEXT: fsdp.optimizer "adamw" {beta1 = 9.000000e-01 : f64, beta2 = 0.94999999999999996 : f64, fused = true, lr = 3.000000e-04 : f64}

// RUN: fsdp-opt %t/model.mlir --config %t/empty.yaml --world-size 2 --level captured | FileCheck %s --check-prefix=EMPTY
// EMPTY:      fsdp.mesh @world <["shard"=2]>
// EMPTY-NEXT: fsdp.optimizer "adamw" {}

// JSON is YAML.
// RUN: fsdp-opt %t/model.mlir --config %t/config.json --level captured | FileCheck %s --check-prefix=JSON
// JSON: fsdp.unit_pattern "layers.*"
// JSON: fsdp.optimizer "sgd" {lr = 1.000000e-01 : f64}

// RUN: not fsdp-opt %t/model.mlir --config %t/unknown.yaml 2>&1 | FileCheck %s --check-prefix=UNKNOWN
// UNKNOWN: unknown.yaml:2:1: error: unknown key "optimiser" in the config, did you mean "optimizer"?

// RUN: not fsdp-opt %t/model.mlir --config %t/nested.yaml 2>&1 | FileCheck %s --check-prefix=NESTED
// NESTED: nested.yaml:2:5: error: unknown key "reshard" in "units"; known keys are: match, reshard_after_forward

// RUN: not fsdp-opt %t/model.mlir --config %t/later.yaml 2>&1 | FileCheck %s --check-prefix=LATER
// LATER: later.yaml:1:1: error: key "mixed_precision" is not supported yet

// RUN: not fsdp-opt %t/model.mlir --config %t/twice.yaml 2>&1 | FileCheck %s --check-prefix=TWICE
// TWICE: twice.yaml:2:1: error: key "mesh" is given twice

// RUN: not fsdp-opt %t/model.mlir --config %t/type.yaml 2>&1 | FileCheck %s --check-prefix=TYPE
// TYPE: type.yaml:1:17: error: expected a number for "lr", got: "fast"

// RUN: not fsdp-opt %t/model.mlir --config %t/range.yaml 2>&1 | FileCheck %s --check-prefix=RANGE
// RANGE: range.yaml:1:13: error: 'fsdp.optimizer' op Optimizer-1: "lr" is out of range: -1.000000e+00 : f64

// RUN: not fsdp-opt %t/model.mlir --config %t/mesh.yaml --world-size 4 2>&1 | FileCheck %s --check-prefix=MESH
// MESH: mesh.yaml:1:8: error: the mesh has 3 ranks, expected the world size 4

// RUN: not fsdp-opt %t/model.mlir --config %t/pattern.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=PATTERN
// PATTERN: pattern.yaml:3:12: error: pattern "layer.*" matches no module with parameters; modules are: layers.0

// RUN: not fsdp-opt %t/model.mlir --config %t/syntax.yaml 2>&1 | FileCheck %s --check-prefix=SYNTAX
// SYNTAX: syntax.yaml:{{[0-9]+}}:{{[0-9]+}}: error:

// RUN: not fsdp-opt %t/model.mlir --config %t/missing.yaml 2>&1 | FileCheck %s --check-prefix=MISSING
// MISSING: missing.yaml:1:1: error: cannot read the config: No such file or directory

// RUN: not fsdp-opt %t/model.mlir --config %t/good.yaml --world-size 0 2>&1 | FileCheck %s --check-prefix=RANKS
// RANKS: error: expected --world-size of at least 1, got: 0

//--- model.mlir
fsdp.param @layers.0.weight : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @layers.0.weight : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

//--- good.yaml
# A comment.
mesh: {shard: -1}
units:
  - match: "layers.*"
    reshard_after_forward: false
  - {match: embed}
optimizer: {name: adamw, lr: 3.0e-4, betas: [0.9, 0.95], fused: true}

//--- empty.yaml
# Nothing.

//--- config.json
{"units": [{"match": "layers.*"}], "optimizer": {"name": "sgd", "lr": 0.1}}

//--- unknown.yaml
mesh: {shard: 1}
optimiser: {name: adamw}

//--- nested.yaml
units:
  - reshard: true
    match: "layers.*"

//--- later.yaml
mixed_precision: {param_dtype: bfloat16}

//--- twice.yaml
mesh: {shard: 1}
mesh: {shard: 1}

//--- type.yaml
optimizer: {lr: fast}

//--- range.yaml
optimizer: {lr: -1.0}

//--- mesh.yaml
mesh: {shard: 3}

//--- pattern.yaml
optimizer: {lr: 1}
units:
  - match: "layer.*"

//--- syntax.yaml
units: [
  - }

//--- end
