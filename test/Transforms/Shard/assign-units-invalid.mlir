// RUN: fsdp-opt --fsdp-assign-units --split-input-file --verify-diagnostics %s

// expected-error @below {{pattern "layer.*" matches no module with parameters; modules are: layers.0}}
fsdp.unit_pattern "layer.*"
fsdp.param @layers.0.weight : tensor<4x4xf32>

// -----

// `*` does not cross a dot.
// expected-error @below {{pattern "blocks.*.up" matches no module with parameters}}
fsdp.unit_pattern "blocks.*.up"
fsdp.param @blocks.0.mlp.up.weight : tensor<4x4xf32>

// -----

fsdp.unit_pattern "lm_head"
// expected-error @below {{tied parameter has names in different units: "wte.weight" in "(root)", "lm_head.weight" in "lm_head"; let one pattern cover both, or neither}}
fsdp.param @wte.weight : tensor<8x4xf32> {aliases = ["lm_head.weight"]}
