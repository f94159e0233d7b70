//===- FSDPAttrs.td - attributes and types of the fsdp dialect -*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPATTRS_TD
#define FSDP_DIALECT_FSDPATTRS_TD

include "fsdp/Dialect/FSDPDialect.td"
include "mlir/IR/AttrTypeBase.td"
include "mlir/IR/BuiltinAttributeInterfaces.td"
include "mlir/IR/EnumAttr.td"

class FSDP_Attr<string name, string attrMnemonic> : AttrDef<FSDP_Dialect, name> {
  let mnemonic = attrMnemonic;
}

def FSDP_MeshAxisAttr : FSDP_Attr<"MeshAxis", "axis"> {
  let summary = "One named axis of a mesh and its number of ranks";
  let parameters = (ins StringRefParameter<>:$name, "int64_t":$size);
  let assemblyFormat = "`` $name `` `=` `` $size";
}

def FSDP_MeshAttr : FSDP_Attr<"Mesh", "mesh"> {
  let summary = "The ranks of a job as a grid of named axes, outermost first";
  let description = [{
    `<["replicate"=2, "shard"=4]>` is eight ranks; rank r has the coordinate
    `r / 4` on `replicate` and `r % 4` on `shard` (row-major, as in PyTorch's
    `DeviceMesh`).

    **Mesh-1**: axis names are unique. **Mesh-2**: every size is at least 1.
  }];
  let parameters = (ins ArrayRefParameter<"MeshAxisAttr">:$axes);
  let assemblyFormat = "`<` `[` $axes `]` `>`";
  let genVerifyDecl = 1;
  let extraClassDeclaration = [{
    /// Ranks in the whole mesh.
    int64_t getNumRanks() const;
    /// Size of the axis `name`, or nullopt if the mesh has none of that name.
    std::optional<int64_t> getAxisSize(llvm::StringRef name) const;
  }];
}

def FSDP_ShardingAttr : FSDP_Attr<"Sharding", "sharding"> {
  let summary = "How a tensor is spread over a mesh: the axes of each dimension";
  let description = [{
    `<@world, [{"shard"}, {} ]>`: dimension 0 is cut over axis `shard` as
    `torch.chunk` does, ceil(n / ranks) rows per rank, with trailing ranks short
    or empty; dimension 1 is whole. Axes not named replicate the tensor.

    `{"shard":2}` is a sub-axis: groups of 2 neighbours on `shard` that hold the
    tensor between them. The i-th rank of a group holds what the ranks in the
    i-th equal share of the whole axis hold when the tensor is sharded over that
    axis (FSDP2's post-forward mesh).

    `<@world, [{"shard"} ], partial ["replicate"]>`: along axis `replicate` each
    rank holds a term, and the tensor is the sum of them (DTensor's `Partial`,
    Shardy's `unreduced`). This is the type of a gradient that is not
    all-reduced yet.

    **Sharding-1**: an axis is used at most once.
  }];
  let parameters = (ins "FlatSymbolRefAttr":$mesh, "ArrayAttr":$dims,
                        OptionalParameter<"::mlir::ArrayAttr">:$partial);
  let assemblyFormat = [{
    `<` $mesh `,` custom<DimAxes>($dims) (`,` `partial` $partial^)? `>`
  }];
  let genVerifyDecl = 1;
  let extraClassDeclaration = [{
    /// The sharded dimension, or -1 where no dimension names an axis.
    int64_t getShardedDim() const;
    /// The same sharding over groups of `size` neighbours on the axis.
    ShardingAttr getSubAxis(int64_t size) const;
    /// Whether a dimension is cut over the axis `name`.
    bool isShardedOver(llvm::StringRef name) const;
    /// Whether the tensor is partial along the axis `name`.
    bool isPartialAlong(llvm::StringRef name) const;
    /// The same sharding, partial along `axes` and no others.
    ShardingAttr clonePartial(llvm::ArrayRef<mlir::Attribute> axes) const;
  }];
}

def FSDP_MixedPrecisionAttr
    : FSDP_Attr<"MixedPrecision", "mixed_precision"> {
  let summary = "The dtypes of a unit, as in FSDP2's MixedPrecisionPolicy";
  let description = [{
    `<param_dtype = bf16, reduce_dtype = f32>`: floating-point parameters are
    gathered in `param_dtype`, gradients are reduced in `reduce_dtype` and cast
    to the parameter's own dtype. A dtype that is absent is the parameter's own;
    without `output_dtype` outputs are not cast. The casts of activations and of
    gradients are calls in the captured program.

    **MixedPrecision-1**: every dtype is one of f32, f64, f16, bf16.
  }];
  let parameters = (ins OptionalParameter<"::mlir::Type">:$param_dtype,
                        OptionalParameter<"::mlir::Type">:$reduce_dtype,
                        OptionalParameter<"::mlir::Type">:$output_dtype,
                        DefaultValuedParameter<"bool", "true">:$cast_forward_inputs);
  let assemblyFormat = "`<` struct(params) `>`";
  let genVerifyDecl = 1;
  let extraClassDeclaration = [{
    /// The dtype a parameter of dtype `element` is gathered in.
    ::mlir::Type getComputeDtype(::mlir::Type element) const;
  }];
}

def FSDP_GradientDivisionAttr
    : FSDP_Attr<"GradientDivision", "gradient_division"> {
  let summary = "How a unit's reduction divides gradients";
  let description = [{
    FSDP2's `set_gradient_divide_factor(factor)` and, with `force_sum`,
    `set_force_sum_reduction_for_comms(True)`. Without `factor` gradients are
    divided by the number of ranks. `force_sum` divides after the sum over all
    ranks.

    **GradientDivision-1**: there is a positive `factor`, or `force_sum`.
  }];
  let parameters = (ins OptionalParameter<"::mlir::FloatAttr">:$factor,
                        DefaultValuedParameter<"bool", "false">:$force_sum);
  let assemblyFormat = "`<` struct(params) `>`";
  let genVerifyDecl = 1;
}

class FSDP_Type<string name, string typeMnemonic> : TypeDef<FSDP_Dialect, name> {
  let mnemonic = typeMnemonic;
}

def FSDP_ShardedType : FSDP_Type<"Sharded", "sharded"> {
  let summary = "This rank's part of a tensor";
  let description = [{
    The global tensor type and its sharding. Compute takes no operand of this
    type: a shard must be gathered first.

    **Sharded-1**: the sharding has one entry for each dimension.
  }];
  let parameters = (ins "RankedTensorType":$tensor, "ShardingAttr":$sharding);
  let assemblyFormat = "`<` $tensor `,` $sharding `>`";
  let genVerifyDecl = 1;
  let extraClassDeclaration = [{
    /// The same part of the tensor in another dtype.
    ShardedType clone(Type element) const {
      return get(getContext(), getTensor().clone(element), getSharding());
    }
    /// The same part in the same dtype, with another sharding.
    ShardedType clone(ShardingAttr sharding) const {
      return get(getContext(), getTensor(), sharding);
    }
    /// Whether the ranks along some axis hold terms of a sum.
    bool isPartial() const { return bool(getSharding().getPartial()); }
  }];
}

def FSDP_FutureType : FSDP_Type<"Future", "future"> {
  let summary = "The results of a collective in flight";
  let description = [{
    `!fsdp.future<tensor<4xf32>, tensor<2xf32>>`: a collective with a result of
    this type has been launched, and its results are available after an
    `fsdp.wait`. Nothing else takes a future, so nothing can use a result that
    is not available yet. `!fsdp.future<>`: what is in flight completes, but has
    no results.
  }];
  let parameters = (ins OptionalArrayRefParameter<"::mlir::Type">:$types);
  let assemblyFormat = "`<` (`>`) : ($types^ `>`)?";
}

def FSDP_HostType : FSDP_Type<"Host", "host"> {
  let summary = "Activations of one storage, copied to the host";
  let description = [{
    `!fsdp.host<tensor<2x4xf32>, tensor<8xf32>>`: the types of the values that
    `fsdp.offload_activation` copied, the one that owns the storage first. Only
    `fsdp.reload_activation` takes it, so nothing can compute with it.
  }];
  let parameters = (ins ArrayRefParameter<"::mlir::Type">:$types);
  let assemblyFormat = "`<` $types `>`";
}

def FSDP_CarriedType : FSDP_Type<"Carried", "carried"> {
  let summary = "What a microbatch leaves to the next";
  let description = [{
    `!fsdp.carried<tensor<4xf32>>`: a block argument of an `fsdp.microbatches`.
    It has no value in the first microbatch; in each later one, it is what the
    microbatch before yielded. Only `fsdp.accumulate` and `fsdp.all_gather` take
    it, and they say what they do in the first microbatch.
  }];
  let parameters = (ins "::mlir::Type":$type);
  let assemblyFormat = "`<` $type `>`";
}

def FSDP_TensorOrSharded : AnyTypeOf<[AnyRankedTensor, FSDP_ShardedType]>;
/// Results of a collective, or one future of them all.
def FSDP_TensorOrFuture : AnyTypeOf<[AnyRankedTensor, FSDP_FutureType]>;
def FSDP_ShardedOrFuture : AnyTypeOf<[FSDP_ShardedType, FSDP_FutureType]>;
def FSDP_HostOrFuture : AnyTypeOf<[FSDP_HostType, FSDP_FutureType]>;
/// What an fsdp.wait returns.
def FSDP_Awaited : AnyTypeOf<[AnyRankedTensor, FSDP_ShardedType, FSDP_HostType]>;

def FSDP_LevelEnum : I32EnumAttr<"Level", "how far a module is lowered", [
  I32EnumAttrCase<"Captured", 0, "captured">,
  I32EnumAttrCase<"Grouped", 1, "grouped">,
  I32EnumAttrCase<"Placed", 2, "placed">,
  I32EnumAttrCase<"Gathered", 3, "gathered">,
  I32EnumAttrCase<"Reduced", 4, "reduced">,
  I32EnumAttrCase<"Sharded", 5, "sharded">,
  I32EnumAttrCase<"Scheduled", 6, "scheduled">,
  I32EnumAttrCase<"Lowered", 7, "lowered">,
  I32EnumAttrCase<"Planned", 8, "planned">]> {
  let cppNamespace = "::mlir::fsdp";
  let genSpecializedAttr = 0;
}

def FSDP_LevelAttr : EnumAttr<FSDP_Dialect, FSDP_LevelEnum, "level"> {
  let assemblyFormat = "`<` $value `>`";
}

def FSDP_PhaseAttr : I32EnumAttr<"Phase", "part of a training step", [
  I32EnumAttrCase<"Forward", 0, "forward">,
  I32EnumAttrCase<"Backward", 1, "backward">,
  I32EnumAttrCase<"Optimizer", 2, "optimizer">]> {
  let cppNamespace = "::mlir::fsdp";
}

def FSDP_ReduceKindAttr : I32EnumAttr<"ReduceKind", "reduction of gradients", [
  I32EnumAttrCase<"Avg", 0, "avg">,
  I32EnumAttrCase<"Sum", 1, "sum">]> {
  let cppNamespace = "::mlir::fsdp";
}

#endif
