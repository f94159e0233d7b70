//===- FSDPPolicyOps.td - which units, and what they keep --*- tablegen -*-===//
//
// Policy about units, placements and activations. Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPPOLICYOPS_TD
#define FSDP_DIALECT_FSDPPOLICYOPS_TD

def FSDP_UnitPatternOp : FSDP_Op<"unit_pattern"> {
  let summary = "Policy: the modules that each form an FSDP unit";
  let description = [{
    Every module whose dotted name matches forms one unit, as one
    `fully_shard(module)` call would. `*` stays within one segment of the name,
    `**` crosses segments. `fsdp-assign-units` replaces the op by `fsdp.unit`
    ops. Without `reshard_after_forward` the unit follows FSDP2's default.
    `post_forward_size` is FSDP2's integer `reshard_after_forward`: it divides
    the number of ranks of axis `shard`; 1 means
    `reshard_after_forward = false`, the number of all ranks means `true`. The
    pattern "" is the root module: its policy is that of the root unit, and is
    not inherited by others.

    Several patterns form one unit of all modules that they match, as
    `fully_shard([norm, output])` would. With `by_class` the pattern matches
    class names: the module attribute `fsdp.module_classes` has the class of
    each module.

    ```mlir
    fsdp.unit_pattern "layers.*" {reshard_after_forward = true}
    fsdp.unit_pattern "norm", "output"
    fsdp.unit_pattern "LlamaBlock" {by_class}
    fsdp.unit_pattern "experts.*" {post_forward_size = 4 : i64}
    fsdp.unit_pattern "" {mixed_precision = #fsdp.mixed_precision<param_dtype = bf16>}
    fsdp.unit_pattern "head" {gradient_division = #fsdp.gradient_division<factor = 8.0 : f64>}
    ```

    **UnitPattern-1**: there is at least one pattern, and only one with
    `by_class`.
    **UnitPattern-2**: `reshard_after_forward` and `post_forward_size` are not
    both given.
    **UnitPattern-3**: the pattern "" is the only one, and not `by_class`.
  }];
  let arguments = (ins StrArrayAttr:$patterns,
                       OptionalAttr<BoolAttr>:$reshard_after_forward,
                       UnitAttr:$by_class,
                       OptionalAttr<I64Attr>:$post_forward_size,
                       OptionalAttr<FSDP_MixedPrecisionAttr>:$mixed_precision,
                       UnitAttr:$cpu_offload,
                       OptionalAttr<FSDP_GradientDivisionAttr>:$gradient_division);
  let assemblyFormat = "custom<Patterns>($patterns) attr-dict";
  let hasVerifier = 1;
  let extraClassDeclaration = [{
    /// Whether the pattern is "", the root module.
    bool isRoot() {
      return getPatterns().size() == 1 &&
             ::llvm::cast<::mlir::StringAttr>(getPatterns()[0]).empty();
    }
  }];
}

def FSDP_AutoUnitsOp : FSDP_Op<"auto_units"> {
  let summary = "Policy: the repeated modules are the units";
  let description = [{
    `fsdp-detect-units` replaces the op by an `fsdp.unit_pattern` for each
    module that it finds to be a block of the model.

    ```mlir
    fsdp.auto_units
    ```
  }];
  let assemblyFormat = "attr-dict";
}

def FSDP_ShardPlacementOp : FSDP_Op<"shard_placement"> {
  let summary = "Policy: the dimension that parameters are sharded on";
  let description = [{
    FSDP2's `shard_placement_fn` that returns `Shard(dim)`: parameters whose
    name matches are sharded on `dim`. A negative `dim` counts from the last
    dimension; a dimension other than the first has to divide evenly. If two
    patterns match, the first wins. `fsdp-place-params` replaces the op by
    shardings.

    ```mlir
    fsdp.shard_placement "layers.*.wo.weight" {dim = 1 : i64}
    ```
  }];
  let arguments = (ins StrAttr:$pattern, I64Attr:$dim);
  let assemblyFormat = "$pattern attr-dict";
}

def FSDP_IgnoreOp : FSDP_Op<"ignore"> {
  let summary = "Policy: parameters that FSDP leaves alone";
  let description = [{
    FSDP2's `ignored_params`: a matching parameter stays whole on every rank,
    belongs to no unit and is not gathered, and its gradient is not reduced. The
    pattern matches parameter names. `fsdp-assign-units` marks the parameters
    `ignored`.

    ```mlir
    fsdp.ignore "layers.*.router.weight"
    ```
  }];
  let arguments = (ins StrAttr:$pattern);
  let assemblyFormat = "$pattern attr-dict";
}

def FSDP_CheckpointPatternOp : FSDP_Op<"checkpoint_pattern"> {
  let summary = "Policy: the modules whose activations are recomputed";
  let description = [{
    What a matching module computes in forward is not kept for backward but
    computed again there, as `torch.utils.checkpoint` around the module would.
    The outermost matching module counts; if two patterns match it, the first
    wins. `save` lists operators, with or without an overload, whose results are
    kept all the same. `name/n` keeps only the first of every n calls that a
    module makes, so `aten::mm/2` keeps every second product, as torchtitan's
    selective checkpointing by operator does. `products` stands for all matrix
    products, convolutions, attention and reductions over ranks: what is left
    is cheap to compute again. `fsdp-recompute-activations` replaces the op by
    calls.

    ```mlir
    fsdp.checkpoint_pattern "layers.*" {save = ["aten::mm", "aten::add.Tensor"]}
    fsdp.checkpoint_pattern "layers.*" {save = ["products"]}
    ```

    **CheckpointPattern-1**: the pattern is not empty, and each name in `save`
    is `products`, or `namespace::name` or `namespace::name.overload`,
    optionally followed by `/` and a positive number.
  }];
  let arguments = (ins StrAttr:$pattern, OptionalAttr<StrArrayAttr>:$save);
  let assemblyFormat = "$pattern attr-dict";
  let hasVerifier = 1;
}

#endif
