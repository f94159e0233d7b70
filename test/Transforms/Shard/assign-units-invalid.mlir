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

// Every pattern of a list must match.
// expected-error @below {{pattern "outputs" matches no module with parameters; modules are: norm, output}}
fsdp.unit_pattern "norm", "outputs"
fsdp.param @norm.weight : tensor<4xf32>
fsdp.param @output.weight : tensor<4x4xf32>

// -----

module attributes {fsdp.module_classes = {norm = "RMSNorm", output = "Linear"}} {
  // expected-error @below {{class "Block" matches no module with parameters; classes are: RMSNorm, Linear}}
  fsdp.unit_pattern "Block" {by_class}
  fsdp.param @norm.weight : tensor<4xf32>
  fsdp.param @output.weight : tensor<4x4xf32>
}

// -----

// expected-error @below {{the capture has no classes of modules: capture the model again}}
fsdp.unit_pattern "Block" {by_class}
fsdp.param @norm.weight : tensor<4xf32>

// -----

// expected-error @below {{pattern "**.router" matches no parameter}}
fsdp.ignore "**.router"
fsdp.param @norm.weight : tensor<4xf32>

// -----

fsdp.mesh @world <["shard"=4]>
// expected-warning @below {{an integer "reshard_after_forward" of 1 keeps the parameters whole after forward, as false does; true reshards them}}
fsdp.unit_pattern "a" {post_forward_size = 1}
// expected-error @below {{expected an integer "reshard_after_forward" that is a factor of the 4 ranks of axis "shard", got: 3}}
fsdp.unit_pattern "b" {post_forward_size = 3}
fsdp.param @a.weight : tensor<4xf32>
fsdp.param @b.weight : tensor<4xf32>

// -----

fsdp.mesh @world <["shard"=4]>
// expected-error @below {{expected an integer "reshard_after_forward" that is a factor of the 4 ranks of axis "shard", got: 8}}
fsdp.unit_pattern "a" {post_forward_size = 8}
fsdp.param @a.weight : tensor<4xf32>

// -----

fsdp.mesh @world <["shard"=4]>
// expected-error @below {{expected an integer "reshard_after_forward" that is a factor of the 4 ranks of axis "shard", got: 0}}
fsdp.unit_pattern "a" {post_forward_size = 0}
fsdp.param @a.weight : tensor<4xf32>

// -----

// The step was not captured under the policy that is asked for.
// expected-error @below {{unit "layers.0" was captured with no mixed precision, the policy asks for #fsdp.mixed_precision<param_dtype = bf16>; capture the model with this config}}
fsdp.unit_pattern "layers.*" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
fsdp.param @layers.0.weight : tensor<4x4xf32>

// -----

// Whether inputs are cast, and which gradients are, is in the program.
module attributes {fsdp.captured_precision = {
    a = #fsdp.mixed_precision<param_dtype = bf16>, b = #fsdp.mixed_precision<param_dtype = bf16>}} {
  fsdp.unit_pattern "a" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  // expected-error @below {{unit "b" was captured with #fsdp.mixed_precision<param_dtype = bf16>, the policy asks for #fsdp.mixed_precision<param_dtype = bf16, cast_forward_inputs = false>; capture the model with this config}}
  fsdp.unit_pattern "b" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, cast_forward_inputs = false>}
  fsdp.param @a.weight : tensor<4x4xf32> {compute_dtype = bf16}
  fsdp.param @b.weight : tensor<4x4xf32> {compute_dtype = bf16}
}

// -----

// A unit at whose boundary the program casts is no unit any more.
// expected-error @below {{unit "a" was captured with #fsdp.mixed_precision<param_dtype = bf16>, the policy asks for no mixed precision; capture the model with this config}}
module attributes {fsdp.captured_precision = {
    "(root)" = #fsdp.mixed_precision<param_dtype = bf16>,
    a = #fsdp.mixed_precision<param_dtype = bf16>}} {
  fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.param @a.weight : tensor<4x4xf32> {compute_dtype = bf16}
}

// -----

// The program sums the gradients of inputs as the units of the capture do.
module attributes {fsdp.captured_units = [["a"]], fsdp.entries = {b = "memory"}} {
  fsdp.unit_pattern "a"
  // expected-error @below {{unit "b" was not one at capture, and what a unit does with input "memory" of "b" changes bits; capture the model with a config that has these units}}
  fsdp.unit_pattern "b"
  fsdp.param @a.weight : tensor<4x4xf32>
  fsdp.param @b.weight : tensor<4x4xf32>
}

// -----

// expected-error @below {{unit "a+b" was one at capture and is not one now, and what a unit does with input "memory" of "b" changes bits}}
module attributes {fsdp.captured_units = [["a", "b"]], fsdp.entries = {b = "memory"}} {
  fsdp.unit_pattern "a"
  fsdp.param @a.weight : tensor<4x4xf32>
  fsdp.param @b.weight : tensor<4x4xf32>
}

// -----

// A root unit without parameters casts its output all the same.
// expected-error @below {{unit "(root)" was captured with no mixed precision, the policy asks for #fsdp.mixed_precision<output_dtype = f32>}}
fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<output_dtype = f32>}
fsdp.unit_pattern "a"
fsdp.param @a.weight : tensor<4x4xf32>

// -----

fsdp.unit_pattern "" {reshard_after_forward = true}
// expected-error @below {{a second pattern "" for the root module}}
fsdp.unit_pattern ""
fsdp.param @a.weight : tensor<4x4xf32>

// -----

// What ties make one unit has one mixed precision.
module attributes {fsdp.captured_precision = {a = #fsdp.mixed_precision<param_dtype = bf16>}} {
  fsdp.unit_pattern "a" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
  fsdp.unit_pattern "b"
  // expected-warning @below {{the units are merged}}
  // expected-error @below {{the mixed precision of its units differs}}
  fsdp.param @a.weight : tensor<4x4xf32> {aliases = ["b.weight"], compute_dtype = bf16}
}

// -----

fsdp.unit_pattern "a" {gradient_division = #fsdp.gradient_division<force_sum = true>}
fsdp.unit_pattern "b"
// expected-warning @below {{tied parameter has names in different units: "a.w" in "a", "b.w" in "b"; the units are merged}}
// expected-error @below {{the gradient division of its units differs}}
fsdp.param @a.w : tensor<4xf32> {aliases = ["b.w"]}

// -----

// The casts at a module all of whose parameters are ignored are in the captured
// program, but not among those of units.
// expected-error @below {{the parameters of module "a" are all ignored; expected the mixed precision of the root unit for it}}
fsdp.unit_pattern "a" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
fsdp.ignore "a.weight"
fsdp.param @a.weight : tensor<4x4xf32>
fsdp.param @b.weight : tensor<4x4xf32>
