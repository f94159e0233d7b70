// A config is the YAML of one document, and all of it: what the parser would
// leave out is an error.

// RUN: split-file %s %t
// RUN: not fsdp-opt %t/model.mlir --config %t/second.yaml 2>&1 | FileCheck %s --check-prefix=SECOND
// SECOND: second.yaml:3:1: error: expected one YAML document, got more behind its end
// RUN: not fsdp-opt %t/model.mlir --config %t/ended.yaml 2>&1 | FileCheck %s --check-prefix=ENDED
// ENDED: ended.yaml:3:1: error: expected one YAML document, got more behind its end
// RUN: not fsdp-opt %t/model.mlir --config %t/empty-second.yaml 2>&1 | FileCheck %s --check-prefix=EMPTY-SECOND
// EMPTY-SECOND: empty-second.yaml:{{[0-9]+}}:{{[0-9]+}}: error: expected one YAML document, got more behind its end
// RUN: not fsdp-opt %t/model.mlir --config %t/node.yaml 2>&1 | FileCheck %s --check-prefix=NODE
// NODE: node.yaml:2:1: error: expected one YAML document, got more behind its end
// RUN: not fsdp-opt %t/model.mlir --config %t/brace.yaml 2>&1 | FileCheck %s --check-prefix=BRACE
// BRACE: brace.yaml:1:14: error:
// RUN: not fsdp-opt %t/model.mlir --config %t/directive.yaml 2>&1 | FileCheck %s --check-prefix=DIRECTIVE
// DIRECTIVE: directive.yaml:2:1: error: expected no directive but %YAML and %TAG
// RUN: fsdp-opt %t/model.mlir --config %t/whole.yaml --level captured | FileCheck %s --check-prefix=WHOLE
// WHOLE: fsdp.auto_units

// RUN: not fsdp-opt %t/model.mlir --config %t/tab.yaml 2>&1 | FileCheck %s --check-prefix=TAB
// TAB: tab.yaml:2:3: error: expected spaces as indentation, got a tab
// RUN: not fsdp-opt %t/model.mlir --config %t/anchor.yaml 2>&1 | FileCheck %s --check-prefix=ANCHOR
// ANCHOR: anchor.yaml:1:8: error: expected a value without anchor and alias
// RUN: not fsdp-opt %t/model.mlir --config %t/alias.yaml 2>&1 | FileCheck %s --check-prefix=ALIAS
// ALIAS: alias.yaml:1:8: error: expected a value without anchor and alias

// A pipe is read once, and not again to show its line.
// RUN: cat %t/word.yaml | not timeout 60 fsdp-opt %t/model.mlir --config /dev/stdin 2>&1 | FileCheck %s --check-prefix=PIPE
// PIPE: </dev/stdin>:1:8: error: expected a sequence of mappings or auto for "units", got: "manual"

//--- model.mlir
fsdp.param @layers.0.weight : tensor<4xf32>
fsdp.program @train_step(%x: tensor<4xf32>) -> tensor<f32> {
  %w = fsdp.read @layers.0.weight : tensor<4xf32>
  fsdp.phase forward
  %loss = aten.call "aten::dot"(%x, %w) : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
  fsdp.return %loss : tensor<f32>
}

//--- second.yaml
units: auto
---
optimizer: {name: nope}

//--- ended.yaml
units: auto
...
optimizer: {name: nope}

//--- empty-second.yaml
units: auto
---

//--- node.yaml
{units: auto}
optimizer: {name: nope}

//--- brace.yaml
{units: auto}}

//--- directive.yaml
%YAML 1.2
%FOO
---
units: nonsense

//--- whole.yaml
%YAML 1.2
---
units: auto
... # the end

//--- tab.yaml
optimizer:
  	name: adamw

//--- anchor.yaml
units: &a auto
ignore: *a

//--- alias.yaml
units: *a

//--- word.yaml
units: manual
