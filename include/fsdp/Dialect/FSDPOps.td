//===- FSDPOps.td - operations of the fsdp dialect ---------*- tablegen -*-===//
#ifndef FSDP_DIALECT_FSDPOPS_TD
#define FSDP_DIALECT_FSDPOPS_TD

include "fsdp/Dialect/FSDPAttrs.td"
include "fsdp/Dialect/FSDPInterfaces.td"
include "mlir/IR/OpAsmInterface.td"
include "mlir/IR/SymbolInterfaces.td"
include "mlir/Interfaces/FunctionInterfaces.td"
include "mlir/Interfaces/SideEffectInterfaces.td"

class FSDP_Op<string mnemonic, list<Trait> traits = []>
    : Op<FSDP_Dialect, mnemonic, traits>;

/// Results are printed with names of the model, so that two dumps can be
/// compared line by line.
def FSDP_NamedResults
    : DeclareOpInterfaceMethods<OpAsmOpInterface, ["getAsmResultNames"]>;

/// In a program, or in the loop over its microbatches.
def FSDP_InProgram : ParentOneOf<["ProgramOp", "MicrobatchesOp"]>;

/// Order of collectives on the wire; every rank must have the same.
def FSDP_CommResource : Resource<"::mlir::fsdp::CommResource">;
/// Parameters, buffers and gradients between steps.
def FSDP_StateResource : Resource<"::mlir::fsdp::StateResource">;

//===----------------------------------------------------------------------===//
// Declarations at module level
//===----------------------------------------------------------------------===//

def FSDP_MeshOp : FSDP_Op<"mesh", [Symbol]> {
  let summary = "Declares a mesh of ranks";
  let description = [{
    ```mlir
    fsdp.mesh @world <["shard"=2]>
    fsdp.mesh @world <["replicate"=2, "shard"=4]>
    ```

    Parameters are sharded over axis `shard`. With an axis `replicate` (HSDP)
    the ranks at each index of that axis hold a whole copy of the parameters,
    and gradients are all-reduced over it after the reduce-scatter.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name, FSDP_MeshAttr:$mesh);
  let assemblyFormat = "$sym_name $mesh attr-dict";
}

include "fsdp/Dialect/FSDPPolicyOps.td"

def FSDP_UnitOp : FSDP_Op<"unit", [Symbol]> {
  let summary = "Parameters that are gathered and reduced together";
  let description = [{
    One `fully_shard` call. The parameters that name it belong to it, in their
    order in the module, which is FSDP2's buffer order. With `cpu_offload`
    (FSDP2's `CPUOffloadPolicy`) their shards, the gradients of the shards and
    the optimizer state are on the host.

    ```mlir
    fsdp.unit @layers.0 {reshard_after_forward = true}
    fsdp.unit @layers.1 {post_forward_size = 2 : i64}
    ```

    With `post_forward_size = k` each rank keeps 1/k of the parameters after
    forward, and backward gathers them from k neighbours.

    **Unit-1**: `post_forward_size` is at least 2, and the unit is resharded
    after forward.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name,
                       DefaultValuedAttr<BoolAttr, "true">:$reshard_after_forward,
                       OptionalAttr<I64Attr>:$post_forward_size,
                       OptionalAttr<FSDP_MixedPrecisionAttr>:$mixed_precision,
                       UnitAttr:$cpu_offload,
                       OptionalAttr<FSDP_GradientDivisionAttr>:$gradient_division);
  let assemblyFormat = "$sym_name attr-dict";
  let hasVerifier = 1;
}

def FSDP_ParamOp : FSDP_Op<"param", [Symbol,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "A parameter of the model";
  let description = [{
    Keyed by its qualified name; a tied parameter lists its other names in
    `aliases`. `frozen` parameters get no gradient; nor do those that an
    `fsdp.no_gradient` of the training step names. `ignored` parameters are
    whole on every rank, and each rank has its own value. `position` is the
    parameter's index among model.parameters(), if the ops have another order.
    A unit may be called several times in a step: FSDP2 then reduces behind
    each of these calls, in backward, the gradients that are whole there, and
    `post_backward` counts the calls before; absent, it is 0.
    `reduced_with` is FSDP2's unit of a parameter that is in another one by the
    schedule's choice of buckets: where a sum has an order, it is that of FSDP2.

    ```mlir
    fsdp.param @layers.0.wq.weight : tensor<64x64xf32> unit @layers.0 sharding <@world, [{"shard"}, {} ]>
    ```

    **Param-1**: `unit` names an `fsdp.unit`. **Param-2**: `sharding` names an
    `fsdp.mesh` and axes of it. **Param-3**: a parameter of a
    unit has at least one dimension (FSDP2 rejects scalars), and each has a
    static shape. **Param-4**: an
    ignored parameter has no unit and no sharding, and may be a scalar.
    **Param-5**: `compute_dtype`, the dtype in which the program reads the
    parameter, is that of the unit's `mixed_precision`; if absent, it is the
    parameter's own. `grad_dtype` is the dtype of its gradient; if absent, it is
    `compute_dtype`. **Param-6**: `sharding` is partial along no axis: a
    parameter is not a sum of terms.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name,
                       TypeAttrOf<AnyRankedTensor>:$type,
                       OptionalAttr<FlatSymbolRefAttr>:$unit,
                       OptionalAttr<FSDP_ShardingAttr>:$sharding,
                       OptionalAttr<StrArrayAttr>:$aliases,
                       UnitAttr:$frozen,
                       UnitAttr:$ignored,
                       OptionalAttr<TypeAttr>:$compute_dtype,
                       OptionalAttr<TypeAttr>:$grad_dtype,
                       OptionalAttr<I64Attr>:$position,
                       OptionalAttr<I64Attr>:$post_backward,
                       OptionalAttr<StrAttr>:$reduced_with);
  let assemblyFormat = [{
    $sym_name `:` $type (`unit` $unit^)? (`sharding` $sharding^)? attr-dict
  }];
  let hasVerifier = 1;
  let extraClassDeclaration = [{
    ::mlir::RankedTensorType getTensorType() {
      return ::llvm::cast<::mlir::RankedTensorType>(getType());
    }
    /// The type of the whole parameter in the program.
    ::mlir::RankedTensorType getComputeType() {
      ::mlir::RankedTensorType type = getTensorType();
      return type.clone(getComputeDtype().value_or(type.getElementType()));
    }
    /// The type of its gradient before the reduction.
    ::mlir::RankedTensorType getGradType() {
      ::mlir::RankedTensorType type = getComputeType();
      return type.clone(getGradDtype().value_or(type.getElementType()));
    }
    /// The type of this rank's part; null before fsdp-place-params.
    ::mlir::fsdp::ShardedType getShardedType();
    /// The type of this rank's part of a placed parameter's gradient, partial
    /// along `axes`: in the dtype `reduced` if there are any, because the cast
    /// comes after the last reduction.
    ::mlir::fsdp::ShardedType
    getPartialType(::llvm::ArrayRef<::mlir::Attribute> axes,
                   ::mlir::Type reduced);
  }];
}

def FSDP_BufferOp : FSDP_Op<"buffer", [Symbol]> {
  let summary = "A buffer of the model, whole on every rank";
  let description = [{
    ```mlir
    fsdp.buffer @rope : tensor<8x4xf32> {non_persistent, strides = array<i64: 1, 8>}
    ```

    `strides`, in elements, are those of the buffer in memory; without them it
    is row-major.

    **Buffer-1**: there are as many `strides` as dimensions, and they are dense:
    each element of one storage is an element of the buffer, except that a
    dimension of stride 0 has the same elements at every index.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name,
                       TypeAttrOf<AnyRankedTensor>:$type,
                       UnitAttr:$non_persistent,
                       OptionalAttr<DenseI64ArrayAttr>:$strides);
  let assemblyFormat = "$sym_name `:` $type attr-dict";
  let hasVerifier = 1;
}

def FSDP_OptimizerOp : FSDP_Op<"optimizer"> {
  let summary = "Policy: the optimizer, with torch.optim's names and defaults";
  let description = [{
    ```mlir
    fsdp.optimizer "adamw" {lr = 1.0e-3, weight_decay = 0.1, fused = true}
    ```

    `fused` selects torch.optim's fused kernel, `foreach` its update of all
    parameters at once, which rounds numbers to half precision if the parameters
    have it. `plugin` is the user's own optimizer in the
    shared library `library` (fsdp/Runtime/Optimizer/OptimizerPlugin.h), with
    `lr` and any other numbers as hyperparameters. `external` is an optimizer
    that the caller of the step runs; it has no hyperparameters.

    **Optimizer-1**: the name is `adam`, `adamw`, `sgd`, `plugin` or `external`,
    and each hyperparameter is one that this optimizer has, of its type and in
    its range.
    **Optimizer-2**: `fused` and `foreach` are not both set; Nesterov momentum
    has a momentum and no dampening.
  }];
  let arguments = (ins StrAttr:$name, DictionaryAttr:$hyperparameters);
  let assemblyFormat = "$name $hyperparameters attr-dict";
  let hasVerifier = 1;
}

//===----------------------------------------------------------------------===//
// The program
//===----------------------------------------------------------------------===//

def FSDP_ProgramOp : FSDP_Op<"program",
    [FunctionOpInterface, IsolatedFromAbove, AffineScope,
     DeclareOpInterfaceMethods<OpAsmOpInterface, ["getAsmBlockArgumentNames"]>]> {
  let summary = "A training step, an evaluation or the initialisation, the same on every rank";
  let description = [{
    The program with a result is the training step. Its arguments are this
    rank's batch; its one result is the loss. The body is a single block in
    execution order, divided by `fsdp.phase`.

    The program without a result, if the module has one, initialises the
    parameters and buffers. It has no arguments and no phases; it computes whole
    values and writes them with `fsdp.write_param` and `fsdp.write_buffer`.

    ```mlir
    fsdp.program @init() {
      %0 = aten.call "aten::empty.memory_format"([4], 6, none, device, none, none) : () -> tensor<4xf32>
      %1 = aten.call "aten::normal_"(%0, 0.0, 1.0, none) {mutates = array<i64: 0>, random, views = array<i64: 0>} : (tensor<4xf32>) -> tensor<4xf32>
      fsdp.write_param @w, %1 : tensor<4xf32>
      fsdp.return
    }
    ```

    The program marked `evaluation`, if the module has one, is forward only: the
    loss of a batch, as the model computes it in eval mode. Its arguments have
    the types of the training step's arguments. It has no phases, and reshards
    everything that it gathers before it returns.

    ```mlir
    fsdp.program @evaluate(%x: tensor<2x4xf32>) -> tensor<f32> attributes {evaluation} {
      %w = fsdp.read @w : tensor<4xf32>
      %0 = aten.call "aten::mul.Tensor"(%x, %w) : (tensor<2x4xf32>, tensor<4xf32>) -> tensor<2x4xf32>
      %1 = aten.call "aten::sum"(%0, none) : (tensor<2x4xf32>) -> tensor<f32>
      fsdp.return %1 : tensor<f32>
    }
    ```

    The verifier scans the body once and proves that

    - **Program-1**: phases come in the order forward, backward, optimizer;
    - **Program-2**: the value of a gathered parameter, or a view of it, is not
      used after its reshard;
    - **Program-3**: a unit is not gathered while it already is, a gather is
      resharded at most once, and no unit is gathered when the optimizer phase
      begins;
    - **Program-9**: a unit's first gather is `when %first` and its last reshard
      `when %last`, both or neither, and no other gather or reshard has a
      condition; the results that are kept are those of the unit's last gather;
    - **Program-19**: a result of an op with a condition is used only under the
      same condition, or yielded as a result of the loop; this includes waiting
      for it and freeing it;
    - **Program-4**: the gradient of a parameter is reduced at most once,
      all-reduced at most once over an axis, accumulated, unscaled and clipped
      at most once, and used for at most one update;
    - **Program-5**: no value is used after `fsdp.free`, or freed twice;
    - **Program-6**: a frozen parameter gets no gradient, nor does one that an
      `fsdp.no_gradient` names;
    - **Program-14**: if a training step has a backward, every other parameter
      gets a gradient: `fsdp.gradients` or `fsdp.optimizer_step` names it, or,
      in a program with neither, `fsdp.reduce_scatter`;
    - **Program-7**: only the program without a result writes parameters and
      buffers, each at most once; it has no arguments, and its only other ops
      are `aten.call` and `fsdp.free`;
    - **Program-10**: a future is waited for exactly once;
    - **Program-11**: what a collective in flight reads is neither freed nor
      written before the wait for the collective;
    - **Program-12**: after the `fsdp.offload_activation` of a storage, only
      `fsdp.free` uses values of that storage;
    - **Program-13**: no call writes the storage of a parameter, read or
      gathered, or a view of it;
    - **Program-15**: an argument has as many `fsdp.strides` as dimensions; they
      are dense, and none of them is 0;
    - **Program-16**: when a plan is emitted, no policy is left that a pass
      applies: units and their patterns, placements, ignored parameters,
      checkpoints, activations to offload, clipping; and the training step
      contains what accumulation, loss scaling and `cpu_offload` ask for;
    - **Program-17**: `fsdp.unscale`, `fsdp.clip_grad_norm` and
      `fsdp.optimizer_step` are in the optimizer phase and in no other, in this
      order; `fsdp.all_gather`, `fsdp.reduce_scatter` and `fsdp.accumulate` come
      before it;
    - **Program-18**: if an op gives a result as the gradient of one parameter,
      no other op takes it as the gradient of another;
    - **Program-20**: there is at most one loop over microbatches, which gives
      the loss; forward and backward are in it, and the optimizer phase comes
      after it;
    - **Program-8**: an evaluation has a result, but no phases, gradients,
      optimizer step or offloaded activations; it keeps no parameters, in part
      or for a next microbatch; and it has the training step's argument types.
  }];
  let arguments = (ins SymbolNameAttr:$sym_name,
                       TypeAttrOf<FunctionType>:$function_type,
                       UnitAttr:$evaluation,
                       OptionalAttr<DictArrayAttr>:$arg_attrs,
                       OptionalAttr<DictArrayAttr>:$res_attrs);
  let regions = (region AnyRegion:$body);
  let hasCustomAssemblyFormat = 1;
  let hasRegionVerifier = 1;
  let extraClassDeclaration = [{
    ::mlir::Region *getCallableRegion() { return &getBody(); }
    ::llvm::ArrayRef<::mlir::Type> getArgumentTypes() {
      return getFunctionType().getInputs();
    }
    ::llvm::ArrayRef<::mlir::Type> getResultTypes() {
      return getFunctionType().getResults();
    }
  }];
}

def FSDP_ReturnOp : FSDP_Op<"return",
    [Pure, Terminator, HasParent<"ProgramOp">]> {
  let summary = "Ends the program: a step returns the loss of this rank";
  let arguments = (ins Optional<AnyRankedTensor>:$loss);
  let assemblyFormat = "attr-dict ($loss^ `:` type($loss))?";
  let hasVerifier = 1;
}

def FSDP_PhaseOp : FSDP_Op<"phase",
    [FSDP_InProgram, MemoryEffects<[MemWrite<FSDP_CommResource>]>]> {
  let summary = "Marks where a phase of the step begins";
  let arguments = (ins FSDP_PhaseAttr:$phase);
  let assemblyFormat = "$phase attr-dict";
}

def FSDP_ReadOp : FSDP_Op<"read", [
    FSDP_NamedResults, FSDP_InProgram,
    MemoryEffects<[MemRead<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Reads a parameter: whole, or this rank's shard of it";
  let description = [{
    ```mlir
    %w = fsdp.read @wq : tensor<64x64xf32>
    %s = fsdp.read @wq : !fsdp.sharded<tensor<64x64xf32>, <@world, [{"shard"}, {} ]>>
    ```

    **Read-1**: the type is that of the parameter in its compute dtype, or its
    sharded type.
  }];
  let arguments = (ins FlatSymbolRefAttr:$param);
  let results = (outs FSDP_TensorOrSharded:$result);
  let assemblyFormat = "$param attr-dict `:` type($result)";
}

def FSDP_ReadBufferOp : FSDP_Op<"read_buffer", [
    FSDP_NamedResults, FSDP_InProgram,
    MemoryEffects<[MemRead<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Binds a buffer; ops that mutate the value mutate the buffer";
  let description = [{
    **ReadBuffer-1**: the type is that of the buffer.
  }];
  let arguments = (ins FlatSymbolRefAttr:$buffer);
  let results = (outs AnyRankedTensor:$result);
  let assemblyFormat = "$buffer attr-dict `:` type($result)";
}

def FSDP_GradientsOp : FSDP_Op<"gradients", [HasParent<"ProgramOp">,
    MemoryEffects<[MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "The gradients of a step's parameters, the end of backward";
  let description = [{
    Takes the gradient of every parameter that has one, in the order of the
    parameters in the module, until `fsdp-insert-optimizer` replaces the op by
    the update. The type of an operand says what is left to do:

    - `tensor<…>`: a rank's own gradient of the whole parameter, a term of the
      sum over all ranks; of an `ignored` parameter it is the gradient itself;
    - `!fsdp.sharded<…, partial [axes]>`: this rank's part, reduced over the
      axes that shard the parameter, but not over those named;
    - `!fsdp.sharded<…>`: this rank's part of the gradient.

    ```mlir
    fsdp.gradients [@w, @b] %g0, %g1 : tensor<4x4xf32>, tensor<4xf32>
    ```

    **Gradients-1**: there are as many operands as parameters, and the
    parameters are in the order of the module; each operand has its parameter's
    type, in the dtype of its gradient or of sums over microbatches, or its
    sharded type, which may be partial along axes of the mesh. **Gradients-2**:
    the op comes right before the program's `fsdp.return`.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_TensorOrSharded>:$grads);
  let assemblyFormat = "$param_names $grads attr-dict (`:` type($grads)^)?";
  let hasVerifier = 1;
}

def FSDP_NoGradientOp : FSDP_Op<"no_gradient", [HasParent<"ProgramOp">,
    MemoryEffects<[MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "The loss does not depend on these parameters";
  let description = [{
    They could have a gradient and have none (PyTorch's `grad` is None), so the
    optimizer leaves them alone.

    ```mlir
    fsdp.no_gradient [@position_bias]
    ```

    **NoGradient-1**: each is a parameter of the module that is not `frozen`, and
    is named once.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names);
  let assemblyFormat = "$param_names attr-dict";
}

def FSDP_WriteParamOp : FSDP_Op<"write_param", [HasParent<"ProgramOp">,
    MemoryEffects<[MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Initialises a parameter; each rank keeps its rows of the value";
  let description = [{
    ```mlir
    fsdp.write_param @wq, %0 : tensor<64x64xf32>
    ```

    **WriteParam-1**: the type is that of the parameter.
  }];
  let arguments = (ins FlatSymbolRefAttr:$param, AnyRankedTensor:$value);
  let assemblyFormat = "$param `,` $value attr-dict `:` type($value)";
}

def FSDP_WriteBufferOp : FSDP_Op<"write_buffer", [HasParent<"ProgramOp">,
    MemoryEffects<[MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Initialises a buffer";
  let description = [{
    **WriteBuffer-1**: the type is that of the buffer.
  }];
  let arguments = (ins FlatSymbolRefAttr:$buffer, AnyRankedTensor:$value);
  let assemblyFormat = "$buffer `,` $value attr-dict `:` type($value)";
}

def FSDP_OptimizerStepOp : FSDP_Op<"optimizer_step", [HasParent<"ProgramOp">,
    MemoryEffects<[MemRead<FSDP_StateResource>, MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Updates the shards of parameters from their gradients' shards";
  let description = [{
    The update is that of the module's `fsdp.optimizer`. `groups` has each
    parameter's group: 0 means the optimizer's own hyperparameters, n those of
    the n-th `fsdp.param_group`; without it, all are 0. An ignored parameter is
    updated whole, by this rank's gradient.

    **OptimizerStep-1**: there are as many gradients as parameters; each has its
    parameter's sharded type, partial along no axis, or the parameter's own type
    if the parameter is ignored.
    **OptimizerStep-2**: the module has one `fsdp.optimizer`.
    **OptimizerStep-3**: `groups` has one group of the module for each
    parameter.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_TensorOrSharded>:$grads,
                       OptionalAttr<DenseI64ArrayAttr>:$groups);
  let assemblyFormat = "$param_names $grads attr-dict `:` type($grads)";
}

include "fsdp/Dialect/FSDPCollectiveOps.td"
include "fsdp/Dialect/FSDPKernelOps.td"
include "fsdp/Dialect/FSDPMicrobatchOps.td"
include "fsdp/Dialect/FSDPPlannedOps.td"
include "fsdp/Dialect/FSDPOffloadOps.td"
include "fsdp/Dialect/FSDPScheduleOps.td"
include "fsdp/Dialect/FSDPTrainingOps.td"

#endif
