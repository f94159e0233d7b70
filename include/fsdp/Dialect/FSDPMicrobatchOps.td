//===- FSDPMicrobatchOps.td - the loop over microbatches ---*- tablegen -*-===//
//
// Included by FSDPOps.td.
//
//===----------------------------------------------------------------------===//
#ifndef FSDP_DIALECT_FSDPMICROBATCHOPS_TD
#define FSDP_DIALECT_FSDPMICROBATCHOPS_TD

def FSDP_MicrobatchesOp : FSDP_Op<"microbatches", [
    DeclareOpInterfaceMethods<OpAsmOpInterface,
        ["getAsmResultNames", "getAsmBlockArgumentNames"]>,
    HasParent<"ProgramOp">, SingleBlock,
    MemoryEffects<[MemRead<FSDP_CommResource>, MemWrite<FSDP_CommResource>,
                   MemRead<FSDP_StateResource>, MemWrite<FSDP_StateResource>]>]> {
  let summary = "Forward and backward of a step's microbatches, one after the other";
  let description = [{
    The region runs `steps` times; what is outside of it runs once. `inputs` are
    the program's arguments; each microbatch takes the next batch from them. The
    block's arguments are that batch, whether the microbatch is the step's
    first, whether it is the last, and the values that the microbatch before
    left (`carry`).

    ```mlir
    %loss, %g = fsdp.microbatches 4(%x) : (tensor<2x4xf32>) -> (tensor<f32>, tensor<4xf32>) {
    ^bb0(%x_0: tensor<2x4xf32>, %first: i1, %last: i1, %before: !fsdp.carried<tensor<4xf32>>):
      …
      %sum = fsdp.accumulate [@w] %grad onto %before : (…) -> (…)
      fsdp.yield %l, %sum : tensor<f32>, tensor<4xf32> carry %sum : tensor<4xf32>
    }
    ```

    The first result is the mean of the losses that the microbatches yield; the
    others are what the last one yields. An op with `when %first` or
    `when %last` runs only in that microbatch.

    **Microbatches-1**: there are at least two microbatches; the block's
    arguments are those above, in number and type, and each input is an argument
    of the program.
    **Microbatches-2**: the block yields the results, the first of which is a
    scalar, and, for each carried argument, a value of its type.
    **Microbatches-3**: `%first` and `%last` are used only as conditions of ops.
  }];
  let arguments = (ins I64Attr:$steps, Variadic<AnyRankedTensor>:$inputs);
  let results = (outs Variadic<FSDP_TensorOrSharded>:$results);
  let regions = (region SizedRegion<1>:$body);
  let assemblyFormat = [{
    $steps `(` $inputs `)` attr-dict `:` functional-type($inputs, $results) $body
  }];
  let hasRegionVerifier = 1;
  let extraClassDeclaration = [{
    ::mlir::Block *getBlock() { return &getBody().front(); }
    ::mlir::BlockArgument getFirst() {
      return getBlock()->getArgument(getInputs().size());
    }
    ::mlir::BlockArgument getLast() {
      return getBlock()->getArgument(getInputs().size() + 1);
    }
    /// The block's arguments that a microbatch takes from the one before.
    ::mlir::Block::BlockArgListType getCarried() {
      return getBlock()->getArguments().drop_front(getInputs().size() + 2);
    }
    YieldOp getYield();
    /// Carries `value` from each microbatch to the next; returns the argument
    /// that it is there.
    ::mlir::BlockArgument carry(::mlir::Value value);
  }];
}

def FSDP_YieldOp : FSDP_Op<"yield", [
    Pure, Terminator, HasParent<"MicrobatchesOp">, AttrSizedOperandSegments]> {
  let summary = "Ends a microbatch: the loop's results, and what the next one takes";
  let arguments = (ins Variadic<FSDP_TensorOrSharded>:$results,
                       Variadic<FSDP_TensorOrSharded>:$carried);
  let assemblyFormat = [{
    $results `:` type($results) (`carry` $carried^ `:` type($carried))? attr-dict
  }];
}

def FSDP_AccumulateOp : FSDP_Op<"accumulate", [
    FSDP_NamedResults, HasParent<"MicrobatchesOp">, AttrSizedOperandSegments,
    MemoryEffects<[MemRead<FSDP_StateResource>, MemWrite<FSDP_StateResource>]>,
    DeclareOpInterfaceMethods<SymbolUserOpInterface>]> {
  let summary = "Adds a microbatch's gradients to the step's";
  let description = [{
    The results are the sums over the step's microbatches up to this one, of
    whole gradients or of shards. Shards are added in their own dtype, whole
    gradients in that of their reduction: the unit's `reduce_dtype`, or without
    one the parameter's own dtype, or the gradient's if the module was captured
    for a PyTorch before 2.15.

    ```mlir
    %a0, %a1 = fsdp.accumulate [@w, @b] %g0, %g1 onto %b0, %b1 : !fsdp.carried<…>, !fsdp.carried<…> : (…) -> (…)
    ```

    In the first microbatch, where nothing is carried, they are copies of the
    operands.

    **Accumulate-1**: there are as many operands and results as parameters.
    Either an operand has its parameter's gradient type, and the result has the
    dtype in which whole gradients are added; or the operand and the result have
    the same type: the parameter's sharded type, or that type partial and in any
    dtype. **Accumulate-2**: the sum that an operand is added to is the result
    itself, carried.
  }];
  let arguments = (ins FlatSymbolRefArrayAttr:$param_names,
                       Variadic<FSDP_TensorOrSharded>:$grads,
                       Variadic<FSDP_CarriedType>:$before);
  let results = (outs Variadic<FSDP_TensorOrSharded>:$sums);
  let assemblyFormat = [{
    $param_names $grads `onto` $before `:` type($before) attr-dict `:`
    functional-type($grads, $sums)
  }];
}

#endif // FSDP_DIALECT_FSDPMICROBATCHOPS_TD
