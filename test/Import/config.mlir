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

// HSDP; a size is inferred once.
// RUN: fsdp-opt %t/model.mlir --config %t/hsdp.yaml --world-size 8 --level captured | FileCheck %s --check-prefix=HSDP
// RUN: fsdp-opt %t/model.mlir --config %t/hsdp2.yaml --world-size 8 --level captured | FileCheck %s --check-prefix=HSDP
// HSDP: fsdp.mesh @world <["replicate"=2, "shard"=4]>
// HSDP-NEXT: fsdp.unit_pattern "norm", "output"
// HSDP-NEXT: fsdp.unit_pattern "Block" {by_class, reshard_after_forward = false}
// HSDP-NEXT: fsdp.ignore "**.router"
// HSDP-NEXT: fsdp.ignore "**.bias"

// One replica, where the config names it.
// RUN: fsdp-opt %t/model.mlir --config %t/one-replica.yaml --world-size 8 --level captured | FileCheck %s --check-prefix=ONE-REPLICA
// ONE-REPLICA: fsdp.mesh @world <["replicate"=1, "shard"=8]>

// JSON is YAML.
// RUN: fsdp-opt %t/model.mlir --config %t/config.json --level captured | FileCheck %s --check-prefix=JSON
// JSON: fsdp.unit_pattern "layers.*"
// JSON: fsdp.optimizer "sgd" {lr = 1.000000e-01 : f64}

// RUN: not fsdp-opt %t/model.mlir --config %t/unknown.yaml 2>&1 | FileCheck %s --check-prefix=UNKNOWN
// UNKNOWN: unknown.yaml:2:1: error: unknown key "optimiser" in the config, did you mean "optimizer"?

// RUN: not fsdp-opt %t/model.mlir --config %t/nested.yaml 2>&1 | FileCheck %s --check-prefix=NESTED
// NESTED: nested.yaml:2:5: error: unknown key "reshard" in "units"; known ones are: match, class, reshard_after_forward, mixed_precision

// The schedule: FSDP2's own, or key by key; a device's file lies beside the config.
// RUN: fsdp-opt %t/model.mlir --config %t/schedule-fsdp2.yaml --level captured | FileCheck %s --check-prefix=SCHEDULE2
// SCHEDULE2: fsdp.schedule {prefetch = "fsdp2", reduce_scatters_in_flight = 1 : i64}
// RUN: fsdp-opt %t/model.mlir --config %t/schedule.yaml --level captured | FileCheck %s --check-prefix=SCHEDULE
// SCHEDULE: fsdp.schedule {bucket = "saturation", device = "{{.*}}a.yaml", memory = "auto", memory_budget = 40265318400 : i64, prefetch = "none", reduce_scatters_in_flight = 3 : i64}
// RUN: not fsdp-opt %t/model.mlir --config %t/schedule-name.yaml 2>&1 | FileCheck %s --check-prefix=SCHEDULENAME
// SCHEDULENAME: schedule-name.yaml:1:11: error: expected a mapping or fsdp2 for "schedule", got: "fsdp3"
// RUN: not fsdp-opt %t/model.mlir --config %t/schedule-key.yaml 2>&1 | FileCheck %s --check-prefix=SCHEDULEKEY
// SCHEDULEKEY: schedule-key.yaml:1:12: error: unknown key "prefetsh" in "schedule", did you mean "prefetch"?
// RUN: not fsdp-opt %t/model.mlir --config %t/schedule-bytes.yaml 2>&1 | FileCheck %s --check-prefix=SCHEDULEBYTES
// SCHEDULEBYTES: schedule-bytes.yaml:1:27: error: expected a positive number of bytes such as 40GB or 37.5GiB for "memory_budget", got: "40 gigs"
// RUN: not fsdp-opt %t/model.mlir --config %t/schedule-value.yaml 2>&1 | FileCheck %s --check-prefix=SCHEDULEVALUE
// SCHEDULEVALUE: schedule-value.yaml:1:20: error: expected unit, parameter, saturation or optimal for "bucket", got: "layer"

// The units inherit the global policy as a whole, or have one of their own.
// RUN: fsdp-opt %t/model.mlir --config %t/mixed.yaml --level captured | FileCheck %s --check-prefix=MIXED
// MIXED:      fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32, cast_forward_inputs = false>}
// MIXED-NEXT: fsdp.unit_pattern "a" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16, reduce_dtype = f32, cast_forward_inputs = false>}
// MIXED-NEXT: fsdp.unit_pattern "b" {mixed_precision = #fsdp.mixed_precision<param_dtype = f16, output_dtype = f32>}
// MIXED-NEXT: fsdp.unit_pattern "c"{{$}}

// RUN: not fsdp-opt %t/model.mlir --config %t/dtype.yaml 2>&1 | FileCheck %s --check-prefix=DTYPE
// DTYPE: dtype.yaml:1:32: error: expected float32, float64, float16, bfloat16 or null for "param_dtype", got: "bf16"

// RUN: not fsdp-opt %t/model.mlir --config %t/dtypes.yaml 2>&1 | FileCheck %s --check-prefix=DTYPES
// DTYPES: dtypes.yaml:3:38: error: expected float32, float64, float16, bfloat16 or null for "reduce_dtype", got: a sequence

// RUN: fsdp-opt %t/model.mlir --config %t/root.yaml --level captured | FileCheck %s --check-prefix=ROOT
// ROOT: fsdp.unit_pattern "" {post_forward_size = 2 : i64}
// ROOT-NEXT: fsdp.unit_pattern "layers.*"{{$}}
// RUN: not fsdp-opt %t/model.mlir --config %t/root-word.yaml 2>&1 | FileCheck %s --check-prefix=ROOT-WORD
// ROOT-WORD: root-word.yaml:1:24: error: expected true, false or an integer of at least 1 for "reshard_after_forward", got: "no"

// RUN: not fsdp-opt %t/model.mlir --config %t/precision.yaml 2>&1 | FileCheck %s --check-prefix=PRECISION
// PRECISION: precision.yaml:1:19: error: unknown key "buffer_dtype" in "mixed_precision"; known ones are: param_dtype, reduce_dtype, output_dtype, cast_forward_inputs

// RUN: not fsdp-opt %t/model.mlir --config %t/auto-precision.yaml 2>&1 | FileCheck %s --check-prefix=AUTO-PRECISION
// AUTO-PRECISION: auto-precision.yaml:1:8: error: expected units by name or class with "mixed_precision", got: auto

// RUN: fsdp-opt %t/model.mlir --config %t/division.yaml --level captured | FileCheck %s --check-prefix=DIVISION
// DIVISION:      fsdp.unit_pattern "" {gradient_division = #fsdp.gradient_division<factor = 4.000000e+00 : f64, force_sum = true>}
// DIVISION-NEXT: fsdp.unit_pattern "a" {gradient_division = #fsdp.gradient_division<factor = 4.000000e+00 : f64, force_sum = true>}
// DIVISION-NEXT: fsdp.unit_pattern "b" {gradient_division = #fsdp.gradient_division<factor = 2.000000e+00 : f64>}
// DIVISION-NEXT: fsdp.unit_pattern "c" {gradient_division = #fsdp.gradient_division<force_sum = true>}
// DIVISION-NEXT: fsdp.unit_pattern "d"{{$}}

// RUN: not fsdp-opt %t/model.mlir --config %t/divisor.yaml 2>&1 | FileCheck %s --check-prefix=DIVISOR
// DIVISOR: divisor.yaml:1:25: error: expected a number of at least 1e-27 and at most 1e+27 or null for "gradient_divide_factor", got: "-1"
// RUN: not fsdp-opt %t/model.mlir --config %t/unit-divisor.yaml 2>&1 | FileCheck %s --check-prefix=UNIT-DIVISOR
// UNIT-DIVISOR: unit-divisor.yaml:2:49: error: expected a number of at least 1e-27 and at most 1e+27 or null for "gradient_divide_factor", got: "0"
// RUN: not fsdp-opt %t/model.mlir --config %t/word-divisor.yaml 2>&1 | FileCheck %s --check-prefix=WORD-DIVISOR
// WORD-DIVISOR: word-divisor.yaml:1:44: error: expected a number of at least 1e-27 and at most 1e+27 or null for "gradient_divide_factor", got: "ranks"

// What is computed with in float32 must be a number there.
// RUN: not fsdp-opt %t/model.mlir --config %t/small-divisor.yaml 2>&1 | FileCheck %s --check-prefix=SMALL-DIVISOR
// SMALL-DIVISOR: small-divisor.yaml:1:25: error: expected a number of at least 1e-27 and at most 1e+27 or null for "gradient_divide_factor", got: "1e-320"
// RUN: not fsdp-opt %t/model.mlir --config %t/scaler-large.yaml 2>&1 | FileCheck %s --check-prefix=SCALER-LARGE
// SCALER-LARGE: scaler-large.yaml:1:27: error: expected a number of at least 1e-27 and at most 1e+27 for "init_scale", got: "1e300"
// RUN: not fsdp-opt %t/model.mlir --config %t/large-dampening.yaml 2>&1 | FileCheck %s --check-prefix=LARGE-DAMPENING
// LARGE-DAMPENING: large-dampening.yaml:1:35: error: expected a number of at least -1e+27 and at most 1e+27 for "dampening", got: "-1e300"

// RUN: fsdp-opt %t/model.mlir --config %t/scaler.yaml --level captured | FileCheck %s --check-prefix=SCALER
// SCALER: fsdp.grad_scaler {backoff_factor = 5.000000e-01 : f64, growth_factor = 4.000000e+00 : f64, growth_interval = 100 : i64, init_scale = 6.553600e+04 : f64}

// RUN: fsdp-opt %t/model.mlir --config %t/scaler-default.yaml --level captured | FileCheck %s --check-prefix=SCALER-DEFAULT
// SCALER-DEFAULT: fsdp.grad_scaler {backoff_factor = 5.000000e-01 : f64, growth_factor = 2.000000e+00 : f64, growth_interval = 2000 : i64, init_scale = 6.553600e+04 : f64}

// RUN: fsdp-opt %t/model.mlir --config %t/scaler-off.yaml --level captured | FileCheck %s --check-prefix=SCALER-OFF
// SCALER-OFF-NOT: fsdp.grad_scaler

// RUN: not fsdp-opt %t/model.mlir --config %t/scaler-range.yaml 2>&1 | FileCheck %s --check-prefix=SCALER-RANGE
// SCALER-RANGE: scaler-range.yaml:1:31: error: expected a number above 0 and below 1 for "backoff_factor", got: "2"

// RUN: not fsdp-opt %t/model.mlir --config %t/scaler-key.yaml 2>&1 | FileCheck %s --check-prefix=SCALER-KEY
// SCALER-KEY: scaler-key.yaml:1:15: error: unknown key "scale" in "grad_scaler"; known ones are: init_scale, growth_factor, backoff_factor, growth_interval

// RUN: not fsdp-opt %t/model.mlir --config %t/scaler-word.yaml 2>&1 | FileCheck %s --check-prefix=SCALER-WORD
// SCALER-WORD: scaler-word.yaml:1:14: error: expected true, false or a mapping for "grad_scaler", got: "dynamic"

// RUN: not fsdp-opt %t/model.mlir --config %t/scalar.yaml 2>&1 | FileCheck %s --check-prefix=SCALAR
// SCALAR: scalar.yaml:1:18: error: expected a mapping, false or null for "mixed_precision", got: "bfloat16"

// RUN: not fsdp-opt %t/model.mlir --config %t/captured.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=CAPTURED
// CAPTURED: captured.yaml:2:12: error: unit "layers.0" was captured with no mixed precision, the policy asks for #fsdp.mixed_precision<param_dtype = bf16>; capture the model with this config

// RUN: fsdp-opt %t/model.mlir --config %t/checkpoint.yaml --level captured | FileCheck %s --check-prefix=CHECKPOINT
// CHECKPOINT: fsdp.checkpoint_pattern "layers.0" {save = ["aten::mm", "aten::add.Tensor"]}
// CHECKPOINT-NEXT: fsdp.checkpoint_pattern "layers.*" {save = ["products"]}
// CHECKPOINT-NEXT: fsdp.checkpoint_pattern "layers.*"{{$}}

// RUN: not fsdp-opt %t/model.mlir --config %t/checkpoint-match.yaml 2>&1 | FileCheck %s --check-prefix=CHECKPOINT-MATCH
// CHECKPOINT-MATCH: checkpoint-match.yaml:2:3: error: expected a key "match" in "activation_checkpoint"

// RUN: not fsdp-opt %t/model.mlir --config %t/checkpoint-flag.yaml 2>&1 | FileCheck %s --check-prefix=CHECKPOINT-FLAG
// CHECKPOINT-FLAG: checkpoint-flag.yaml:1:24: error: expected a mapping or a sequence of mappings for "activation_checkpoint", got: "true"

// RUN: not fsdp-opt %t/model.mlir --config %t/checkpoint-save.yaml 2>&1 | FileCheck %s --check-prefix=CHECKPOINT-SAVE
// CHECKPOINT-SAVE: checkpoint-save.yaml:1:42: error: expected a sequence of operators or products for "save", got: "aten::mm"

// RUN: not fsdp-opt %t/model.mlir --config %t/checkpoint-name.yaml 2>&1 | FileCheck %s --check-prefix=CHECKPOINT-NAME
// CHECKPOINT-NAME: checkpoint-name.yaml:1:32: error: 'fsdp.checkpoint_pattern' op CheckpointPattern-1: expected an operator of the form "namespace::name" in save, got: "mm"

// RUN: fsdp-opt %t/model.mlir --config %t/activations.yaml --level captured | FileCheck %s --check-prefix=ACTIVATIONS
// ACTIVATIONS: fsdp.offload_pattern "layers.0" {min_bytes = 2097152 : i64}
// ACTIVATIONS-NEXT: fsdp.offload_pattern "layers.*"{{$}}

// RUN: not fsdp-opt %t/model.mlir --config %t/activations-match.yaml 2>&1 | FileCheck %s --check-prefix=ACTIVATIONS-MATCH
// ACTIVATIONS-MATCH: activations-match.yaml:2:3: error: expected a key "match" in "activation_offload"

// RUN: not fsdp-opt %t/model.mlir --config %t/activations-key.yaml 2>&1 | FileCheck %s --check-prefix=ACTIVATIONS-KEY
// ACTIVATIONS-KEY: activations-key.yaml:1:22: error: unknown key "min_byte" in "activation_offload", did you mean "min_bytes"?

// RUN: not fsdp-opt %t/model.mlir --config %t/activations-bytes.yaml 2>&1 | FileCheck %s --check-prefix=ACTIVATIONS-BYTES
// ACTIVATIONS-BYTES: activations-bytes.yaml:1:44: error: expected a positive number of bytes such as 40GB or 37.5GiB for "min_bytes", got: "1 block"

// RUN: not fsdp-opt %t/model.mlir --config %t/activations-none.yaml 2>&1 | FileCheck %s --check-prefix=ACTIVATIONS-NONE
// ACTIVATIONS-NONE: activations-none.yaml:1:43: error: expected a positive number of bytes such as 40GB or 37.5GiB for "min_bytes", got: "0"

// RUN: not fsdp-opt %t/model.mlir --config %t/checkpoint-modules.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=CHECKPOINT-MODULES
// CHECKPOINT-MODULES: checkpoint-modules.yaml:1:32: error: pattern "blocks.*" matches no module that is called

// RUN: not fsdp-opt %t/model.mlir --config %t/twice.yaml 2>&1 | FileCheck %s --check-prefix=TWICE
// TWICE: twice.yaml:2:1: error: key "mesh" is given twice

// RUN: not fsdp-opt %t/model.mlir --config %t/type.yaml 2>&1 | FileCheck %s --check-prefix=TYPE
// TYPE: type.yaml:1:17: error: expected a number of at least 0 and at most 1e+27 for "lr", got: "fast"

// RUN: not fsdp-opt %t/model.mlir --config %t/range.yaml 2>&1 | FileCheck %s --check-prefix=RANGE
// RANGE: range.yaml:1:17: error: expected a number of at least 0 and at most 1e+27 for "lr", got: "-1.0"

// RUN: not fsdp-opt %t/model.mlir --config %t/mesh.yaml --world-size 4 2>&1 | FileCheck %s --check-prefix=MESH
// MESH: mesh.yaml:1:8: error: the mesh has 3 ranks, expected the world size 4

// RUN: not fsdp-opt %t/model.mlir --config %t/mesh2.yaml --world-size 4 2>&1 | FileCheck %s --check-prefix=MESH2
// MESH2: mesh2.yaml:1:8: error: expected the mesh to divide the world size 4, got: 3 ranks on one axis

// RUN: not fsdp-opt %t/model.mlir --config %t/mesh3.yaml --world-size 4 2>&1 | FileCheck %s --check-prefix=MESH3
// MESH3: mesh3.yaml:1:8: error: expected a size for "shard" or "replicate" of "mesh", got -1 for both (-1 is the default of "shard")

// RUN: not fsdp-opt %t/model.mlir --config %t/mesh4.yaml --world-size 4 2>&1 | FileCheck %s --check-prefix=MESH4
// MESH4: mesh4.yaml:1:19: error: expected an integer of at least 1 or -1 for "replicate", got: "0"

// RUN: not fsdp-opt %t/model.mlir --config %t/claims.yaml 2>&1 | FileCheck %s --check-prefix=CLAIMS
// CLAIMS: claims.yaml:1:29: error: expected "match" or "class" in "units", got both

// RUN: not fsdp-opt %t/model.mlir --config %t/neither.yaml 2>&1 | FileCheck %s --check-prefix=NEITHER
// NEITHER: neither.yaml:1:10: error: expected a key "match" or "class" in "units"

// RUN: not fsdp-opt %t/model.mlir --config %t/none.yaml 2>&1 | FileCheck %s --check-prefix=NONE
// NONE: none.yaml:1:18: error: expected a pattern or a sequence of patterns for "match", got: an empty sequence

// RUN: not fsdp-opt %t/model.mlir --config %t/classes.yaml 2>&1 | FileCheck %s --check-prefix=CLASSES
// CLASSES: classes.yaml:1:18: error: expected a pattern for "class", got: a sequence

// RUN: not fsdp-opt %t/model.mlir --config %t/ignore.yaml 2>&1 | FileCheck %s --check-prefix=IGNORE
// IGNORE: ignore.yaml:1:10: error: expected a pattern or a sequence of patterns for "ignore", got: a mapping

// RUN: not fsdp-opt %t/model.mlir --config %t/ignored.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=IGNORED
// IGNORED: ignored.yaml:1:16: error: pattern "b" matches no parameter

// RUN: not fsdp-opt %t/model.mlir --config %t/pattern.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=PATTERN
// PATTERN: pattern.yaml:3:12: error: pattern "layer.*" matches no module with parameters; modules are: layers.0

// RUN: not fsdp-opt %t/model.mlir --config %t/syntax.yaml 2>&1 | FileCheck %s --check-prefix=SYNTAX
// SYNTAX: syntax.yaml:{{[0-9]+}}:{{[0-9]+}}: error:

// RUN: fsdp-opt %t/model.mlir --config %t/training.yaml --level captured | FileCheck %s --check-prefix=TRAINING
// TRAINING:      fsdp.optimizer "adam" {foreach = true, lr = 1.000000e-01 : f64}
// TRAINING-NEXT: fsdp.param_group "**.weight" {beta1 = 8.000000e-01 : f64, beta2 = 9.000000e-01 : f64, weight_decay = 0.000000e+00 : f64}
// TRAINING-NEXT: fsdp.lr_schedule {decay = "linear", min_lr_ratio = 2.500000e-01 : f64, total_steps = 10 : i64, warmup_steps = 2 : i64}
// TRAINING-NEXT: fsdp.gradient_clipping {max_norm = 5.000000e-01 : f64, norm_type = 0x7FF0000000000000 : f64}
// TRAINING-NEXT: fsdp.accumulation {all_reduce_each_microbatch = false, reduce_each_microbatch = false, reshard_after_backward = false, steps = 4 : i64}

// RUN: fsdp-opt %t/model.mlir --config %t/plugin.yaml --level captured | FileCheck %s --check-prefix=PLUGIN
// PLUGIN:      fsdp.optimizer "plugin" {beta1 = 9.000000e-01 : f64, library = "lib/liblion.so", lr = 1.000000e-01 : f64}
// PLUGIN-NEXT: fsdp.lr_schedule {decay = "constant", min_lr_ratio = 0.000000e+00 : f64, total_steps = 4 : i64, warmup_steps = 3 : i64}
// PLUGIN-NEXT: fsdp.gradient_clipping {max_norm = 1.000000e+00 : f64, norm_type = 2.000000e+00 : f64}
// PLUGIN-NEXT: fsdp.accumulation {reduce_each_microbatch = true, steps = 2 : i64}

// Each bad value and contradictory pair, by place.
// RUN: not fsdp-opt %t/model.mlir --config %t/clip-number.yaml 2>&1 | FileCheck %s --check-prefix=CLIP-NUMBER
// CLIP-NUMBER: clip-number.yaml:1:17: error: expected a number above 0 or a mapping for "clip_grad_norm", got: "much"
// RUN: not fsdp-opt %t/model.mlir --config %t/clip-range.yaml 2>&1 | FileCheck %s --check-prefix=CLIP-RANGE
// CLIP-RANGE: clip-range.yaml:1:17: error: expected a number above 0 or a mapping for "clip_grad_norm", got: "-1"
// RUN: not fsdp-opt %t/model.mlir --config %t/clip-norm.yaml 2>&1 | FileCheck %s --check-prefix=CLIP-NORM
// CLIP-NORM: clip-norm.yaml:1:42: error: expected 1, 2 or inf for "norm_type", got: "3"
// RUN: not fsdp-opt %t/model.mlir --config %t/clip-key.yaml 2>&1 | FileCheck %s --check-prefix=CLIP-KEY
// CLIP-KEY: clip-key.yaml:1:18: error: expected a key "max_norm" in "clip_grad_norm"
// RUN: not fsdp-opt %t/model.mlir --config %t/both.yaml 2>&1 | FileCheck %s --check-prefix=BOTH
// BOTH: both.yaml:1:13: error: 'fsdp.optimizer' op Optimizer-2: expected at most one of "fused" and "foreach", got both
// RUN: not fsdp-opt %t/model.mlir --config %t/group-key.yaml 2>&1 | FileCheck %s --check-prefix=GROUP-KEY
// GROUP-KEY: group-key.yaml:3:20: error: 'fsdp.param_group' op ParamGroup-1: "sgd" has no hyperparameter "eps"
// RUN: not fsdp-opt %t/model.mlir --config %t/group-match.yaml 2>&1 | FileCheck %s --check-prefix=GROUP-MATCH
// GROUP-MATCH: group-match.yaml:1:23: error: expected a key "match" in "groups"
// RUN: not fsdp-opt %t/model.mlir --config %t/group-none.yaml --emit plan 2>&1 | FileCheck %s --check-prefix=GROUP-NONE
// GROUP-NONE: group-none.yaml:1:30: error: expected pattern "**.bias" to match a parameter that no group before it matches, found none
// RUN: not fsdp-opt %t/model.mlir --config %t/groups.yaml 2>&1 | FileCheck %s --check-prefix=GROUPS
// GROUPS: groups.yaml:1:21: error: expected a sequence of mappings for "groups", got: "3"
// RUN: not fsdp-opt %t/model.mlir --config %t/options.yaml 2>&1 | FileCheck %s --check-prefix=OPTIONS
// OPTIONS: options.yaml:1:61: error: key "lr" is given twice
// RUN: not fsdp-opt %t/model.mlir --config %t/option-name.yaml 2>&1 | FileCheck %s --check-prefix=OPTION-NAME
// OPTION-NAME: option-name.yaml:1:62: error: expected a name as key in "options", got: a sequence
// RUN: not fsdp-opt %t/model.mlir --config %t/betas.yaml 2>&1 | FileCheck %s --check-prefix=BETAS
// BETAS: betas.yaml:1:21: error: expected a sequence of 2 numbers of at least 0 and below 1 for "betas", got: a sequence
// RUN: not fsdp-opt %t/model.mlir --config %t/library.yaml 2>&1 | FileCheck %s --check-prefix=LIBRARY
// LIBRARY: library.yaml:1:13: error: 'fsdp.optimizer' op Optimizer-1: expected a "library" for "plugin", got none
// RUN: not fsdp-opt %t/model.mlir --config %t/decay.yaml 2>&1 | FileCheck %s --check-prefix=DECAY
// DECAY: decay.yaml:1:22: error: expected cosine, linear or constant for "decay", got: "cubic"
// RUN: not fsdp-opt %t/model.mlir --config %t/total.yaml 2>&1 | FileCheck %s --check-prefix=TOTAL
// TOTAL: total.yaml:1:15: error: expected a key "total_steps" with a decay of "cosine"
// RUN: not fsdp-opt %t/model.mlir --config %t/constant.yaml 2>&1 | FileCheck %s --check-prefix=CONSTANT
// CONSTANT: constant.yaml:1:15: error: expected no "total_steps" with a decay of "constant"
// RUN: not fsdp-opt %t/model.mlir --config %t/microbatches.yaml 2>&1 | FileCheck %s --check-prefix=MICROBATCHES
// MICROBATCHES: microbatches.yaml:1:30: error: expected an integer of at least 1 for "gradient_accumulation_steps", got: "0"
// RUN: not fsdp-opt %t/model.mlir --config %t/each.yaml 2>&1 | FileCheck %s --check-prefix=EACH
// EACH: each.yaml:1:25: error: expected "gradient_accumulation_steps" with "reduce_each_microbatch", got none
// RUN: not fsdp-opt %t/model.mlir --config %t/all-reduce.yaml 2>&1 | FileCheck %s --check-prefix=ALL-REDUCE
// ALL-REDUCE: all-reduce.yaml:1:29: error: expected "gradient_accumulation_steps" with "all_reduce_each_microbatch", got none
// RUN: not fsdp-opt %t/model.mlir --config %t/all-reduce-value.yaml 2>&1 | FileCheck %s --check-prefix=ALL-REDUCE-VALUE
// ALL-REDUCE-VALUE: all-reduce-value.yaml:2:29: error: expected true or false for "all_reduce_each_microbatch", got: "last"
// RUN: not fsdp-opt %t/model.mlir --config %t/all-reduce-more.yaml 2>&1 | FileCheck %s --check-prefix=ALL-REDUCE-MORE
// ALL-REDUCE-MORE: all-reduce-more.yaml:3:29: error: expected no "all_reduce_each_microbatch" of microbatches that are not reduced, got: true
// RUN: not fsdp-opt %t/model.mlir --config %t/after-backward.yaml 2>&1 | FileCheck %s --check-prefix=AFTER-BACKWARD
// AFTER-BACKWARD: after-backward.yaml:1:25: error: expected "gradient_accumulation_steps" with "reshard_after_backward", got none
// RUN: not fsdp-opt %t/model.mlir --config %t/stay.yaml 2>&1 | FileCheck %s --check-prefix=STAY
// STAY: stay.yaml:2:25: error: expected true or false for "reshard_after_backward", got: "sometimes"

// RUN: fsdp-opt %t/model.mlir --config %t/placement.yaml --level captured | FileCheck %s --check-prefix=PLACEMENT
// PLACEMENT:      fsdp.shard_placement "layers.0.weight" {dim = 1 : i64}
// PLACEMENT-NEXT: fsdp.shard_placement "**" {dim = -2 : i64}
// RUN: not fsdp-opt %t/model.mlir --config %t/placement-mapping.yaml 2>&1 | FileCheck %s --check-prefix=PLACEMENT-MAPPING
// PLACEMENT-MAPPING: placement-mapping.yaml:1:19: error: expected a sequence of mappings for "shard_placement", got: a mapping
// RUN: not fsdp-opt %t/model.mlir --config %t/placement-dim.yaml 2>&1 | FileCheck %s --check-prefix=PLACEMENT-DIM
// PLACEMENT-DIM: placement-dim.yaml:1:39: error: expected an integer for "dim", got: "last"
// RUN: not fsdp-opt %t/model.mlir --config %t/placement-keys.yaml 2>&1 | FileCheck %s --check-prefix=PLACEMENT-KEYS
// PLACEMENT-KEYS: placement-keys.yaml:1:20: error: expected a key "dim" in "shard_placement"

// RUN: fsdp-opt %t/model.mlir --config %t/auto.yaml --level captured | FileCheck %s --check-prefix=AUTO
// AUTO: fsdp.auto_units
// RUN: not fsdp-opt %t/model.mlir --config %t/manual.yaml 2>&1 | FileCheck %s --check-prefix=MANUAL
// MANUAL: manual.yaml:1:8: error: expected a sequence of mappings or auto for "units", got: "manual"

// RUN: fsdp-opt %t/model.mlir --config %t/post-forward.yaml --world-size 4 --level captured | FileCheck %s --check-prefix=POST-FORWARD
// POST-FORWARD: fsdp.unit_pattern "layers.*" {post_forward_size = 2 : i64}
// RUN: not fsdp-opt %t/model.mlir --config %t/post-forward.yaml --world-size 3 --emit plan 2>&1 | FileCheck %s --check-prefix=FACTOR
// FACTOR: post-forward.yaml:1:17: error: expected an integer "reshard_after_forward" that is a factor of the 3 ranks of axis "shard", got: 2

// RUN: not fsdp-opt %t/model.mlir --config %t/missing.yaml 2>&1 | FileCheck %s --check-prefix=MISSING
// MISSING: missing.yaml:1:1: error: the config cannot be read: No such file or directory

// RUN: not fsdp-opt %t/model.mlir --config %t/good.yaml --world-size 0 2>&1 | FileCheck %s --check-prefix=RANKS
// RANKS: error: --world-size: expected at least 1 and at most 1048576, got 0

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

//--- schedule-fsdp2.yaml
schedule: fsdp2

//--- schedule.yaml
schedule:
  prefetch: none
  bucket: saturation
  memory: auto
  memory_budget: 37.5 GiB
  reduce_scatters_in_flight: 3
  device: a.yaml

//--- schedule-name.yaml
schedule: fsdp3

//--- schedule-key.yaml
schedule: {prefetsh: none}

//--- schedule-bytes.yaml
schedule: {memory_budget: 40 gigs}

//--- schedule-value.yaml
schedule: {bucket: layer}

//--- root.yaml
reshard_after_forward: 2
units: [{match: "layers.*"}]

//--- root-word.yaml
reshard_after_forward: no

//--- mixed.yaml
units:
  - match: a
  - {match: b, mixed_precision: {param_dtype: float16, reduce_dtype: null, output_dtype: float32}}
  - {match: c, mixed_precision: false}
mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32, cast_forward_inputs: false}

//--- dtype.yaml
mixed_precision: {param_dtype: bf16}

//--- dtypes.yaml
units:
  - match: a
    mixed_precision: {reduce_dtype: [float32]}

//--- precision.yaml
mixed_precision: {buffer_dtype: float32}

//--- auto-precision.yaml
units: auto
mixed_precision: {param_dtype: bfloat16}

//--- division.yaml
gradient_divide_factor: 4
force_sum_reduction_for_comms: true
units:
  - match: a
  - {match: b, gradient_divide_factor: 2, force_sum_reduction_for_comms: false}
  - {match: c, gradient_divide_factor: null}
  - {match: d, gradient_divide_factor: null, force_sum_reduction_for_comms: false}

//--- divisor.yaml
gradient_divide_factor: -1

//--- small-divisor.yaml
gradient_divide_factor: 1e-320

//--- scaler-large.yaml
grad_scaler: {init_scale: 1e300}

//--- large-dampening.yaml
optimizer: {name: sgd, dampening: -1e300}

//--- unit-divisor.yaml
units:
  - {match: "layers.*", gradient_divide_factor: 0}

//--- word-divisor.yaml
units: [{match: a, gradient_divide_factor: ranks}]

//--- scaler.yaml
grad_scaler: {growth_factor: 4, growth_interval: 100}

//--- scaler-default.yaml
grad_scaler: true

//--- scaler-off.yaml
grad_scaler: false

//--- scaler-range.yaml
grad_scaler: {backoff_factor: 2}

//--- scaler-key.yaml
grad_scaler: {scale: 2}

//--- scaler-word.yaml
grad_scaler: dynamic

//--- scalar.yaml
mixed_precision: bfloat16

//--- captured.yaml
units:
  - match: "layers.*"
    mixed_precision: {param_dtype: bfloat16}

//--- checkpoint.yaml
activation_checkpoint:
  - match: layers.0
    save: ["aten::mm", "aten::add.Tensor"]
  - {match: "layers.*", save: products}
  - match: "layers.*"

//--- checkpoint-match.yaml
activation_checkpoint:
  save: ["aten::mm"]

//--- checkpoint-flag.yaml
activation_checkpoint: true

//--- checkpoint-save.yaml
activation_checkpoint: {match: a, save:  "aten::mm"}

//--- checkpoint-name.yaml
activation_checkpoint: {match: a, save: [mm]}

//--- activations.yaml
activation_offload:
  - {match: layers.0, min_bytes: 2MiB}
  - {match: "layers.*"}

//--- activations-match.yaml
activation_offload:
  min_bytes: 1

//--- activations-key.yaml
activation_offload: {min_byte: 1}

//--- activations-bytes.yaml
activation_offload: {match: a, min_bytes:  1 block}

//--- activations-none.yaml
activation_offload: {match: a, min_bytes: 0}

//--- checkpoint-modules.yaml
activation_checkpoint: {match: "blocks.*"}

//--- twice.yaml
mesh: {shard: 1}
mesh: {shard: 1}

//--- type.yaml
optimizer: {lr: fast}

//--- range.yaml
optimizer: {lr: -1.0}

//--- mesh.yaml
mesh: {shard: 3}

//--- one-replica.yaml
mesh: {replicate: 1}

//--- hsdp.yaml
mesh: {replicate: 2, shard: -1}
units:
  - match: [norm, output]
  - {class: Block, reshard_after_forward: false}
ignore: ["**.router", "**.bias"]

//--- hsdp2.yaml
mesh: {replicate: -1, shard: 4}
units:
  - match: [norm, output]
  - {class: Block, reshard_after_forward: false}
ignore: ["**.router", "**.bias"]

//--- mesh2.yaml
mesh: {replicate: 3}

//--- mesh3.yaml
mesh: {replicate: -1}

//--- mesh4.yaml
mesh: {replicate: 0}

//--- claims.yaml
units: [{match: "a", class: Block}]

//--- neither.yaml
units: [{reshard_after_forward: true}]

//--- none.yaml
units: [{match: []}]

//--- classes.yaml
units: [{class: [A, B]}]

//--- ignore.yaml
ignore: {a: b}

//--- ignored.yaml
ignore: ["**", "b"]

//--- pattern.yaml
optimizer: {lr: 1}
units:
  - match: "layer.*"

//--- syntax.yaml
units: [
  - }

//--- training.yaml
optimizer:
  name: adam
  lr: 0.1
  foreach: true
  groups: [{match: ["**.weight"], weight_decay: 0, betas: [0.8, 0.9]}]
lr_schedule: {warmup_steps: 2, decay: linear, total_steps: 10, min_lr_ratio: 0.25}
clip_grad_norm: {max_norm: 0.5, norm_type: inf}
gradient_accumulation_steps: 4
reduce_each_microbatch: false
all_reduce_each_microbatch: false
reshard_after_backward: false

//--- plugin.yaml
optimizer: {name: plugin, library: lib/liblion.so, lr: 0.1, options: {beta1: 0.9}}
lr_schedule: {warmup_steps: 3}
clip_grad_norm: 1.0
gradient_accumulation_steps: 2

//--- clip-number.yaml
clip_grad_norm: much

//--- clip-range.yaml
clip_grad_norm: -1

//--- clip-norm.yaml
clip_grad_norm: {max_norm: 1, norm_type: 3}

//--- clip-key.yaml
clip_grad_norm: {norm_type: 2}

//--- both.yaml
optimizer: {name: adamw, fused: true, foreach: true}

//--- group-key.yaml
optimizer:
  name: sgd
  groups: [{match: "**", eps: 0.1}]

//--- group-match.yaml
optimizer: {groups: [{lr: 0.1}]}

//--- group-none.yaml
optimizer: {groups: [{match: "**.bias", lr: 0.1}]}

//--- groups.yaml
optimizer: {groups: 3}

//--- options.yaml
optimizer: {name: plugin, library: a.so, lr: 0.1, options: {lr: 0.1}}

//--- option-name.yaml
optimizer: {name: plugin, library: a.so, lr: 0.1, options: {[a]: 1}}

//--- betas.yaml
optimizer: {betas: [0.9]}

//--- library.yaml
optimizer: {name: plugin, lr: 0.1}

//--- decay.yaml
lr_schedule: {decay: cubic, total_steps: 4}

//--- total.yaml
lr_schedule: {decay: cosine}

//--- constant.yaml
lr_schedule: {total_steps: 4}

//--- microbatches.yaml
gradient_accumulation_steps: 0

//--- each.yaml
reduce_each_microbatch: true

//--- all-reduce.yaml
all_reduce_each_microbatch: false

//--- all-reduce-value.yaml
gradient_accumulation_steps: 2
all_reduce_each_microbatch: last

//--- all-reduce-more.yaml
gradient_accumulation_steps: 2
reduce_each_microbatch: false
all_reduce_each_microbatch: true

//--- after-backward.yaml
reshard_after_backward: false

//--- stay.yaml
gradient_accumulation_steps: 2
reshard_after_backward: sometimes

//--- placement.yaml
shard_placement: [{match: layers.0.weight, dim: 1}, {match: "**", dim: -2}]

//--- placement-mapping.yaml
shard_placement: {match: "**", dim: 1}

//--- placement-dim.yaml
shard_placement: [{match: "**", dim:  last}]

//--- placement-keys.yaml
shard_placement: [{match: "**"}]

//--- auto.yaml
units: auto

//--- manual.yaml
units: manual

//--- post-forward.yaml
units: [{match: "layers.*", reshard_after_forward: 2}]

//--- end
